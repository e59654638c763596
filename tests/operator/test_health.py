"""Whether an operator is alive, ready and the one that writes: dead watches, missing and old CRDs, a leader asleep."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster.connection import Connection
from cluster.fixtures import own_namespace
from kube.agents import Agents
from kube.proxy import WRITES, Proxy, no_trouble
from kube.world import World, conditions, model, pool, until
from omnimodel.controllers import kubernetes, kubernetes_health
from omnimodel.kube import LEASES, MODELS, PROCESSES

GROUP = "/apis/omnimodel.io/v1alpha1"


async def test_a_dead_watch_is_noticed_and_so_is_its_end(
    world: World, proxy: Proxy, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that stay open and say nothing."""
    monkeypatch.setattr(kubernetes_health, "DEAF_SECONDS", 2.0)
    monkeypatch.setattr(kubernetes, "CANARY_SECONDS", 0.5)
    here = await start("one", proxy.kubeconfig)

    async def ready() -> bool:
        return (await here.ask("/readyz"))[0] == 200

    async def alive() -> bool:
        return (await here.ask("/healthz"))[0] == 200

    async def deaf() -> bool:
        code, text = await here.ask("/healthz")
        return code == 503 and "watches are dead" in text and "leases" in text

    await until(ready, "it is ready")
    await world.apply(pool("gpu", world.namespace))
    assert await alive()
    proxy.flowing.clear()
    await until(deaf, "the canary does not come back")
    assert await here.metric("omni_operator_watch_age_seconds", kind="leases") > 1.0
    proxy.flowing.set()
    await until(alive, "the watch speaks again")


@pytest.fixture
def elsewhere(api_cluster: Connection) -> Iterator[str]:
    """A namespace that no operator looks after."""
    yield from own_namespace(api_cluster)


