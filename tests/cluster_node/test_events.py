"""What `kubectl describe` says that happened to a model, in words that a person understands."""

from __future__ import annotations

import re

import pytest

from cluster_node.installation import Installation
from cluster_node.models import ANSWER, linear

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(600)]
MOST = {"deviceMemory": "160Mi"}  # of a pool with 256 MiB: two such models exclude each other


def test_models_that_exclude_each_other_say_what_comes_and_what_goes(installation: Installation, pool: str) -> None:
    with (
        installation.model(linear("left", pool, resources=MOST)) as left,
        installation.model(linear("right", pool, resources=MOST, shift=1.0)) as right,
    ):
        installation.wait_ready(left, right)
        for _ in range(2):  # whichever was the first one to be on the device
            assert installation.ask(left).values == ANSWER
            assert installation.ask(right).values == [7.0, 23.0]
        for model, other in ((left, right), (right, left)):
            patterns = {
                "Assigned": r"assigned to default-0: .+",
                "Woken": r"woken in \d+\.\d+ s",
                "Evicted": rf"evicted for .*{other}.*",
            }

            def are_told(model: str = model, patterns: dict[str, str] = patterns) -> bool:
                told = installation.events(model)
                return all(any(reason == r and re.fullmatch(p, m) for r, m in told) for reason, p in patterns.items())

            installation.until(are_told, f"the events of {model}", 60)
        plan = installation.omni("plan")
        assert "never resident together in default-0" in plan
        for model in (left, right):
            (assigned,) = installation.get("omnimodel", model)["status"]["assigned"]
            assert assigned["why"] in plan
