"""Deleting finishes, whoever is away or holds on to something, and what is gone is asked for no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from cluster.connection import Connection
from kube.agents import Agents
from kube.proxy import Proxy, status
from kube.world import World, conditions, is_ready, model, pool, until
from omnimodel.controllers import kubernetes_children, kubernetes_pods, kubernetes_reconcile
from omnimodel.kube import MODELS, NODES, PODS, POOLS, PROCESSES, STATEFUL_SETS, Kind

NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
KINDS = (MODELS, POOLS, PROCESSES, PODS, STATEFUL_SETS)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, agents: Agents) -> None:
    """Pods with hardly a grace period, and an operator that soon takes an agent for dead."""
    agents.beat_seconds = 1.0
    monkeypatch.setattr(kubernetes_children, "GRACE_SECONDS", 1)
    monkeypatch.setattr(kubernetes_pods, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(kubernetes_pods, "SILENT_SECONDS", 4.0)
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


@pytest.mark.parametrize(
    ("what", "left"),
    [
        pytest.param("pod", "silent", id="pod"),
        pytest.param("pool", "silent", id="pool"),
        pytest.param("namespace", "silent", id="namespace"),
        pytest.param("pod", "deleted", id="pod, its Node deleted"),
        pytest.param("pool", "deleted", id="pool, its Node deleted"),
    ],
)
async def test_deleting_finishes_although_the_node_is_dead(
    world: World, agents: Agents, start, node: Any, hasty, what: str, left: str
) -> None:
    await start()
    name = await on_a_node(world, agents, node)
    uid = world.see(PODS, "gpu-0")["metadata"]["uid"]
    agents.silent.add("gpu-0")
    if left == "deleted":
        await world.kube.delete(NODES, name)
    else:
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


async def test_what_never_served_is_deleted_like_what_does(world: World, agents: Agents, start) -> None:
    """seldon#5043, seldon#4768: the finalizers of models that had failed or had no place were never taken off."""
    await start()
    agents.silent.add("away-0")
    await world.apply(
        pool("gpu", world.namespace),
        model("large", world.namespace, resources={"deviceMemory": "8Gi"}),
        model("wide", world.namespace, resources={"devices": 2}, runtime={"engine": "llamacpp"}),
        model("poolless", world.namespace, pool="none"),
        pool("away", world.namespace, pod={"nodeSelector": {"nowhere": "found"}}),
        model("waits", world.namespace, pool="away"),
        model("a", world.namespace),
    )
    await world.ready("a")
    for name, reason in (("large", "TooLarge"), ("wide", "TooLarge"), ("poolless", "PoolNotFound")):
        stalled = ("True", reason)
        await until(lambda name=name, s=stalled: conditions(world.see(MODELS, name)).get("Stalled") == s, reason)
    await until(lambda: (world.see(PODS, "away-0") or {}).get("status", {}).get("phase") == "Pending", "no node has it")
    await until(lambda: world.see(PROCESSES, "waits"), "it is assigned all the same")
    for kind, name in (*((MODELS, name) for name in ("large", "wide", "poolless", "waits")), (POOLS, "away")):
        await world.kube.delete(kind, name, world.namespace)
    await until(lambda: set(world.all(MODELS)) == set(world.all(PROCESSES)) == {"a"}, "the models and their processes")
    await until(lambda: set(world.all(POOLS)) == set(world.all(STATEFUL_SETS)) == {"gpu"}, "the pool")
    await until(lambda: set(world.all(PODS)) == {"gpu-0"}, "its pod")
    await world.ready("a")


