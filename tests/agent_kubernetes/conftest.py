"""A namespace with a pool on a real API server, and the controller of one pod with an agent that only remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_kubernetes.world import Catalogue, Line
from cluster.connection import Connection
from controllers.standin import StandInAgent
from omnimodel.controllers.agent_kubernetes import PodController
from omnimodel.controllers.agent_kubernetes_status import PodIdentity
from omnimodel.kube import Kube


@dataclass
class Pod:
    """One pod's agent and controller."""

    agent: StandInAgent
    controller: PodController
    kube: Kube
    task: asyncio.Task[None]

    @property
    def writes(self) -> int:
        """How often it has written to the API server, heartbeats and events aside."""
        return sum(
            count
            for (verb, plural), count in self.kube.calls.items()
            if verb not in {"get", "list", "watch"} and plural not in {"leases", "events"}
        )


@pytest.fixture
async def kube(api_cluster: Connection) -> AsyncIterator[Kube]:
    async with await Kube.connect(str(api_cluster.kubeconfig)) as kube:
        yield kube


@pytest.fixture
async def catalogue(kube: Kube, namespace: str) -> Catalogue:
    found = Catalogue(kube, namespace)
    await found.pool()
    return found


@pytest.fixture
async def line(api_cluster: Connection, tmp_path: Path) -> AsyncIterator[Line]:
    line = Line(api_cluster.kubeconfig, tmp_path)
    await line.mend()
    yield line
    await line.cut()


@pytest.fixture
async def start(catalogue: Catalogue, line: Line, tmp_path: Path) -> AsyncIterator[Callable]:
    """Starts the controller of a pod; `stop` ends one as a crash does."""
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def running(name: str = "default-0", agent: StandInAgent | None = None) -> AsyncIterator[Pod]:
            state_dir = tmp_path / name
            state_dir.mkdir(exist_ok=True)
            agent = agent or StandInAgent()
            identity = PodIdentity(name, catalogue.namespace, "default", catalogue.namespace)
            async with await Kube.connect(str(line.kubeconfig), component="agent") as own:
                controller = PodController(own, agent, identity, state_dir, memory=tmp_path)
                task = asyncio.create_task(controller.run())
                try:
                    yield Pod(agent, controller, own, task)
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

        async def start(name: str = "default-0", agent: StandInAgent | None = None) -> Pod:
            return await stack.enter_async_context(running(name, agent))

        yield start
