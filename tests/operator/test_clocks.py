"""Clocks of machines that are wrong: what counts is what the operator hears, by its own watch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from kube.agents import Agents
from kube.world import World, conditions, is_ready, model, pool, until
from omnimodel.controllers import kubernetes_pods, kubernetes_reconcile
from omnimodel.kube import LEASES, MODELS, POOLS, PROCESSES, Election, Kube

pytestmark = pytest.mark.cluster_api
HEARTBEATS = 10  # together longer than what makes a pod silent and lost, and than a lease
BEAT_SECONDS = 0.3


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that misses an agent, and gives its models away, within seconds."""
    monkeypatch.setattr(kubernetes_pods, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(kubernetes_pods, "LOST_SECONDS", 0.5)
    monkeypatch.setattr(kubernetes_pods, "BACK_SECONDS", 0.5)
    monkeypatch.setattr(kubernetes_reconcile, "TICK_SECONDS", 0.2)


def shifted(seconds: Iterator[float]) -> Callable[[], str]:
    """A clock that is off by the next of these at each look."""
    return lambda: (datetime.now(UTC) + timedelta(seconds=next(seconds))).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


DAY = 86400.0


async def test_an_agent_whose_clock_is_wrong_lives_as_long_as_it_is_heard(world: World, agents: Agents, start) -> None:
    agents.clock, agents.beat_seconds = shifted(itertools.cycle([DAY, -365 * DAY, 3600.0, -60.0])), BEAT_SECONDS
    await start()
    await world.apply(pool("gpu", world.namespace, replicas=2), model("a", world.namespace))
    await world.ready("a")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "both pods serve")
    where = world.see(PROCESSES, "a")["spec"]["pods"]
    said: list[object] = []
    world.mirrors[MODELS]._on_change = lambda _, __, item: said.append(conditions(item)["Ready"])
    beats = agents.beats
    await until(lambda: agents.beats >= beats + 2 * HEARTBEATS, "time goes by")
    assert set(said) <= {("True", "Serving")}
    assert world.see(PROCESSES, "a")["spec"]["pods"] == where
    agents.silent |= set(where)  # it is the silence that counts, however new its last word calls itself
    (other,) = {"gpu-0", "gpu-1"} - set(where)
    await until(lambda: world.see(PROCESSES, "a")["spec"]["pods"] == [other], "its models are elsewhere")
    await world.ready("a")


@pytest.mark.parametrize("off_seconds", [DAY, -365 * DAY], ids=["ahead", "behind"])
async def test_a_leader_whose_clock_is_wrong_leads_as_long_as_it_renews(world: World, off_seconds: float) -> None:
    now = shifted(itertools.repeat(off_seconds))
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 1, "acquireTime": now(), "renewTime": now()}
    await world.kube.create(LEASES, {"metadata": {"name": "leader", "namespace": world.namespace}, "spec": spec})

    async def renew(kube: Kube) -> None:
        for _ in range(HEARTBEATS):
            await kube.merge(LEASES, "leader", world.namespace, {"spec": {"renewTime": now()}})
            await asyncio.sleep(BEAT_SECONDS)

    election = Election(
        world.kube, world.namespace, "leader", "one", lease_seconds=1, renew_seconds=0.8, retry_seconds=0.05
    )
    task = asyncio.create_task(election.run())
    try:
        await renew(world.kube)
        assert election.holder == "other"
        assert not election.leads
        await until(lambda: election.leads, "it leads when the other is heard no more")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
