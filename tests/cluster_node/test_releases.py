"""Two releases beside each other in one cluster, each with pools and models in namespaces of its own."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.connection import ClusterError
from cluster_node.installation import MINUTES, Installation
from cluster_node.models import ANSWER, linear

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(600)]


def described(installation: Installation) -> dict[str, Any]:
    """What operators write of the pool `default` and the model `first`, each time with another number."""
    named = {"statefulset": "default", "pdb": "default", "service": "default", "omniprocess": "first"}
    found = {kind: installation.get(kind, name)["metadata"] for kind, name in named.items()}
    # A Service has no generation, and nobody else writes it; of the others the status is someone else's.
    return {kind: (item["uid"], item.get("generation", item["resourceVersion"])) for kind, item in found.items()}


def may(installation: Installation, who: str, *asked: str) -> bool:
    """Whether a service account has a right."""
    try:
        installation.cluster.kubectl("auth", "can-i", *asked, f"--as=system:serviceaccount:{who}")
    except ClusterError:
        return False
    return True


def test_each_release_serves_its_own_and_leaves_the_other_alone(installation: Installation, first: str) -> None:
    before = described(installation)
    cluster, images, folder = installation.cluster, installation.images, installation.folder
    other = Installation(cluster, images, folder, "omnimodel-other", ("other-system", "other-models"))
    other.install()
    with other.pool("default") as pool, other.model(linear("first", pool, shift=1.0)) as name:
        other.wait_ready(name)
        assert other.ask(name).values == [7.0, 23.0]
        assert installation.ask(first).values == ANSWER
        with installation.model(linear("alone", "default", shift=2.0)) as alone:
            installation.wait_ready(alone)
            assert installation.ask(alone).values == [8.0, 24.0]
            assert other.ask(alone).status == 404
        for one, theirs in ((installation, other.pods), (other, installation.pods)):
            who = f"{one.system}:{one.release}-operator"
            assert not may(installation, who, "patch", "omnimodels/status", "-n", theirs)
            assert not may(installation, who, "create", "omniprocesses", "-n", theirs)
        # With everything in it: pods that serve, their account, and what the chart has made there.
        cluster.kubectl("delete", "namespace", other.pods, "--wait", MINUTES)
    other.uninstall()
    assert installation.ask(first).values == ANSWER
    assert described(installation) == before
