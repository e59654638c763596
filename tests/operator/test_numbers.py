"""The operator's metrics, as they stand on its page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from kube.world import Probed, until
from omnimodel.controllers.kubernetes import Operator, OperatorSettings
from omnimodel.kube import Kube

CLUSTER = {"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}
CONTEXT = {"name": "none", "context": {"cluster": "none", "user": "none"}}


class Page(Probed):
    """The metrics of an operator that does not listen."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    async def ask(self, path: str) -> tuple[int, str]:
        """The page, whatever is asked for."""
        return 200, self._operator.numbers.page().decode()


@pytest.fixture
async def operator(tmp_path: Path) -> AsyncIterator[Operator]:
    """An operator that has no cluster: rounds of what is not there need none."""
    users = [{"name": "none", "user": {}}]
    config = {"clusters": [CLUSTER], "contexts": [CONTEXT], "users": users, "current-context": "none"}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    async with await Kube.connect(str(tmp_path / "config")) as kube:
        yield Operator(kube, OperatorSettings(identity="one"))


async def test_the_depth_is_what_waits_for_a_round(operator: Operator) -> None:
    page, queue = Page(operator), operator.reconciler.queue
    assert await page.metric("omni_operator_queue_depth") == 0
    for name in ("a", "b", "a"):
        queue.add(("model", "default", name))
    assert await page.metric("omni_operator_queue_depth") == 2
    work = asyncio.create_task(queue.run(1))

    async def empty() -> bool:
        return await page.metric("omni_operator_queue_depth") == 0

    await until(empty, "both had their round")
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert await page.metric("omni_operator_reconcile_seconds_count", kind="model") == 2
    assert await page.metric("omni_operator_reconcile_seconds_sum", kind="model") > 0
    assert await page.metric("omni_operator_reconcile_failures_total") == 0


async def test_seconds_and_failures_are_counted_by_kind(operator: Operator) -> None:
    page = Page(operator)
    for seconds, error in ((0.3, None), (0.7, RuntimeError("no"))):
        operator._round_done("pool", seconds, error)
    assert await page.metric("omni_operator_reconcile_seconds_count", kind="pool") == 2
    assert await page.metric("omni_operator_reconcile_seconds_sum", kind="pool") == pytest.approx(1.0)
    assert await page.metric("omni_operator_reconcile_seconds_bucket", kind="pool", le="0.5") == 1
    assert await page.metric("omni_operator_reconcile_failures_total", kind="pool") == 1
    assert await page.metric("omni_operator_reconcile_seconds_count", kind="model") == 0


async def test_a_metric_or_label_that_is_not_there_is_no_zero(operator: Operator) -> None:
    page = Page(operator)
    with pytest.raises(AssertionError, match="no metric omni_operator_queue_length"):
        await page.metric("omni_operator_queue_length")
    operator._round_done("pool", 0.3, None)
    with pytest.raises(AssertionError, match="no such labels"):
        await page.metric("omni_operator_reconcile_seconds_count", sort="pool")


async def test_calls_that_were_never_made_are_zero(operator: Operator) -> None:
    assert await Page(operator).metric("omni_operator_api_calls_total", verb="delete", kind="leases") == 0
