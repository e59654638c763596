"""Fixtures: a namespace seen through watches, agents in its pods, and operators that look after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.connection import Connection
from kube.agents import Agents
from kube.proxy import Proxy
from kube.world import OperatorHere, OperatorProcess, World
from omnimodel.kube import NODES, Kube
from omnimodel.kube.election import micro_time


@pytest.fixture
async def world(api_cluster: Connection, namespace: str) -> AsyncIterator[World]:
    """The test's namespace."""
    async with await Kube.connect(str(api_cluster.kubeconfig)) as kube, World(kube, namespace) as found:
        yield found


@pytest.fixture
async def agents(world: World) -> AsyncIterator[Agents]:
    """An agent in each pod of the namespace."""
    async with Agents(world) as found:
        yield found


@pytest.fixture
async def proxy(api_cluster: Connection, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A way to the API server that can make trouble."""
    async with Proxy(api_cluster.kubeconfig, tmp_path) as found:
        yield found


@pytest.fixture
async def start(api_cluster: Connection, namespace: str) -> AsyncIterator[Callable[..., object]]:
    """Starts operators in this process that look after the namespace."""
    async with AsyncExitStack() as stack:

        async def begin(name: str = "one", kubeconfig: Path | None = None, **settings: Any) -> OperatorHere:
            found = OperatorHere(kubeconfig or api_cluster.kubeconfig, namespace, name, **settings)
            return await stack.enter_async_context(found)

        yield begin


@pytest.fixture
async def start_process(
    api_cluster: Connection, namespace: str, tmp_path: Path
) -> AsyncIterator[Callable[..., object]]:
    """Starts operators as processes, which can be killed and are started anew."""
    async with AsyncExitStack() as stack:

        async def begin(name: str = "one", kubeconfig: Path | None = None, *options: str) -> OperatorProcess:
            found = OperatorProcess(
                kubeconfig or api_cluster.kubeconfig, namespace, name, tmp_path / f"{name}.log", *options
            )
            return await stack.enter_async_context(found)

        yield begin


@pytest.fixture
async def node(world: World, namespace: str) -> AsyncIterator[Callable[..., object]]:
    """Makes nodes without a kubelet; each is in a zone, and ready or not."""
    made: list[str] = []

    async def make(zone: str = "a", *, ready: bool = True) -> str:
        name = f"{namespace}-{len(made)}"
        taint = [{"key": "test", "value": namespace, "effect": "NoSchedule"}]
        labels = {"topology.kubernetes.io/zone": zone}
        await world.kube.create(NODES, {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taint}})
        made.append(name)
        await say(name, ready=ready)
        return name

    async def say(name: str, *, ready: bool) -> None:
        condition = {
            "type": "Ready",
            "status": str(ready),
            "reason": "Test",
            "lastHeartbeatTime": micro_time()[:19] + "Z",
        }
        await world.kube.patch_status(NODES, name, "", {"conditions": [condition]}, manager="kubelet")

    make.say = say  # type: ignore[attr-defined]
    yield make
    for name in made:
        await world.kube.delete(NODES, name)
