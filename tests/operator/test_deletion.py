"""Deleting finishes although nobody is left on the node: of a pod, a pool, a whole namespace."""

from __future__ import annotations

from typing import Any

import pytest

from kube.agents import Agents
from kube.world import World, is_ready, model, pool, until
from omnimodel.controllers import kubernetes_children, kubernetes_pods, kubernetes_reconcile
from omnimodel.kube import MODELS, PODS, POOLS, PROCESSES, STATEFUL_SETS, Kind

NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
KINDS = (MODELS, POOLS, PROCESSES, PODS, STATEFUL_SETS)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods with hardly a grace period, and an operator that soon takes an agent for dead."""
    monkeypatch.setattr(kubernetes_children, "GRACE_SECONDS", 1)
    monkeypatch.setattr(kubernetes_pods, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(kubernetes_pods, "SILENT_SECONDS", 8.0)
    monkeypatch.setattr(kubernetes_reconcile, "TICK_SECONDS", 0.2)


async def on_a_node(world: World, agents: Agents, node: Any) -> str:
    """A pool whose only pod is on a node, with a model that serves; the node."""
    name = await node()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await until(lambda: world.see(PODS, "gpu-0"), "the pod")
    await world.bind("gpu-0", name)
    await world.ready("a")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")
    return name


@pytest.mark.parametrize("what", ["pod", "pool", "namespace"])
async def test_deleting_finishes_although_the_node_is_dead(
    world: World, agents: Agents, start, node: Any, hasty, what: str
) -> None:
    await start()
    name = await on_a_node(world, agents, node)
    uid = world.see(PODS, "gpu-0")["metadata"]["uid"]
    agents.silent.add("gpu-0")
    await node.say(name, ready=False)
    if what == "pod":
        await world.kube.delete(PODS, "gpu-0", world.namespace)
        agents.silent.clear()
        await until(lambda: (p := world.see(PODS, "gpu-0")) and p["metadata"]["uid"] != uid, "it is made anew")
        await world.ready("a")
    elif what == "pool":
        await world.kube.delete(POOLS, "gpu", world.namespace)
        await until(lambda: not world.all(PODS) and not world.all(STATEFUL_SETS), "nothing is left of it")
        await world.kube.delete(MODELS, "a", world.namespace)
        await until(lambda: not any(world.all(kind) for kind in KINDS), "nothing is left at all")
    else:
        await world.kube.delete(NAMESPACES, world.namespace)

        async def gone() -> bool:
            return await world.kube.get(NAMESPACES, world.namespace) is None

        await until(gone, "the namespace is gone", 90)
