"""An agent with a pool of type cuda, on an emulated driver: real processes, frames between them, and answers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu import rehearsal
from omnimodel.agent import spawner
from omnimodel.agent.zygotes import Zygotes
from omnimodel.api import OmniPool
from omnimodel.memory.devices import cuda, cuda_driver
from omnimodel.memory.ledger import Kind
from omnimodel.runtime.zygote import PRELOAD

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

TESTS = Path(__file__).parents[1]
DEVICE_BYTES = 256 * MIB
WORKING_MIB = 32


def pool(**device) -> OmniPool:
    spec = {"device": {"type": "cuda", "frameSize": 4 * MIB, **device}, "hostMemory": 512 * MIB}
    return OmniPool.model_validate({"metadata": {"name": "default"}, "spec": spec})


@pytest.fixture(scope="session")
def gpu(tmp_path_factory):
    """A machine with an emulated GPU."""
    gpus = tmp_path_factory.mktemp("gpus")
    (gpus / "00:00.0").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        driver = rehearsal.RehearsalDriver(capacity_bytes=DEVICE_BYTES)
        patch.setattr(cuda_driver, "_loaded", [driver])
        patch.setattr(cuda_driver, "CONTROL_NODE", "/dev/null")
        patch.setattr(cuda_driver, "MEMORY_NODE", "/dev/zero")
        folder = gpus / "0000:00:00.0"
        folder.mkdir()
        (folder / "information").write_text("Model: \t\t Emulated\nDevice Minor: \t 0\n")
        patch.setattr(cuda_driver, "GPUS", gpus)
        patch.setattr(cuda, "TritonDecoder", lambda _context: driver.decode)
        zygotes = functools.partial(Zygotes, preload=[*PRELOAD, "gpu.served"], import_path=[str(TESTS)])
        patch.setattr(spawner, "Zygotes", zygotes)
        driver.run()
        yield driver


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def running(gpu, tmp_path_factory):
    world = World(tmp_path_factory.mktemp("agent"))
    world.pool = pool(memory=192 * MIB)
    await world.agent.start()
    yield world
    await world.agent.stop(5.0)
    assert gpu.left() == {}


@pytest_asyncio.fixture(loop_scope="session")
async def world(running):
    yield running
    await running.apply()
    await running.until(lambda: not running.broker.instances, "all models are gone")
    running.check_ledger()
    assert not running.broker.memory.frames.owners()
    assert not running.ledger.device.held_bytes(kind=Kind.WORKING)


def four(world: World) -> list[dict]:
    """Four models of 32 MiB of weights and 32 MiB of working memory each; the device of 192 MiB holds three."""
    return [world.manifest(f"m{seed}", mib=32, seed=seed, working_mib=WORKING_MIB) for seed in (1, 2, 3, 4)]


async def test_more_models_than_the_device_holds_all_answer_in_turn(world):
    await world.apply(*four(world))
    for _ in range(3):
        for seed in (1, 2, 3, 4):
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
            world.check_ledger()
    assert world.broker.memory.device.name == world.agent.report().pool.device == "cuda:0"
