"""A gateway that listens on a real port, an agent, and a model's process behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gateway.standin import Agent, Process, System
from gateway.world import World
from omnimodel.gateway.app import create_app, serve
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.gateway.settings import Settings


@pytest.fixture
def settings() -> Settings:
    """What a test may override."""
    return Settings(keepalive_seconds=0.05, drain_seconds=5.0)


@pytest.fixture
async def world(tmp_path: Path, settings: Settings) -> AsyncIterator[World]:
    process = Process(tmp_path / "model.sock")
    await process.start()
    agent, system = Agent(process), System()
    agent.add("smollm2", served_names=("smollm2", "gpt-4o", "HuggingFaceTB/SmolLM2:135m"))
    agent.add("minilm", "embeddings")
    agent.add("whisper", "automatic-speech-recognition")
    agent.add("piper", "text-to-speech")
    agent.add("resnet", "infer", inputs=({"name": "image", "datatype": "FP32", "shape": [-1, 3]},))
    app = create_app(agent, system, settings=settings)
    listening = await serve(app, "127.0.0.1", 0)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    yield World(process, agent, system, session, app[GATEWAY], listening, listening.address)
    process.gate.set()
    await session.close()
    await listening.close()
    await agent.session.close()
    await process.stop()
