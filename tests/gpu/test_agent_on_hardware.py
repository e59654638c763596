"""What an agent on a GPU must do, run on the emulated driver and, unchanged, on a real one (`pytest -m gpu tests/gpu`)."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.machine import machine, pool
from omnimodel.memory.devices.cuda import CudaDevice
from omnimodel.memory.devices.cuda_driver import available
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

WEIGHTS_MIB, WORKING_MIB = 32, 32
SEEDS = (1, 2, 3, 4, 5)
RESIDENT = 3  # that the device has room for


@pytest_asyncio.fixture(
    loop_scope="session", scope="module", params=["emulated", pytest.param("hardware", marks=pytest.mark.gpu)]
)
async def world(request, tmp_path_factory):
    with ExitStack() as stack:
        if request.param == "emulated":
            stack.enter_context(machine(tmp_path_factory.mktemp("gpu")))
        elif not available():
            pytest.skip("there is no NVIDIA GPU here")
        found = World(tmp_path_factory.mktemp("agent"))
        found.pool = pool(
            memory=RESIDENT * (WEIGHTS_MIB + WORKING_MIB) * MIB + (RESIDENT + 1) * CudaDevice.context_bytes
        )
        await found.agent.start()
        await found.apply(
            *(found.manifest(f"m{seed}", mib=WEIGHTS_MIB, seed=seed, working_mib=WORKING_MIB) for seed in SEEDS)
        )
        yield found
        await found.agent.stop(5.0)


async def driver_says(world: World) -> dict[str, int]:
    """What NVML shows of each model's process."""
    held = await asyncio.to_thread(world.broker.memory.device.meter.process_bytes)
    return {
        name: sum(held.get(pid, 0) for pid in instance.process.pids()) if instance.process else 0
        for name, instance in world.broker.instances.items()
    }


async def evicted(world: World, name: str) -> None:
    await world.ask(name)
    await world.agent.evict("default", name, 30)


async def test_the_driver_numbers_processes_of_sandboxes_as_the_agent_does(world):
    await world.ask("m1")
    assert world.broker.memory.device.unmetered == ""
    assert (await driver_says(world))["default/m1"] > 0


async def test_more_models_than_fit_answer_bit_for_bit_the_same_and_no_process_is_started_again(world):
    first = {seed: await world.ask(f"m{seed}") for seed in SEEDS}
    pids = {seed: world.instance(f"m{seed}").process.pid for seed in SEEDS}
    for _ in range(3):
        for seed in SEEDS:
            assert await world.ask(f"m{seed}") == first[seed] == pytest.approx(world.answer(WEIGHTS_MIB, seed))
            world.check_ledger()
    assert {seed: world.instance(f"m{seed}").process.pid for seed in SEEDS} == pids


async def test_the_ledger_has_for_each_process_what_the_driver_shows_of_it(world):
    for seed in SEEDS:
        await world.ask(f"m{seed}")
    await world.until(lambda: not any(i.name in world.broker.moves for i in world.broker.instances.values()), "at rest")
    account = world.ledger.device
    for name, shown in (await driver_says(world)).items():
        assert shown <= account.held_bytes(name), name


async def test_an_evicted_process_keeps_its_context_and_nothing_else(world):
    await evicted(world, "m1")
    context_bytes = world.ledger.device.held_bytes("default/m1", Kind.CONTEXT)
    assert world.ledger.device.held_bytes("default/m1") == context_bytes
    assert (await driver_says(world))["default/m1"] == context_bytes <= 2 * CudaDevice.context_bytes


async def test_a_parked_process_has_nothing_and_comes_back_as_it_was(world, record_property):
    said, instance = await world.ask("m1"), world.instance("m1")
    pid = instance.process.pid
    await evicted(world, "m1")
    if instance.tier != "parked":
        await world.broker.moves.park(instance, "for a test", needed=False)
    assert instance.tier == "parked"
    assert (await driver_says(world))["default/m1"] == 0
    assert await world.ask("m1") == said
    assert instance.process.pid == pid
    record_property("unpark_seconds", instance.history.last_unpark_seconds)


async def test_a_process_is_ready_in_its_sandbox(world, record_property):
    instance = world.instance("m2")
    assert instance.process is not None or await world.ask("m2")
    plan = instance.process.plan
    assert plan.devices[-1].startswith("/dev/nvidia")
    assert len(plan.devices) == 3
    record_property("start_seconds", instance.history.last_start_seconds)


async def test_a_wake_says_how_fast_it_copied(world, record_property):
    await evicted(world, "m1")
    world.broker.memory.frames.forget(world.instance("m1").prepared.image.digest)
    await world.ask("m1")
    rate = world.report("m1").last_wake_bytes_per_second
    assert rate > 0
    record_property("bytes_per_second", rate)
