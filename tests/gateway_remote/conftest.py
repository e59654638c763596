"""The world of tests/gateway, with a network between its gateway and its agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gateway.standin import Agent, Process, System
from gateway.world import World, until
from gateway_remote.world import start_pod
from omnimodel.gateway.app import create_app, serve
from omnimodel.gateway.gateway import GATEWAY
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


@pytest.fixture
def settings() -> Settings:
    """What a test may override."""
    return Settings(keepalive_seconds=0.05, drain_seconds=5.0)


@pytest.fixture
async def world(tmp_path: Path, settings: Settings) -> AsyncIterator[World]:
    process = Process(tmp_path / "model.sock")
    await process.start()
    agent, system = TellingAgent(process), System()
    agent.add("smollm2", served_names=("smollm2", "gpt-4o", "HuggingFaceTB/SmolLM2:135m"))
    agent.add("minilm", "embeddings")
    agent.add("whisper", "automatic-speech-recognition")
    agent.add("piper", "text-to-speech")
    agent.add("resnet", "infer", inputs=({"name": "image", "datatype": "FP32", "shape": [-1, 3]},))
    pod = await start_pod(tmp_path, "pod-0", process=process, agent=agent)
    agent.reporter = pod.reporter
    backend = FreshBackend()
    backend.stand_in = agent
    backend.set_agents([pod.address])
    await until(lambda: len(backend._by_model) == 5)
    app = create_app(backend, system, settings=settings)
    listening = await serve(app, "127.0.0.1", 0)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    yield World(process, agent, system, session, app[GATEWAY], listening, listening.address)
    process.gate.set()
    await session.close()
    await listening.close()
    await backend.close()
    await asyncio.wait_for(pod.listening.close(), 10)
    await agent.session.close()
    await process.stop()
