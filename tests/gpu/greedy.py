"""Models that take, cache and leak memory of an emulated GPU when a request says so, and an agent that serves them."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import HANDLER, MIB, World
from gpu.machine import CONTEXT_BYTES, check, machine, pool
from omnimodel.memory.ledger import Kind

GREEDY = HANDLER.replace("import torch\n", "import threading\nimport torch\nfrom gpu import served\n").replace(
    '        elif word == "exit":',
    '        elif word in {"cache", "leak"}:\n'
    "            getattr(served, word)(int(value) << 20)\n"
    '        elif word == "later":\n'
    "            threading.Thread(target=lambda: (served.wait_until_told(), served.leak(int(value) << 20))).start()\n"
    '        elif word == "wait":\n'
    "            served.wait_until_told()\n"
    '        elif word == "take":\n'
    "            served.leak(int(value) << 20)\n"
    "            served.wait_until_told()\n"
    '        elif word == "hello" and self.options.get("cacheMib"):\n'
    '            served.cache(self.options.pop("cacheMib") << 20)\n'
    '        elif word == "exit":',
)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    """A GPU whose driver counts what a process has imported as its own."""
    with machine(tmp_path_factory.mktemp("gpu"), counts_imports=True) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def running(gpu, tmp_path_factory):
    world = World(tmp_path_factory.mktemp("agent"))
    world.pool = pool(memory=3 * (16 + 32) * MIB + 3 * CONTEXT_BYTES + 4 * MIB)
    await world.agent.start()
    yield world
    await world.agent.stop(5.0)
    assert gpu.driver.left() == {}


@pytest_asyncio.fixture(loop_scope="session")
async def world(running, gpu):
    running.began_seconds = time.time()
    yield running
    gpu.driver.checkpoint = lambda _name, _pid: ()
    await running.apply()
    await running.until(lambda: not running.broker.instances, "all models are gone")
    await running.until(lambda: not running.ledger.device.held_bytes(), "all of the device is free")
    check(running, gpu)
    assert not running.broker.memory.frames.owners()


def greedy(world: World, name: str = "m1", seed: int = 1, **spec) -> dict:
    return world.manifest(name, mib=16, seed=seed, working_mib=32, handler=GREEDY, **spec)


def told(world: World, name: str = "m1") -> dict[str, str]:
    """What was told of a model in this test: by reason, the last one of each."""
    events = [event for _, event in world.agent.events._events if event.time_seconds >= world.began_seconds]
    return {event.reason: event.message for event in events if event.name == name}


def seen(gpu, world: World, name: str = "m1") -> int:
    """What NVML says of a model's process."""
    process = world.instance(name).process
    found = {entry.pid: entry.usedGpuMemory for entry in gpu.nvml.nvmlDeviceGetComputeRunningProcesses(0)}
    return found.get(process.pid, 0) if process else 0


def held(world: World, name: str = "m1") -> dict[Kind, int]:
    return dict(world.ledger.device.snapshot().held.get(f"default/{name}", {}))


def tell(gpu, instance) -> None:
    """Let a process go on that waits for it."""
    dict(gpu.book.processes())[instance.process.pid].told = 1


async def evict(world: World, name: str = "m1") -> None:
    await world.agent.evict("default", name, 10)


async def right_again(world: World, name: str = "m1", seed: int = 1) -> None:
    """It answers rightly, whatever happened to its process."""
    await world.until(lambda: not world.instance(name).failures.waiting(time.monotonic()), "it may be tried again")
    assert await world.ask(name) == pytest.approx(world.answer(16, seed))


@asynccontextmanager
async def silent(gpu):
    """NVML does not answer."""
    gpu.nvml.silent = {0}
    try:
        yield
    finally:
        gpu.nvml.silent = set()


async def parked(world: World, leak_mib: int = 0) -> None:
    """m1, evicted and parked."""
    await world.apply(greedy(world))
    if leak_mib:
        await world.ask("m1", f"leak:{leak_mib}")
    await evict(world)
    instance = world.instance("m1")
    if instance.state != "parked":
        await world.broker.moves.park(instance, "for a test", needed=False)
    assert instance.tier == "parked"