@pytest.mark.slow
async def test_deleted_by_force_in_each_phase_while_the_operator_is_restarted(
    world: World, agents: Agents, proxy: Proxy, start_process
) -> None:
    """dask-kubernetes#810: handlers went on for what was gone, and long work began again from the top."""
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response | None:
        if request.query.get("watch") != "true":
            asked.append(f"{request.method} {request.path}")
        return None

    operator = await start_process("one", proxy.kubeconfig)
    loads: dict[str, set[str]] = {}

    def load(key: tuple[str, str], _: object, item: Any) -> None:
        if item is not None:
            loads.setdefault(key[1], set()).add(item["metadata"]["uid"])

    world.mirrors[PROCESSES]._on_change = load
    agents.publishing.add("publishes")
    gone = ("poolless", "publishes", "edited", "serves")
    await world.apply(
        pool("gpu", world.namespace),
        model("poolless", world.namespace, pool="none"),
        *(model(name, world.namespace) for name in (*gone[1:], "stays")),
    )
    await world.ready("edited", "serves", "stays")
    await until(lambda: world.see(PROCESSES, "publishes"), "it is being loaded")
    agents.held.clear()
    await world.apply(model("edited", world.namespace, flavour="new"))

    async def restart() -> None:
        starts = operator.starts
        operator.kill()
        await until(lambda: operator.starts > starts, "it is started anew")

    for name in gone:
        operator.kill()
        await world.kube.delete(MODELS, name, world.namespace, grace_seconds=0)
        await restart()
        await until(lambda name=name: not world.see(PROCESSES, name), "its process is gone")
    agents.held.set()

    async def leads() -> bool:
        return await operator.metric("omni_operator_leader") == 1

    await restart()
    await until(leads, "it leads, and has seen everything")
    proxy.before = note
    await world.apply(model("stays", world.namespace, flavour="last"))
    await world.ready("stays")
    assert set(world.all(MODELS)) == set(world.all(PROCESSES)) == {"stays"}
    assert {name: len(uids) for name, uids in loads.items()} == dict.fromkeys((*gone[1:], "stays"), 1), "no second load"
    assert [call for call in asked if call.rpartition("/")[2] in gone] == []
    assert len(asked) < 60, asked


@pytest.mark.parametrize("cascade", ["foreground", "background"])
async def test_a_pool_that_is_deleted_is_not_made_anew_meanwhile(
    world: World, agents: Agents, start, api_cluster: Connection, cascade: str
) -> None:
    """dynamo#8204: children were deleted first, and made anew because their owner was still there."""
    await start()
    await world.apply(pool("gpu", world.namespace, replicas=2), model("a", world.namespace))
    await world.ready("a")
    seen = {item["metadata"]["uid"] for item in world.all(STATEFUL_SETS).values()}
    world.mirrors[STATEFUL_SETS]._on_change = lambda _, __, item: seen.add(item["metadata"]["uid"] if item else "")
    order = ("delete", "omnipools,omnimodels", "--all", f"--cascade={cascade}", "--timeout=30s", "-n", world.namespace)
    await asyncio.to_thread(api_cluster.kubectl, *order)
    await until(lambda: not any(world.all(kind) for kind in KINDS), "nothing is left")
    assert len(seen - {""}) == 1


async def test_a_model_that_someone_else_holds_gives_back_what_it_had(world: World, agents: Agents, start) -> None:
    """kserve#5885: an object that cannot go yet held on to everything."""
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    await world.kube.merge(MODELS, "a", world.namespace, {"metadata": {"finalizers": ["example.org/hold"]}})
    await world.kube.delete(MODELS, "a", world.namespace)
    await until(lambda: not world.all(PROCESSES), "its process is gone")
    assert world.see(MODELS, "a")["metadata"]["deletionTimestamp"]
    await world.kube.merge(MODELS, "a", world.namespace, {"metadata": {"finalizers": None}})
    await until(lambda: not world.all(MODELS), "nothing of ours holds it")


async def test_what_is_gone_is_asked_for_no_more(world: World, agents: Agents, proxy: Proxy, start) -> None:
    """dask-kubernetes#810: 40,000 attempts at an object that was deleted while its handler failed."""
    attempts = 0

    async def broken(request: web.Request) -> web.Response | None:
        nonlocal attempts
        if request.method == "GET" or not request.path.endswith("/omniprocesses/a"):
            return None
        attempts += 1
        return status(500, "InternalError", "no")

    proxy.before = broken
    here = await start("one", proxy.kubeconfig)
    queue = here.operator.reconciler.queue
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace), model("b", world.namespace))
    await world.ready("b")
    await until(lambda: attempts >= 3, "it fails again and again")
    await world.kube.delete(MODELS, "a", world.namespace)
    await until(lambda: here.operator.cache.model((world.namespace, "a")) is None, "the operator knows")
    before = attempts
    await until(lambda: ("model", world.namespace, "a") not in queue._timers, "its turn has come once more")
    await here.operator.sweep()
    await world.apply(model("b", world.namespace, flavour="last"))
    await world.ready("b")
    assert attempts <= before + 1, "the one that was under way"
