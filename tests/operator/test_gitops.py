"""What Flux, kubectl and Argo CD read in each phase of a model and of a pool, and that applying twice is no change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.connection import Connection
from kube.agents import Agents
from kube.health import Health, built
from kube.world import World, conditions, is_ready, model, pool, until
from omnimodel.controllers.kubernetes_writes import MANAGER
from omnimodel.kube import MODELS, PODS, POOLS, PROCESSES, STATEFUL_SETS, Kind

pytestmark = pytest.mark.cluster_api
CATALOG = Path(__file__).parents[2] / "examples/catalog"
DONE = ("Current", "Healthy")
UNDER_WAY = ("InProgress", "Progressing")
BROKEN = ("Failed", "Degraded")
HOLD = "example.org/hold"  # a finalizer of someone else


@pytest.fixture(scope="module")
def health(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Health]:
    yield from built(tmp_path_factory.mktemp("health"))


async def settled(world: World, kind: Kind, name: str, wanted: tuple[str, str], health: Health) -> None:
    """Wait until both tools say what is wanted of an object."""
    await until(lambda: health.of(world.see(kind, name)) == wanted, f"{kind.name} {name} is {wanted}")


async def held(world: World, kind: Kind, name: str) -> dict[str, Any]:
    """An object that is being deleted, and let go."""
    await world.kube.merge(kind, name, world.namespace, {"metadata": {"finalizers": [HOLD]}})
    await world.kube.delete(kind, name, world.namespace)
    found: dict[str, Any] = await world.kube.get(kind, name, world.namespace)
    await world.kube.merge(kind, name, world.namespace, {"metadata": {"finalizers": None}})
    return found


async def test_the_phases_of_a_model(world: World, agents: Agents, start, health: Health) -> None:
    """kserve#4791, kserve#6079: in progress for ever, and done before anything was."""
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await until(lambda: world.see(MODELS, "a"), "it is there")
    assert health.of(world.see(MODELS, "a")) == UNDER_WAY, "nobody has looked at it"

    agents.publishing.add("a")
    operator = await start()
    await until(lambda: conditions(world.see(MODELS, "a")).get("Ready") == ("False", "Publishing"), "it publishes")
    assert health.of(world.see(MODELS, "a")) == UNDER_WAY
    agents.publishing.clear()
    await settled(world, MODELS, "a", DONE, health)
    for tier in ("warm", "parked", "cold", "resident"):
        agents.reports["gpu-0", "a"] = {"tier": tier}
        await until(lambda tier=tier: world.see(MODELS, "a")["status"]["residency"][0]["tier"] == tier, tier)
        assert health.of(world.see(MODELS, "a")) == DONE, "asleep or awake"

    agents.reports["gpu-0", "a"] = {"phase": "failed", "reason": "OutOfMemory", "message": "took 3 GiB", "ready": False}
    await settled(world, MODELS, "a", BROKEN, health)
    assert "took 3 GiB" in health.argo(world.see(MODELS, "a"))[1]
    agents.reports.clear()
    await settled(world, MODELS, "a", DONE, health)

    await operator.__aexit__()
    # What a version before this one said last, in words of its own, when it was taken away.
    said = {"lastTransitionTime": "2026-01-01T00:00:00Z", "message": ""}
    kinds = {"Ready": "False", "Reconciling": "True", "Loaded": "False"}
    old = {"conditions": [{"type": t, "status": s, "reason": "Loading", **said} for t, s in kinds.items()]}
    await world.kube.patch_status(MODELS, "a", world.namespace, old, manager=MANAGER)
    await settled(world, MODELS, "a", UNDER_WAY, health)
    operator = await start("upgraded")
    await settled(world, MODELS, "a", DONE, health)
    assert "Loaded" not in conditions(world.see(MODELS, "a"))

    await operator.__aexit__()
    await world.apply(model("a", world.namespace, flavour="edited"))
    await until(lambda: world.see(MODELS, "a")["metadata"]["generation"] == 2, "the edit is there")
    assert health.of(world.see(MODELS, "a")) == UNDER_WAY, "Ready speaks of what was before"
    await start("two")
    await settled(world, MODELS, "a", DONE, health)

    await world.apply(model("a", world.namespace, pool="none"))
    await settled(world, MODELS, "a", BROKEN, health)
    assert "asks for pool none, which does not exist" in health.argo(world.see(MODELS, "a"))[1]
    # kstatus knows no word for it, as for a suspended Job.
    await world.apply(model("a", world.namespace, suspend=True))
    await settled(world, MODELS, "a", ("InProgress", "Suspended"), health)
    assert health.flux(await held(world, MODELS, "a")) == "Terminating"


