import pytest
import pytest_asyncio

from agent.world import World
from omnimodel.agent.sources import Sources


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def running(tmp_path_factory):
    """One agent for all tests: its zygote takes seconds to start."""
    world = World(tmp_path_factory.mktemp("agent"))
    await world.agent.start()
    yield world
    await world.agent.stop(5.0)


@pytest_asyncio.fixture(loop_scope="session")
async def world(running):
    """The one agent, without any models."""
    yield running
    await running.apply()
    await running.until(lambda: not running.broker.instances, "all models are gone")
    running.check_ledger()
    assert not running.broker.memory.frames.owners()


@pytest.fixture
def sources(tmp_path):
    return Sources(tmp_path / "sources")
