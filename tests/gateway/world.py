"""What a test of the gateway talks to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway.standin import Agent, Process, System
from omnimodel.gateway.app import Listening, create_app, serve
from omnimodel.gateway.gateway import GATEWAY, Gateway
from omnimodel.gateway.settings import Settings
from omnimodel.protocol.dispatch import Backend


@dataclass
class World:
    """Everything a test talks to."""

    process: Process
    agent: Agent
    system: System
    session: aiohttp.ClientSession
    gateway: Gateway
    listening: Listening
    url: str

    async def post(self, path: str, **more: Any) -> aiohttp.ClientResponse:
        response = await self.session.post(self.url + path, **more)
        await response.read()
        return response

    async def get(self, path: str, **more: Any) -> aiohttp.ClientResponse:
        response = await self.session.get(self.url + path, **more)
        await response.read()
        return response


def stock(agent: Agent) -> None:
    """One model of each task."""
    agent.add("smollm2", served_names=("smollm2", "gpt-4o", "HuggingFaceTB/SmolLM2:135m"))
    agent.add("minilm", "embeddings")
    agent.add("whisper", "automatic-speech-recognition")
    agent.add("piper", "text-to-speech")
    agent.add("resnet", "infer", inputs=({"name": "image", "datatype": "FP32", "shape": [-1, 3]},))


@asynccontextmanager
async def listening_world(
    process: Process, agent: Agent, settings: Settings, backend: Backend | None = None
) -> AsyncIterator[World]:
    """A gateway that listens, before the agent or before another backend that leads to it."""
    system = System()
    app = create_app(backend or agent, system, settings=settings)
    listening = await serve(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield World(process, agent, system, session, app[GATEWAY], listening, listening.address)
        process.gate.set()
    await listening.close()


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        await asyncio.sleep(0.002)
