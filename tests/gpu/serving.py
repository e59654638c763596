"""What the tests of a real agent on an emulated GPU have in common: its life, and what is left when models go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent.world import World
from gpu.rehearsal import RehearsalDriver


@asynccontextmanager
async def serving(world: World, driver: RehearsalDriver) -> AsyncIterator[World]:
    """Serve until the context ends; then nothing of the driver is left."""
    await world.agent.start()
    yield world
    await world.agent.stop(5.0)
    assert driver.left() == {}


async def emptied(world: World) -> None:
    """Delete all models, wait until they are gone, and see that the ledger is exact."""
    await world.apply()
    await world.until(lambda: not world.broker.instances, "all models are gone")
    world.check_ledger()
