"""An API server whose store is full: it reads, and refuses every write."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from cluster.cluster import Cluster
from cluster.connection import Connection
from kube.agents import Agents
from kube.world import World, conditions, model, pool, until
from omnimodel.kube import MODELS, PODS, PROCESSES, KubeError

pytestmark = pytest.mark.cluster_api


class Store:
    """etcd of a cluster, where it listens."""

    def __init__(self, session: aiohttp.ClientSession, port: str) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}/v3"

    async def alarm(self, action: str) -> None:
        """Say that there is no room left (ACTIVATE), or that there is again (DEACTIVATE)."""
        members = (await self._ask("cluster/member/list"))["members"]
        await self._ask("maintenance/alarm", action=action, memberID=members[0]["ID"], alarm="NOSPACE")

    async def _ask(self, what: str, **body: str) -> Any:
        async with self._session.post(f"{self._url}/{what}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json(content_type=None)


@pytest.fixture
async def store(api_cluster: Connection) -> AsyncIterator[Store]:
    """The store, which has room again after the test."""
    if not isinstance(api_cluster, Cluster):
        pytest.skip("the store of a cluster that was given is not filled")
    async with aiohttp.ClientSession() as session:
        found = Store(session, str(api_cluster._values["etcd_port"]))
        yield found
        with suppress(AssertionError):  # it has room already
            await found.alarm("DEACTIVATE")


async def test_a_full_store_is_waited_out(world: World, agents: Agents, start_process, store: Store) -> None:
    operator = await start_process()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    pod, pods = world.see(PODS, "gpu-0")["metadata"]["uid"], world.see(PROCESSES, "a")["spec"]["pods"]

    await store.alarm("ACTIVATE")
    with pytest.raises(KubeError, match="space"):
        await world.apply(model("a", world.namespace, flavour="too much"))
    # Who cannot renew its lease must end; its successor cannot take the lease, and waits.
    await until(lambda: operator.starts == 2, "the leader has ended")

    async def has_tried() -> bool:
        return await operator.metric("omni_operator_api_calls_total", verb="update", kind="leases") >= 3

    await until(has_tried, "its successor asks for the lease again and again")
    assert operator.starts == 2, "it is no crash loop"
    assert await operator.metric("omni_operator_leader") == 0
    assert (await operator.ask("/healthz"))[0] == 200
    code, why = await operator.ask("/readyz")
    assert (code, "database space exceeded; the API server's store is full: compact" in why) == (503, True), why
    assert conditions(world.see(MODELS, "a"))["Ready"] == ("True", "Serving"), "what serves, serves"

    await store.alarm("DEACTIVATE")
    await world.apply(model("b", world.namespace), model("a", world.namespace, flavour="after all"))
    await until(lambda: world.see(PROCESSES, "a")["spec"]["options"] == {"flavour": "after all"}, "the edit")
    await world.ready("a", "b")
    assert (await operator.ask("/readyz"))[0] == 200
    assert operator.starts == 2
    assert world.see(PROCESSES, "a")["spec"]["pods"] == pods, "nothing has moved"
    assert world.see(PODS, "gpu-0")["metadata"]["uid"] == pod, "and no pod was made anew"
