"""The token of the agents of a namespace: made once, left alone, and made again when it is taken out."""

from __future__ import annotations

import base64

import pytest
from aiohttp import web

from kube.proxy import Proxy, no_trouble, status
from kube.world import TOKEN_SECRET, World, conditions, pool, until
from omnimodel.controllers import kubernetes_reconcile, kubernetes_writes
from omnimodel.kube import POOLS, SECRETS, STATEFUL_SETS

pytestmark = pytest.mark.cluster_api


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that looks at Secrets in every round."""
    monkeypatch.setattr(kubernetes_writes, "TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(kubernetes_reconcile, "FAULT_SECONDS", 0.5)


async def token(world: World) -> str:
    item = await world.kube.get(SECRETS, TOKEN_SECRET, world.namespace) or {}
    return base64.b64decode((item.get("data") or {}).get("token") or "").decode()


async def test_it_is_there_before_the_pods_and_stays_what_it_is(world: World, start) -> None:
    empty = {"metadata": {"name": TOKEN_SECRET, "namespace": world.namespace, "labels": {"of": "chart"}}}
    await world.kube.apply(SECRETS, empty, manager="helm")
    await start()
    await world.kube.create(POOLS, pool("gpu", world.namespace))
    await until(lambda: world.see(STATEFUL_SETS, "gpu"), "pods")
    first = await token(world)
    assert len(first) == 64
    await world.kube.apply(SECRETS, empty, manager="helm")  # an upgrade of the chart
    await world.kube.create(POOLS, pool("other", world.namespace))
    await until(lambda: world.see(STATEFUL_SETS, "other"), "more pods")
    assert await token(world) == first


async def test_one_that_a_person_wrote_stays_and_one_that_is_taken_out_is_made_again(world: World, start) -> None:
    own = {"stringData": {"token": "of a person"}}
    await world.kube.apply(
        SECRETS, {"metadata": {"name": TOKEN_SECRET, "namespace": world.namespace}, **own}, manager="person"
    )
    operator = await start()
    await world.kube.create(POOLS, pool("gpu", world.namespace))
    await until(lambda: world.see(STATEFUL_SETS, "gpu"), "pods")
    assert await token(world) == "of a person"
    await world.kube.merge(SECRETS, TOKEN_SECRET, world.namespace, {"data": {"token": None}})
    operator.operator.reconciler.queue.add(("pool", world.namespace, "gpu"))  # else with the next sweep

    async def made() -> bool:
        return len(await token(world)) == 64

    await until(made, "another one")


@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_a_pool_whose_agents_can_have_none_says_what_to_do(
    world: World, start, proxy: Proxy, method: str
) -> None:
    async def refuse(request: web.Request) -> web.Response | None:
        forbidden = request.method == method and "/secrets/" in request.path
        return status(403, "Forbidden", f'secrets "{TOKEN_SECRET}" is forbidden') if forbidden else None

    proxy.before = refuse
    await start(kubeconfig=proxy.kubeconfig)
    await world.kube.create(POOLS, pool("gpu", world.namespace))
    await until(lambda: conditions(world.see(POOLS, "gpu")).get("Stalled") == ("True", "NotAllowed"), "it says so")
    (said,) = [c["message"] for c in world.see(POOLS, "gpu")["status"]["conditions"] if c["type"] == "Stalled"]
    assert TOKEN_SECRET in said
    assert "agent.namespaces" in said
    assert world.see(STATEFUL_SETS, "gpu") is None, "its pods would answer nobody"
    proxy.before = no_trouble
    await until(lambda: world.see(STATEFUL_SETS, "gpu"), "it heals")