async def test_the_phases_of_a_pool(world: World, agents: Agents, start, health: Health) -> None:
    await world.apply(pool("gpu", world.namespace))
    await until(lambda: world.see(POOLS, "gpu"), "it is there")
    assert health.of(world.see(POOLS, "gpu")) == UNDER_WAY, "nobody has looked at it"
    agents.held.clear()
    operator = await start()
    await until(lambda: conditions(world.see(POOLS, "gpu")).get("Reconciling") == ("True", "Starting"), "it starts")
    assert health.of(world.see(POOLS, "gpu")) == UNDER_WAY
    agents.held.set()
    await settled(world, POOLS, "gpu", DONE, health)

    await operator.__aexit__()
    await world.apply(pool("gpu", world.namespace, replicas=2))
    await until(lambda: world.see(POOLS, "gpu")["metadata"]["generation"] == 2, "the edit is there")
    assert health.of(world.see(POOLS, "gpu")) == UNDER_WAY, "Ready speaks of what was before"
    agents.silent.add("gpu-1")
    await start("two")
    await until(lambda: world.see(PODS, "gpu-1"), "the second pod")
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    await world.kube.patch_status(PODS, "gpu-1", world.namespace, {"conditions": [said]}, manager="kubelet")
    await settled(world, POOLS, "gpu", BROKEN, health)
    assert "0/3 nodes are available" in health.argo(world.see(POOLS, "gpu"))[1]
    await world.apply(pool("gpu", world.namespace, replicas=0))
    await settled(world, POOLS, "gpu", DONE, health)  # kserve#6079: nothing is under way at zero
    assert health.flux(await held(world, POOLS, "gpu")) == "Terminating"


async def test_a_catalogue_that_serves_is_applied_again_and_nothing_changes(
    world: World, agents: Agents, start, api_cluster: Connection
) -> None:
    """argo-cd#28724: out of sync for ever."""
    await start()

    async def kubectl(*arguments: str) -> str:
        return await asyncio.to_thread(api_cluster.kubectl, *arguments, "-n", world.namespace, "-f", str(CATALOG))

    def versions() -> dict[tuple[str, str], object]:
        # Controllers of the cluster write the status of a StatefulSet whenever they like, and agents that of a pool.
        stamps = {
            MODELS: "resourceVersion",
            PROCESSES: "resourceVersion",
            STATEFUL_SETS: "generation",
            POOLS: "generation",
        }
        return {(k.name, n): item["metadata"][s] for k, s in stamps.items() for n, item in world.all(k).items()}

    two_tools = [("--server-side", f"--field-manager={name}") for name in ("one", "two")]
    for tool in two_tools:
        await kubectl("apply", *tool)
    await until(
        lambda: len(world.all(MODELS)) >= 15 and all(map(is_ready, world.all(MODELS).values())), "all are Ready"
    )
    await until(lambda: all(map(is_ready, world.all(POOLS).values())), "the pool too")
    for tools in (two_tools, [()]):  # () is kubectl's own way, which keeps what it applied in an annotation
        if tools == [()]:
            await kubectl("apply")
        first, last = f"first-{len(tools)}", f"last-{len(tools)}"
        await world.apply(model(first, world.namespace, pool="default"))
        await world.ready(first)
        before = versions()
        for tool in tools:
            assert await kubectl("diff", *tool) == ""
            await kubectl("apply", *tool)
        await world.apply(model(last, world.namespace, pool="default"))  # what came before it has been seen by then
        await world.ready(last)
        after = versions()
        assert {key: after[key] for key in before} == before
