"""What processes hold on a GPU: measured, given back and seen to be, and lost by none."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.emulated_book import REFUSED
from gpu.greedy import evict, gpu, greedy, held, right_again, running, seen, silent, tell, told, world
from gpu.machine import CONTEXT_BYTES, check, pool
from omnimodel.agent import contexts as contexts_module
from omnimodel.errors import DispatchError, Reason
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]
FIXTURES = (gpu, running, world)  # pytest finds them by their names


async def test_a_context_is_held_from_the_start_of_its_process_to_its_end(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1")
    assert held(world) == {Kind.FRAMES: 16 * MIB, Kind.WORKING: 32 * MIB, Kind.CONTEXT: CONTEXT_BYTES}
    await evict(world)
    assert held(world) == {Kind.CONTEXT: CONTEXT_BYTES} == {Kind.CONTEXT: seen(gpu, world)}
    check(world, gpu)
    os.kill(world.instance("m1").process.pid, signal.SIGKILL)
    await world.until(lambda: not world.ledger.device.held_bytes(), "its context is free")


async def test_what_a_process_held_that_was_killed_is_free_only_when_the_driver_shows_it_no_more(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1")
    real, pid = gpu.nvml.nvmlDeviceGetComputeRunningProcesses, world.instance("m1").process.pid
    before = real(0)
    gpu.nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: before  # it takes its time
    try:
        os.kill(pid, signal.SIGKILL)
        await world.until(lambda: world.instance("m1").process is None, "it is gone")
        assert held(world) == {}
        assert world.ledger.device.held_bytes(f"default/m1 ended {pid}") == 32 * MIB + CONTEXT_BYTES
    finally:
        gpu.nvml.nvmlDeviceGetComputeRunningProcesses = real
    await world.until(lambda: not world.ledger.device.held_bytes(), "it is free")
    await right_again(world)


async def test_working_memory_is_measured_where_a_manifest_does_not_say_it(world, gpu):
    manifest = greedy(world)
    del manifest["spec"]["resources"]
    manifest["spec"]["runtime"]["options"]["cacheMib"] = 40
    await world.apply(manifest)
    await world.until(lambda: world.report("m1").ready, "it is ready")
    assert world.report("m1").working_bytes == (40 + 10 + 16 + 2) * MIB  # a quarter and 16 MiB more, in steps of 4
    assert held(world) == {Kind.CONTEXT: CONTEXT_BYTES}
    assert seen(gpu, world) == CONTEXT_BYTES
    await right_again(world)


async def test_caches_are_given_back_at_an_evict_and_what_is_seen_to_stay_is_held(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1", "cache:8")
    await world.ask("m1", "leak:2")
    assert seen(gpu, world) == CONTEXT_BYTES + (16 + 8 + 2) * MIB
    await evict(world)
    assert world.report("m1").tier == "warm"
    assert held(world) == {Kind.CONTEXT: CONTEXT_BYTES + 2 * MIB} == {Kind.CONTEXT: seen(gpu, world)}


async def test_a_process_that_keeps_too_much_is_parked_and_comes_back_with_it(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1", "leak:16")
    pid = world.instance("m1").process.pid
    await evict(world)
    assert world.report("m1").tier == "parked"
    assert (held(world), seen(gpu, world)) == ({}, 0)
    assert "kept 20.00 MiB of device memory" in told(world)["NotGivenBack"]
    assert told(world)["Parked"] == world.report("m1").message
    process = world.instance("m1")
    assert world.ledger.host.held_bytes("default/m1", Kind.PROCESS) == process.private_bytes > 0
    assert await world.ask("m1") == pytest.approx(world.answer(16, 1))
    assert world.instance("m1").process.pid == pid
    assert held(world)[Kind.CONTEXT] == CONTEXT_BYTES + 16 * MIB
    check(world, gpu)


async def test_a_process_that_keeps_too_much_and_cannot_be_parked_is_killed(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1", "leak:16")
    gpu.driver.checkpoint = lambda name, _pid: REFUSED if name == "checkpoint" else ()
    pid = world.instance("m1").process.pid
    await evict(world)
    instance = world.instance("m1")
    await world.until(lambda: instance.process is None and not held(world), "it is gone, and what it held is free")
    assert instance.failures.last.reason is Reason.EVICT_TIMEOUT
    assert "kept 20.00 MiB of device memory" in instance.failures.last.problem
    await right_again(world)
    assert world.instance("m1").process.pid != pid


async def test_a_process_that_takes_more_than_it_was_granted_is_killed_and_its_neighbour_serves_on(world, gpu):
    await world.apply(greedy(world), greedy(world, "m2", 2))
    neighbour = asyncio.create_task(world.ask("m2", "wait"))
    await world.until(lambda: world.instance("m2").line.in_flight, "its neighbour is at it")
    pid = world.instance("m2").process.pid
    with pytest.raises(DispatchError, match=r"held 120\.00 MiB of device memory") as caught:
        await world.ask("m1", "take:100")
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    assert not neighbour.done()
    tell(gpu, world.instance("m2"))
    assert await neighbour == pytest.approx(world.answer(16, 2))
    assert world.instance("m2").process.pid == pid
    await right_again(world)


async def test_a_process_that_takes_memory_while_it_is_warm_is_killed(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1", "later:64")
    await evict(world)
    instance = world.instance("m1")
    tell(gpu, instance)
    await world.until(lambda: instance.process is None and not held(world), "it is gone, and what it held is free")
    assert instance.failures.last.reason is Reason.OUT_OF_MEMORY
    assert "while it is warm" in instance.failures.last.problem
    await right_again(world)


async def test_the_report_has_what_the_gpu_draws_and_how_fast_a_wake_copied(world, gpu):
    await world.apply(greedy(world, "m9", seed=9))
    await evict(world, "m9")
    await world.apply(greedy(world, "m9", seed=9), *(greedy(world, f"m{seed}", seed) for seed in (1, 2, 3)))
    await asyncio.gather(*(world.ask(f"m{seed}") for seed in (1, 2, 3)))  # they overwrite what m9 had
    await world.ask("m9")
    report = world.report("m9")
    assert report.last_wake_bytes_per_second == 16 * MIB * 1000  # every copy of the emulated driver takes 1 ms
    assert report.wakes >= 2
    assert report.wake_seconds > report.last_wake_seconds > 0
    await evict(world, "m9")
    await world.ask("m9")
    assert world.report("m9").last_wake_bytes_per_second == 0  # all of it was there
    gpu.nvml.milliwatts, gpu.nvml.millijoules = [310_500], [7_000_000]
    await world.until(lambda: world.agent.report().pool.power_watts == 310.5, "it is told")
    assert world.agent.report().pool.energy_joules == 7000.0
    assert world.agent.report().pool.context_bytes >= CONTEXT_BYTES


async def test_what_a_request_wants_beyond_the_grant_it_is_refused_and_the_process_goes_on(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1", "cache:20")
    pid = world.instance("m1").process.pid
    async with world.request("m1", "cache:13") as response:
        body = b"".join([chunk async for chunk in response.body])
    assert response.status == 500
    assert b"out of memory" in body
    await right_again(world)
    assert world.instance("m1").process.pid == pid


async def test_a_process_that_took_more_at_its_start_than_was_held_has_others_parked_for_it(world, gpu, monkeypatch):
    monkeypatch.setattr(contexts_module, "_ROOM_SECONDS", 600.0)  # nobody waits for what it took itself
    await world.apply(greedy(world))
    await world.ask("m1")
    await evict(world)
    world.instance("m1").rest.parks_at_seconds = math.inf  # not without need
    account = world.ledger.device
    account.hold("default/other", Kind.WORKING, account.free_bytes - 2 * CONTEXT_BYTES)
    manifest = greedy(world, "m9", 9)
    files = manifest["spec"]["runtime"]["handler"]["files"]
    files["handler.py"] = files["handler.py"].replace(
        "module = torch.nn.Module()",
        f'os.environ.get("CUDA_VISIBLE_DEVICES") and served.leak({2 * CONTEXT_BYTES}); module = torch.nn.Module()',
    )
    try:
        await world.apply(manifest, greedy(world), wait=False)
        await world.until(lambda: held(world, "m9") == {Kind.CONTEXT: 3 * CONTEXT_BYTES}, "it has what it took")
        assert held(world) == {}
        assert world.report("m1").tier == "parked"
    finally:
        account.give_back("default/other", Kind.WORKING)


async def test_who_holds_a_context_does_not_make_the_frames_promised_to_another(world, gpu, monkeypatch):
    await world.apply(greedy(world))
    await world.ask("m1")
    account, moves = world.ledger.device, world.broker.moves
    whole = account.free_bytes // account.frame_bytes
    account.hold("default/other", Kind.WORKING, CONTEXT_BYTES)  # makes way, and has too few frames made now
    await world.broker.memory.frames.give_way()
    account.give_back("default/other", Kind.WORKING)
    account.promise("default/other", whole - 1)
    try:
        assert account.missing_frames()
        monkeypatch.setattr(moves.memory.device, "create", lambda count: pytest.fail(f"{count} frames of another's"))
        await moves.contexts.hold(world.instance("m1"), 1)
    finally:
        account.cancel("default/other")
    account.give_back("default/m1", Kind.CONTEXT, 1)


async def test_a_process_killed_while_it_is_seen_what_it_gave_back_leaves_the_ledger_exact(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1", "cache:8")
    real, pid = gpu.nvml.nvmlDeviceGetComputeRunningProcesses, world.instance("m1").process.pid

    def kill(handle):
        found = real(handle)
        if world.instance("m1").state == "warm" and world.instance("m1").process is not None:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        return found

    gpu.nvml.nvmlDeviceGetComputeRunningProcesses = kill
    try:
        await evict(world)
        await world.until(lambda: world.instance("m1").process is None, "it is gone")
    finally:
        gpu.nvml.nvmlDeviceGetComputeRunningProcesses = real
    await world.until(lambda: not world.ledger.device.held_bytes(), "all of it is free")
    await right_again(world)


async def test_while_the_driver_does_not_answer_what_was_granted_is_believed(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1")
    async with silent(gpu):
        await evict(world)
        assert world.report("m1").tier == "warm"
        assert held(world) == {Kind.CONTEXT: CONTEXT_BYTES}
    assert contexts_module.SPARE_BYTES < 16 * MIB
    await right_again(world)


async def test_without_the_word_of_the_driver_a_pool_says_so_and_serves_from_what_is_granted(world, gpu, tmp_path):
    other = World(tmp_path)
    other.pool = pool(memory=64 * MIB)
    await other.agent.start()
    try:
        async with silent(gpu):
            await other.apply(greedy(other))
        assert "what processes hold on cuda:0 is not measured" in other.agent.report().pool.message
        assert other.agent.report().pool.ready
        for _ in range(2):
            assert await other.ask("m1") == pytest.approx(other.answer(16, 1))
            await evict(other)
            assert held(other) == {Kind.CONTEXT: CONTEXT_BYTES}
        await other.broker.moves.park(other.instance("m1"), "for a test", needed=False)
        assert (other.report("m1").tier, held(other)) == ("parked", {})
        assert await other.ask("m1") == pytest.approx(other.answer(16, 1))
    finally:
        await other.agent.stop(5.0)
