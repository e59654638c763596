"""What processes hold on a GPU: measured, given back and seen to be, parked and brought back, and lost by none."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import HANDLER, MIB, World
from gpu.emulated_book import CHECKPOINTED, REFUSED, Slot
from gpu.machine import CONTEXT_BYTES, check, machine, pool
from omnimodel.agent import contexts as contexts_module
from omnimodel.agent import parking
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.memory.devices import cuda_checkpoint
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

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


async def test_a_process_that_took_more_at_its_start_than_was_held_has_others_parked_for_it(world, gpu, monkeypatch):
    monkeypatch.setattr(contexts_module, "_ROOM_SECONDS", 600.0)  # nobody waits for what it took itself
    await world.apply(greedy(world))
    await world.ask("m1")
    await evict(world)
    world.instance("m1").parks_at_seconds = math.inf  # not without need
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


async def test_a_process_that_comes_back_with_more_than_there_is_room_for_is_killed_and_says_so(
    world, gpu, monkeypatch
):
    monkeypatch.setattr(contexts_module, "_ROOM_SECONDS", 0.2)
    await parked(world)
    monkeypatch.setattr(world.broker.moves.contexts, "_vacate", lambda _: False)
    instance, account, real = world.instance("m1"), world.ledger.device, gpu.nvml.nvmlDeviceGetComputeRunningProcesses
    pid, instance.parks_at_seconds = instance.process.pid, math.inf  # it is not parked again meanwhile

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


@asynccontextmanager
async def silent(gpu):
    """NVML does not answer."""
    gpu.nvml.silent = {0}
    try:
        yield
    finally:
        gpu.nvml.silent = set()


async def test_while_the_driver_does_not_answer_what_was_granted_is_believed(world, gpu):
    await world.apply(greedy(world))
    await world.ask("m1")
    async with silent(gpu):
        await evict(world)
        assert world.report("m1").tier == "warm"
        assert held(world) == {Kind.CONTEXT: CONTEXT_BYTES}
    assert contexts_module.SPARE_BYTES < 16 * MIB
    await right_again(world)


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
