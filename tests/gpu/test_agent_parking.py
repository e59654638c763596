"""Processes that are parked: all they held on a GPU is free, and comes back before they compute again."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB
from gpu.emulated_book import CHECKPOINTED, REFUSED, Slot
from gpu.greedy import evict, gpu, greedy, held, parked, right_again, running, seen, silent, tell, told, world
from gpu.machine import CONTEXT_BYTES, check
from omnimodel.agent import contexts as contexts_module
from omnimodel.agent import parking
from omnimodel.errors import OmniError
from omnimodel.memory.devices import cuda_checkpoint
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]
FIXTURES = (gpu, running, world)  # pytest finds them by their names


async def test_a_process_that_is_not_wanted_for_a_while_is_parked(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1")
    before = world.broker.idle_constants
    world.broker.idle_constants = replace(before, park_seconds=0.2)
    try:
        await evict(world)
        await world.until(lambda: world.report("m1").tier == "parked", "it is parked")
    finally:
        world.broker.idle_constants = before
    assert seen(gpu, world) == 0
    assert world.ledger.device.held_bytes() == 0
    assert world.report("m1").ready
    assert await world.ask("m1") == pytest.approx(world.answer(16, 1))


async def test_contexts_of_more_models_than_fit_are_parked_in_turn_and_no_process_is_started_again(world, gpu):
    await world.apply(*(greedy(world, f"m{seed}", seed) for seed in (1, 2, 3, 4, 5)))
    pids = {}
    for _ in range(3):
        for seed in (1, 2, 3, 4, 5):
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(16, seed))
            check(world, gpu)
            process = world.instance(f"m{seed}").process
            assert pids.setdefault(seed, process.pid) == process.pid
    await world.until(lambda: not any(f"default/m{seed}" in world.broker.moves for seed in pids), "nothing moves")
    tiers = [world.instance(f"m{seed}").tier for seed in pids]
    assert (tiers.count("resident"), tiers.count("parked")) == (3, 2)
    parked_one = world.instance(f"m{[*pids][tiers.index('parked')]}")
    assert parked_one.start_seconds == parked_one.history.last_unpark_seconds > 0  # of its next wake, for the policy
    assert world.instance(f"m{[*pids][tiers.index('resident')]}").start_seconds == 0
    assert world.ledger.device.free_bytes == CONTEXT_BYTES  # for the next that comes, so that it need not wait
    assert all("Parked" in told(world, f"m{seed}") for seed in pids)


async def test_nothing_is_restored_before_its_bytes_are_free(world, gpu):
    asked = threading.Event()
    held_then = []

    def checkpoint(name, pid):
        if name == "restore" and pid == world.instance("m1").process.pid:
            asked.set()
            held_then.append(world.ledger.device.held_bytes("default/m1", Kind.CONTEXT))
        return ()

    await world.apply(*(greedy(world, f"m{seed}", seed) for seed in (1, 2, 3, 4)))
    await world.ask("m1", "leak:16")
    await evict(world)
    assert world.report("m1").tier == "parked"
    gpu.driver.checkpoint = checkpoint
    busy = [asyncio.create_task(world.ask(f"m{seed}", "wait")) for seed in (2, 3, 4)]
    await world.until(lambda: sum(world.instance(f"m{n}").line.in_flight for n in (2, 3, 4)) == 3, "all are at it")
    request = asyncio.create_task(world.ask("m1"))
    await world.until(lambda: world.instance("m1").line.waiting, "it waits")
    assert not asked.is_set()
    assert world.ledger.device.free_bytes < CONTEXT_BYTES + 16 * MIB
    for seed in (2, 3, 4):
        tell(gpu, world.instance(f"m{seed}"))
    await asyncio.gather(*busy)
    assert await request == pytest.approx(world.answer(16, 1))
    assert held_then == [CONTEXT_BYTES + 16 * MIB]
    check(world, gpu)


async def test_a_device_that_does_not_say_what_is_free_holds_nothing_for_a_restore(world, gpu, monkeypatch):
    def unsaid() -> int:
        raise OmniError("cuda:0", "does not say what is free")

    await parked(world)
    instance = world.instance("m1")
    with monkeypatch.context() as patch:
        patch.setattr(world.broker.memory.device, "free_bytes", unsaid)
        with pytest.raises(OmniError, match="what is free"):
            await world.broker.moves.parks.unpark(instance)
    assert instance.tier == "parked"
    assert world.ledger.device.held_bytes("default/m1", Kind.CONTEXT) == 0
    assert await world.ask("m1") == pytest.approx(world.answer(16, 1))
    check(world, gpu)


async def test_a_wake_that_is_cancelled_while_the_device_is_asked_holds_nothing_for_its_restore(
    world, gpu, monkeypatch
):
    await parked(world)
    instance, asked, answer = world.instance("m1"), threading.Event(), threading.Event()

    def slow() -> int:
        asked.set()
        answer.wait(60)
        return 1 << 40

    with monkeypatch.context() as patch:
        patch.setattr(world.broker.memory.device, "free_bytes", slow)
        restore = asyncio.create_task(world.broker.moves.parks.unpark(instance))
        await world.until(asked.is_set, "the device is asked")
        assert world.ledger.device.held_bytes("default/m1", Kind.CONTEXT) == CONTEXT_BYTES
        restore.cancel()
        await asyncio.wait([restore])
        answer.set()
    assert restore.cancelled()
    assert (instance.tier, world.ledger.device.held_bytes("default/m1", Kind.CONTEXT)) == ("parked", 0)
    assert await world.ask("m1") == pytest.approx(world.answer(16, 1))
    check(world, gpu)


async def test_a_process_that_comes_back_with_more_than_there_is_room_for_is_killed_and_says_so(
    world, gpu, monkeypatch
):
    monkeypatch.setattr(contexts_module, "_ROOM_SECONDS", 0.2)
    await parked(world)
    monkeypatch.setattr(world.broker.moves.contexts, "_vacate", lambda _: False)
    instance, account, real = world.instance("m1"), world.ledger.device, gpu.nvml.nvmlDeviceGetComputeRunningProcesses
    pid, instance.rest.parks_at_seconds = instance.process.pid, math.inf  # it is not parked again meanwhile

    def grown(handle):
        found = real(handle)
        return [SimpleNamespace(pid=e.pid, usedGpuMemory=e.usedGpuMemory + 2 * MIB * (e.pid == pid)) for e in found]

    account.hold("default/other", Kind.WORKING, account.free_bytes - CONTEXT_BYTES)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(gpu.nvml, "nvmlDeviceGetComputeRunningProcesses", grown)
            await world.broker.moves.parks.unpark(instance)
    finally:
        account.give_back("default/other", Kind.WORKING)
    assert instance.process is None
    assert f"needs {2 * MIB} more bytes of context on the device, 0 of" in instance.failures.last.problem
    assert "ParkingFailed" not in told(world)
    await right_again(world)


async def test_a_model_that_is_removed_while_its_restore_waits_for_room_is_gone_at_once(world, gpu, monkeypatch):
    monkeypatch.setattr(contexts_module, "_ROOM_SECONDS", 600.0)
    await parked(world)
    instance, account, asked = world.instance("m1"), world.ledger.device, []
    monkeypatch.setattr(world.broker.moves.contexts, "_vacate", asked.append)  # which says that nothing comes
    account.hold("default/other", Kind.WORKING, account.free_bytes)
    try:
        world.broker.moves.wake(instance, [])
        await world.until(lambda: asked, "its restore waits")
        await world.apply()
        await world.until(lambda: not world.broker.instances, "it is gone")
        assert account.held_bytes("default/m1") == world.ledger.host.held_bytes("default/m1") == 0
        assert account.held_bytes() == account.held_bytes("default/other")
    finally:
        account.give_back("default/other", Kind.WORKING)


async def test_a_restore_that_fails_ends_the_process_and_the_model_starts_cold(world, gpu):
    await parked(world)
    pid = world.instance("m1").process.pid
    gpu.driver.checkpoint = lambda name, _pid: REFUSED if name == "restore" else ()
    assert await world.ask("m1") == pytest.approx(world.answer(16, 1))
    assert world.instance("m1").process.pid != pid
    assert "did not come back" in told(world)["ParkingFailed"]
    await world.until(lambda: not world.ledger.device.held_bytes(f"default/m1 ended {pid}"), "what it held is free")
    check(world, gpu)


async def test_a_restore_that_never_returns_ends_the_process_and_the_model_starts_cold(world, gpu, monkeypatch):
    monkeypatch.setattr(cuda_checkpoint, "STEP_SECONDS", 0.5)
    await parked(world)
    pid, release = world.instance("m1").process.pid, threading.Event()
    gpu.driver.checkpoint = lambda name, _pid: () if name != "restore" else release.wait(60) and ()
    try:
        assert await world.ask("m1") == pytest.approx(world.answer(16, 1))
    finally:
        release.set()
    assert world.instance("m1").process.pid != pid
    assert "has not returned" in told(world)["ParkingFailed"]
    check(world, gpu)


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock"])
async def test_a_process_killed_while_it_is_parked_or_brought_back_leaves_the_ledger_exact(world, gpu, step):
    def kill(name, pid):
        if name == step:
            os.kill(pid, signal.SIGKILL)
        return ()

    await world.apply(greedy(world))
    pid = world.instance("m1").process.pid
    if step in {"restore", "unlock"}:
        await parked(world)
        gpu.driver.checkpoint = kill
        assert await world.ask("m1") == pytest.approx(world.answer(16, 1))
    else:
        await evict(world)
        gpu.driver.checkpoint = kill
        await world.broker.moves.park(world.instance("m1"), "for a test", needed=False)
        await world.until(lambda: not world.ledger.device.held_bytes(), "all of it is free")
        await right_again(world)
    assert world.instance("m1").process.pid != pid
    await world.until(lambda: not world.ledger.device.held_bytes(f"default/m1 ended {pid}"), "what it held is free")
    check(world, gpu)


async def test_a_process_killed_while_parked_holds_nothing_and_its_model_starts_cold(world, gpu):
    await parked(world, leak_mib=16)
    pid = world.instance("m1").process.pid
    os.kill(pid, signal.SIGKILL)
    await world.until(lambda: world.instance("m1").process is None, "it is gone")
    assert world.ledger.device.held_bytes() == 0
    assert world.ledger.host.held_bytes("default/m1") == 0
    await right_again(world)


@pytest.mark.parametrize(("left_mib", "tier"), [(1, "parked"), (4, "cold")], ids=["some of it", "all of it"])
async def test_what_the_driver_still_shows_of_a_parked_process_stays_held(world, gpu, monkeypatch, left_mib, tier):
    monkeypatch.setattr(parking, "_SEEN_SECONDS", 0.1)
    await world.apply(greedy(world))
    await evict(world)
    instance, real = world.instance("m1"), gpu.nvml.nvmlDeviceGetComputeRunningProcesses
    pid = instance.process.pid

    def leaves(handle):
        found = real(handle)
        if dict(gpu.book.processes()).get(pid, Slot()).state == CHECKPOINTED:
            found.append(SimpleNamespace(pid=pid, usedGpuMemory=left_mib * MIB))
        return found

    monkeypatch.setattr(gpu.nvml, "nvmlDeviceGetComputeRunningProcesses", leaves)
    await world.broker.moves.park(instance, "for a test", needed=False)
    await world.until(lambda: instance.tier == tier, tier)
    assert held(world) == ({Kind.CONTEXT: left_mib * MIB} if tier == "parked" else {})
    await right_again(world)
    assert held(world)[Kind.CONTEXT] == CONTEXT_BYTES
    check(world, gpu)


async def test_parked_models_can_be_removed(world, gpu):
    await parked(world)
    await world.apply()
    await world.until(lambda: not world.broker.instances, "it is gone")
    assert world.ledger.device.held_bytes() == world.ledger.host.held_bytes(kind=Kind.PROCESS) == 0


async def test_a_process_is_parked_while_the_driver_does_not_say_what_it_holds(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1")
    await evict(world)
    pid = world.instance("m1").process.pid
    async with silent(gpu):
        await world.broker.moves.park(world.instance("m1"), "for a test", needed=False)
        assert (world.report("m1").tier, held(world)) == ("parked", {})
    assert seen(gpu, world) == 0
    assert await world.ask("m1") == pytest.approx(world.answer(16, 1))
    assert (world.instance("m1").process.pid, held(world)[Kind.CONTEXT]) == (pid, CONTEXT_BYTES)
    check(world, gpu)
