"""An operator that dies after each write it makes, whatever it is about: in the end everything is as it should be.

It dies as a task of the test's own process, so that a life takes a second; test_faults.py kills a real process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from kube.agents import Agents
from kube.proxy import WRITES, Proxy, no_trouble, status
from kube.world import OperatorHere, World, conditions, is_ready, model, pool, until
from omnimodel.controllers import kubernetes_pods, kubernetes_reconcile
from omnimodel.kube import MODELS, POOLS, PROCESSES, STATEFUL_SETS

LIVES = 12  # at most; most scenarios need fewer writes
LIFE_SECONDS = 15.0  # without a write: nothing is left to do
QUIET_SECONDS = 5.0  # the same, when what was asked for is done: rounds come several times a second

Scenario = Callable[[World, Agents], Awaitable[Callable[[], bool]]]


async def edit(world: World, agents: Agents) -> Callable[[], bool]:
    del agents
    await world.apply(
        pool("gpu", world.namespace, replicas=2, pod={"nodeSelector": {"gpu": "l4"}}),
        model("a", world.namespace, flavour="new", servedNames=["alias"]),
    )
    template = ("spec", "template", "spec")

    def done() -> bool:
        found = world.see(STATEFUL_SETS, "gpu")
        for name in template:
            found = found[name]
        process = world.see(PROCESSES, "a")["spec"]
        return found.get("nodeSelector") == {"gpu": "l4"} and process["options"] == {"flavour": "new"}

    return done


async def scale_down(world: World, agents: Agents) -> Callable[[], bool]:
    del agents
    await world.apply(pool("gpu", world.namespace, replicas=1))

    def done() -> bool:
        everywhere = [item["spec"]["pods"] for item in world.all(PROCESSES).values()]
        return world.see(STATEFUL_SETS, "gpu")["spec"]["replicas"] == 1 and everywhere == [["gpu-0"]] * 4

    return done


async def move(world: World, agents: Agents) -> Callable[[], bool]:
    agents.silent.add("gpu-1")
    del world

    def done() -> bool:
        return all(item["spec"]["pods"] == ["gpu-0"] for item in agents.world.all(PROCESSES).values()) and all(
            [entry["pod"] for entry in item["status"].get("residency", ())] == ["gpu-0"]
            for item in agents.world.all(MODELS).values()
        )

    return done


async def delete(world: World, agents: Agents) -> Callable[[], bool]:
    del agents
    await world.kube.delete(MODELS, "a", world.namespace)
    await world.apply(model("b", world.namespace, suspend=True), model("new", world.namespace))

    def done() -> bool:
        return set(world.all(PROCESSES)) == {"c", "d", "new"}

    return done


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [edit, scale_down, move, delete])
async def test_killed_after_each_write_it_ends_as_it_should(
    world: World, agents: Agents, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, scenario: Scenario
) -> None:
    monkeypatch.setattr(kubernetes_reconcile, "TICK_SECONDS", 0.3)

    def begin() -> OperatorHere:
        return OperatorHere(proxy.kubeconfig, world.namespace, "one")

    async with begin():
        await world.apply(pool("gpu", world.namespace, replicas=2))
        await until(lambda: is_ready(world.see(POOLS, "gpu")), "both pods are ready")
        await world.apply(*(model(name, world.namespace) for name in "abcd"))
        await world.ready("a", "b", "c", "d")
    if scenario is move:
        agents.beat_seconds = 1.0
        monkeypatch.setattr(kubernetes_pods, "SILENT_SECONDS", 4.0)
        monkeypatch.setattr(kubernetes_pods, "LOST_SECONDS", 0.5)
        monkeypatch.setattr(kubernetes_pods, "BACK_SECONDS", 0.5)
    done = await scenario(world, agents)
    written: list[str] = []
    wrote = asyncio.Event()

    async def one_write(request: web.Request) -> web.Response | None:
        if not _of_round(request):
            return None
        return status(503, "ServiceUnavailable", "this life has written") if wrote.is_set() else None

    async def note(request: web.Request) -> web.Response | None:
        if _of_round(request) and not wrote.is_set():
            written.append(f"{request.method} {request.path}")
            wrote.set()
        return None

    proxy.before, proxy.after = one_write, note
    while len(written) < LIVES:
        wrote.clear()
        life = await begin().__aenter__()
        try:
            async with asyncio.timeout(QUIET_SECONDS if done() else LIFE_SECONDS):
                await wrote.wait()
        except TimeoutError:
            break
        finally:
            await life.crash()
    proxy.before, proxy.after = no_trouble, no_trouble
    assert len(written) >= 2, written
    async with begin():
        await until(done, f"what was asked for, after {written}")
        names = [name for name, item in world.all(MODELS).items() if not item["spec"].get("suspend")]
        await world.ready(*names)
        await until(lambda: is_ready(world.see(POOLS, "gpu")) or scenario is move, "the pool is Ready")
        suspended = [conditions(item)["Ready"] for item in world.all(MODELS).values() if item["spec"].get("suspend")]
        assert suspended in ([], [("False", "Suspended")])


def _of_round(request: web.Request) -> bool:
    """Whether a request is a write of a round: neither of the election nor of the canary, and no event."""
    return request.method in WRITES and "/leases" not in request.path and "/events" not in request.path