async def test_a_dead_watch_is_noticed_where_the_operator_has_no_canary(
    world: World, agents: Agents, proxy: Proxy, elsewhere: str, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that does not look after its own namespace: agents renew leases, and a sweep finds them."""
    monkeypatch.setattr(kubernetes_health, "DEAF_SECONDS", 2.0)
    agents.beat_seconds = 0.2
    here = await start("one", proxy.kubeconfig, own_namespace=elsewhere, sweep_seconds=0.5)
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")

    async def alive() -> bool:
        return (await here.ask("/healthz"))[0] == 200

    async def deaf() -> bool:
        code, text = await here.ask("/healthz")
        return code == 503 and f"leases in {world.namespace}" in text

    assert await alive()
    proxy.flowing.clear()
    await until(deaf, "what a sweep found does not come by the watch")
    proxy.flowing.set()
    await until(alive, "the watch speaks again")
    leases = (await world.kube.list(LEASES, elsewhere)).items
    assert [lease["metadata"]["name"] for lease in leases] == ["omnimodel-operator"], "the one it leads by"


def test_a_dead_watch_of_one_namespace_is_not_hidden_by_that_of_another() -> None:
    now = 0.0
    hearing = kubernetes_health.Hearing(("team-a", "team-b"), lambda: now)

    def lease(namespace: str, version: int) -> dict[str, Any]:
        return {"metadata": {"name": "gpu-0", "namespace": namespace, "resourceVersion": str(version)}}

    hearing.expect(LEASES, lease("team-a", 7))
    hearing.expect(LEASES, lease("team-b", 8))
    now = 1.0
    assert hearing.ages() == {"leases": 1.0}, "one that never brought anything is the older for it"
    hearing.heard(LEASES, lease("team-b", 9))
    now = kubernetes_health.DEAF_SECONDS + 2.0
    assert hearing.deaf() == ["leases in team-a"]
    assert hearing.ages() == {"leases": now - 1.0}
    hearing.heard(LEASES, lease("team-a", 7))
    assert hearing.deaf() == []


async def test_without_the_crds_it_waits_and_goes_on_when_they_come(
    world: World, agents: Agents, proxy: Proxy, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "WAIT_SECONDS", 0.2)

    async def without(request: web.Request) -> web.Response | None:
        if request.path != GROUP:
            return None
        return web.json_response({"kind": "APIResourceList", "resources": [{"name": "omnimodels"}]})

    proxy.before = without
    here = await start("one", proxy.kubeconfig)

    async def waits() -> bool:
        code, text = await here.ask("/readyz")
        return code == 503 and "CRDs omnipools, omniprocesses" in text and "install them with the chart" in text

    await until(waits, "it says what it waits for")
    assert (await here.ask("/healthz"))[0] == 200
    proxy.before = no_trouble
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    assert (await here.ask("/readyz"))[0] == 200


async def test_crds_that_are_too_old_stall_what_is_new_and_heal(
    world: World, agents: Agents, proxy: Proxy, start
) -> None:
    here = await start("one", proxy.kubeconfig)
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    process = world.see(PROCESSES, "a")["spec"]

    async def old(request: web.Request) -> web.Response | None:
        if not request.path.endswith("/customresourcedefinitions/omnipools.omnimodel.io"):
            return None
        labels = {"omnimodel.io/schema-version": "0"}
        return web.json_response({"metadata": {"name": "omnipools.omnimodel.io", "labels": labels}})

    proxy.before = old
    await here.operator.sweep()
    await world.apply(model("a", world.namespace, flavour="new"), model("b", world.namespace))
    stalled = ("True", "OutdatedDefinitions")
    for name in "ab":
        await until(lambda name=name: conditions(world.see(MODELS, name)).get("Stalled") == stalled, "it says so")
    text = json.dumps(world.see(MODELS, "b")["status"]["conditions"])
    assert "omnipools.omnimodel.io are older than the operator; upgrade them with the chart" in text
    assert world.see(PROCESSES, "a")["spec"] == process, "what runs is left alone"
    proxy.before = no_trouble
    await here.operator.sweep()
    await world.ready("a", "b")


async def test_a_leader_that_slept_writes_nothing_when_it_wakes(
    world: World, agents: Agents, proxy: Proxy, start_process, api_cluster: Connection, tmp_path: Path
) -> None:
    """A machine that stood still for longer than the lease: by its own clock it leads on."""
    (tmp_path / "other").mkdir()
    async with Proxy(api_cluster.kubeconfig, tmp_path / "other") as apart:
        first = await start_process("first", proxy.kubeconfig)
        await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
        await world.ready("a")
        await start_process("second", apart.kubeconfig)
        written: list[str] = []

        async def note(request: web.Request) -> web.Response | None:
            if request.method in WRITES and "/leases" not in request.path:
                written.append(f"{request.method} {request.path}")
            return None

        async def passed_on() -> bool:
            lease = await world.kube.get(LEASES, "omnimodel-operator", world.namespace)
            return bool(lease["spec"]["holderIdentity"] == "second")

        starts = first.starts
        first.kill(signal.SIGSTOP)
        proxy.before = note
        await until(passed_on, "the other leads")
        await world.apply(model("a", world.namespace, flavour="while it slept"), model("b", world.namespace))
        await world.ready("a", "b")
        first.kill(signal.SIGCONT)
        await until(lambda: first.starts > starts, "it sees that it leads no longer, and ends")
        await world.apply(model("c", world.namespace))
        await world.ready("c")
        assert written == []


async def test_kubectl_wait_after_an_edit_waits_for_the_edit(
    world: World, agents: Agents, start, api_cluster: Connection
) -> None:
    """kubectl#962: a wait passed on what was true before the edit was seen."""
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    wait = ("wait", "--for=condition=Ready", "--timeout=60s", "omnimodel/a", "-n", world.namespace)
    for number in range(20):
        item = model("a", world.namespace, flavour=f"f{number}")
        generation = (await world.kube.apply(MODELS, item, manager="person"))["metadata"]["generation"]
        await asyncio.to_thread(api_cluster.kubectl, *wait)
        found = await world.kube.get(MODELS, "a", world.namespace)
        assert [entry["generation"] for entry in found["status"]["residency"]] == [generation]
