"""The world of tests/gateway, with a network between its gateway and its agent; and a gateway before two agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from gateway.conftest import settings
from gateway.standin import Agent, Process, System
from gateway.world import World, listening_world, stock, until
from gateway_remote.world import Cluster, start_pod
from omnimodel.gateway import remote
from omnimodel.gateway.app import create_app, serve
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.gateway.order import Place
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.gateway.settings import Settings


class TellingAgent(Agent):
    """The stand-in, which tells gateways at once what a test changes."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.reporter = None
        self.backend = None

    def add(self, *args, **more):
        line = super().add(*args, **more)
        self._tell()
        return line

    def change(self, *args, **more):
        super().change(*args, **more)
        self._tell()

    def _tell(self):
        if self.reporter is not None:
            self.reporter.tell()


class FreshBackend(RoutingBackend):
    """Learns what the stand-in knows before it is asked: the tests change it and ask in the same moment."""

    stand_in: TellingAgent

    def models(self):
        return self.stand_in.models()

    def estimate(self, model):
        return self.stand_in.estimate(model)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things loses no agent; a connection that is refused is, at once."""
    monkeypatch.setattr(remote, "CONNECT_SECONDS", 60.0)
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 60.0)


@pytest.fixture
async def world(tmp_path: Path, settings: Settings) -> AsyncIterator[World]:
    process = Process(tmp_path / "model.sock")
    await process.start()
    agent = TellingAgent(process)
    stock(agent)
    pod = await start_pod(tmp_path, "pod-0", process=process, agent=agent)
    agent.reporter = pod.reporter
    backend = FreshBackend()
    backend.stand_in = agent
    backend.set_agents([pod.address])
    await until(lambda: len(backend._by_model) == 5)
    async with listening_world(process, agent, settings, backend) as found:
        yield found
    await backend.close()
    async with asyncio.timeout(10):
        await pod.listening.close()
    await agent.session.close()
    await process.stop()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        pods = []
        for index in range(2):
            pod = await start_pod(tmp_path, f"pod-{index}", Place("eu", f"eu-{index}"))
            stack.push_async_callback(pod.close)
            pods.append(pod)
        backend = RoutingBackend(here=Place("eu", "eu-0"))
        stack.push_async_callback(backend.close)
        backend.set_agents([pod.address for pod in pods])
        app = create_app(backend, System(), settings=Settings(keepalive_seconds=60.0, drain_seconds=2.0))
        listening = await serve(app, "127.0.0.1", 0)
        stack.push_async_callback(listening.close)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Cluster(pods, backend, listening.address, app[GATEWAY], session)
        for pod in pods:
            pod.process.gate.set()


__all__ = ["settings"]  # the fixture of tests/gateway
