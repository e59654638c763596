"""Fixtures: a namespace seen through watches, agents in its pods, and operators that look after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cluster.connection import Connection
from kube.proxy import Proxy
from kube.world import Agents, OperatorHere, OperatorProcess, World
from omnimodel.kube import Kube


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

        async def begin(name: str = "one", kubeconfig: Path | None = None) -> OperatorHere:
            found = OperatorHere(kubeconfig or api_cluster.kubeconfig, namespace, name)
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
