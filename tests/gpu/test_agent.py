"""An agent with a pool of type cuda, on an emulated driver: real processes, frames between them, and answers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.machine import CONTEXT_BYTES, machine, pool
from gpu.serving import emptied, serving
from omnimodel.errors import DispatchError
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

WORKING_MIB = 32


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    """The driver of the agent, on a machine with an emulated GPU."""
    with machine(tmp_path_factory.mktemp("gpu")) as made:
        yield made.driver


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def running(gpu, tmp_path_factory):
    world = World(tmp_path_factory.mktemp("agent"))
    world.pool = pool(memory=(192 + 4 * 4) * MIB)
    async with serving(world, gpu):
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(running):
    yield running
    await emptied(running)
    assert not running.broker.memory.frames.owners()
    await running.until(lambda: not running.ledger.device.held_bytes(), "all of the device is free")


def four(world: World) -> list[dict]:
    """Four models of 32 MiB of weights and 32 MiB of working memory each; beside four contexts there is room for three."""
    return [world.manifest(f"m{seed}", mib=32, seed=seed, working_mib=WORKING_MIB) for seed in (1, 2, 3, 4)]


async def test_the_whole_budget_becomes_frames_before_anybody_waits_for_them(world):
    await world.apply()
    account = world.ledger.device
    whole = account.capacity_bytes // account.frame_bytes
    await world.until(lambda: account.frames == whole, "there is no room for another frame")


async def test_more_models_than_the_device_holds_all_answer_in_turn(world):
    await world.apply(*four(world))
    pids = {}
    for _ in range(3):
        for seed in (1, 2, 3, 4):
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
            world.check_ledger()
            process = world.instance(f"m{seed}").process
            assert pids.setdefault(seed, process.pid) == process.pid
    assert sum(world.instance(f"m{seed}").history.evictions for seed in pids) >= 3  # with fewer nobody could do
    assert world.broker.memory.device.name == world.agent.report().pool.device == "cuda:0"


async def test_fifty_requests_at_once_over_four_models_are_all_answered_rightly(world):
    await world.apply(*four(world))
    seeds = [1 + index % 4 for index in range(50)]
    answers = await asyncio.gather(*(world.ask(f"m{seed}") for seed in seeds))
    assert answers == [pytest.approx(world.answer(32, seed)) for seed in seeds]


async def test_a_process_takes_requests_while_its_frames_are_filled_and_computes_with_none_that_are_empty(world, gpu):
    await world.apply(*four(world))
    await world.agent.evict("default", "m1", 10)
    await asyncio.gather(*(world.ask(f"m{seed}") for seed in (2, 3, 4)))  # they overwrite what m1 had
    gpu.flows.clear()
    try:
        request = asyncio.create_task(world.ask("m1"))
        await world.until(lambda: world.instance("m1").line.in_flight == 1, "it has the request")
        assert world.instance("m1").resident
        assert world.broker.memory.frames.filling("default/m1")
        done, _ = await asyncio.wait([request], timeout=0.5)
        assert not done
    finally:
        gpu.flows.set()
    assert await request == pytest.approx(world.answer(32, 1))


async def test_an_evict_gives_the_frames_back_and_what_nobody_needed_is_not_copied_again(world, gpu):
    await world.apply(world.manifest("m1", mib=32, seed=1, working_mib=WORKING_MIB))
    before = await world.ask("m1")
    assert world.report("m1").device_bytes == (32 + WORKING_MIB) * MIB + CONTEXT_BYTES
    await world.agent.evict("default", "m1", 10)
    assert (world.report("m1").tier, world.report("m1").device_bytes) == ("warm", CONTEXT_BYTES)
    assert world.ledger.device.held_bytes() == CONTEXT_BYTES
    digest = world.instance("m1").prepared.image.digest
    assert world.broker.memory.frames.valid_frames(digest) == 8
    copied = []
    gpu.after = copied.append
    assert await world.ask("m1") == before
    gpu.after = lambda _: None
    assert "copy" not in copied
    assert copied.count("write") == 2 * 8  # a wake of nothing that is missing advances the fence all the same


@pytest.mark.parametrize("where", ["in frames that nobody needed since", "in the arena"])
async def test_a_wake_with_wrong_weights_answers_nobody_and_the_model_starts_cold(world, where):
    """vllm#29341: healthy after its wake, and what it answers is gibberish."""
    manifest = world.manifest("m1", mib=32, seed=1, working_mib=WORKING_MIB)
    manifest["spec"]["probe"]["afterWake"] = True
    await world.apply(manifest)
    assert await world.ask("m1") == pytest.approx(world.answer(32, 1))
    frames, arena, instance = world.broker.memory.frames, world.broker.memory.arena, world.instance("m1")
    image, pid, own = instance.prepared.image, instance.process.pid, frames.frames_of("default/m1")
    await world.agent.evict("default", "m1", 10)
    if where == "in the arena":
        frames.forget(image.digest)
        async with arena.staged(image, lambda _: 0.0) as staged:
            extent = staged.extents[0]
            ctypes.memset(extent.address + extent.size_bytes // 2, 0x3F, 4 * MIB)
    else:
        os.pwrite(own[4].descriptor, b"\x3f" * MIB, 0)
    began_seconds = time.time()
    assert await world.ask("m1") == pytest.approx(world.answer(32, 1))
    events = [event for _, event in world.agent.events._events if event.time_seconds >= began_seconds]
    failed = [event for event in events if event.name == "m1" and event.reason == "ProbeFailed"]
    assert len(failed) == 1
    assert "its probe got a wrong answer" in failed[0].message
    assert world.instance("m1").process.pid != pid
    assert world.report("m1").ready
    world.check_ledger()


@asynccontextmanager
async def asked_behind_its_copy(world, gpu):
    """A request that m1 has while nothing of its image moves."""
    await world.apply(*four(world))
    await world.agent.evict("default", "m1", 10)
    await asyncio.gather(*(world.ask(f"m{seed}") for seed in (2, 3, 4)))
    gpu.flows.clear()
    try:
        request = asyncio.create_task(world.ask("m1"))
        await world.until(lambda: world.instance("m1").line.in_flight == 1, "it has the request")
        yield request
    finally:
        gpu.flows.set()


async def test_a_copy_that_fails_ends_the_process_and_nothing_of_it_is_answered(world, gpu):
    async with asked_behind_its_copy(world, gpu) as request:
        pid = world.instance("m1").process.pid
        gpu.lose()
        try:
            with pytest.raises(DispatchError, match="was not copied to cuda:0"):
                await request
            await world.until(lambda: world.instance("m1").process is None, "its process is gone")
        finally:
            del gpu.fail["cuEventQuery"]
    world.check_ledger()
    assert not world.broker.memory.frames.quarantined()
    await world.until(lambda: not world.instance("m1").failures.waiting(time.monotonic()), "it may be tried again")
    assert await world.ask("m1") == pytest.approx(world.answer(32, 1))
    assert world.instance("m1").process.pid != pid


async def test_a_process_killed_while_its_frames_are_filled_leaves_the_ledger_exact(world, gpu):
    async with asked_behind_its_copy(world, gpu) as request:
        os.kill(world.instance("m1").process.pid, signal.SIGKILL)
        with pytest.raises(DispatchError, match="killed"):
            await request
        frames = world.broker.memory.frames  # the copy goes on into them
        await world.until(lambda: frames.quarantined() == {"default/m1": 8}, "they are set apart")
    await world.until(lambda: not world.broker.memory.frames.quarantined(), "the copy has ended")
    world.check_ledger()
    await world.until(lambda: not world.instance("m1").failures.waiting(time.monotonic()), "it may be tried again")
    assert await world.ask("m1") == pytest.approx(world.answer(32, 1))


async def test_a_process_sees_its_gpu_and_holds_its_own_memory_on_the_host(world):
    await world.apply(world.manifest("m1", mib=32, seed=1, working_mib=WORKING_MIB))
    await world.ask("m1")
    process = world.instance("m1").process
    assert process.plan.devices == ("/dev/null", "/dev/zero", "/dev/nvidia0")
    held = world.ledger.host.snapshot()
    assert held.held["arena"] == {Kind.ARENA: 512 * MIB}
    await world.broker.accounting.measure(world.instance("m1"))
    assert world.ledger.host.held_bytes("default/m1", Kind.PROCESS) == world.instance("m1").private_bytes > 0
    assert (
        32 * MIB <= world.agent.report().pool.arena_bytes <= 128 * MIB
    )  # images that are in it, of all that is pinned
