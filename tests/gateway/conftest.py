"""A gateway that listens on a real port, an agent, and a model's process behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.standin import Agent, Process
from gateway.world import World, listening_world, stock
from omnimodel.gateway.settings import Settings


@pytest.fixture
def settings() -> Settings:
    """What a test may override; no comment comes between what a test looks at, however slow the machine is."""
    return Settings(keepalive_seconds=60.0, drain_seconds=5.0)


@pytest.fixture
async def world(tmp_path: Path, settings: Settings) -> AsyncIterator[World]:
    process = Process(tmp_path / "model.sock")
    await process.start()
    agent = Agent(process)
    stock(agent)
    async with listening_world(process, agent, settings) as found:
        yield found
    await agent.session.close()
    await process.stop()
