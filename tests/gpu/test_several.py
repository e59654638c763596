"""An agent with several GPUs, on an emulated driver: models are spread over them, go where there is room, and answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.machine import CONTEXT_BYTES, check, give_frames_up, machine, pool, somebody_else
from omnimodel.agent.instance import State
from omnimodel.api import OmniPool
from omnimodel.controllers.pool_status import pod_entry, pool_status
from omnimodel.controllers.status import residency_entry
from omnimodel.errors import DispatchError, Reason
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

DEVICES = ("cuda:0", "cuda:1", "cuda:2")
SEEDS = (1, 2, 3, 4, 5, 6, 7)
WORKING_MIB = 32
BUDGET_BYTES = 144 * MIB


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    with machine(tmp_path_factory.mktemp("gpus"), devices=len(DEVICES)) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def running(gpus, tmp_path_factory):
    world = World(tmp_path_factory.mktemp("agent"))
    world.pool = pool(memory=BUDGET_BYTES, count=len(DEVICES))
    async with gpus.served_by(world):
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(running):
    yield running
    await running.apply()
    await running.until(lambda: not running.agent._devices.instances, "all models are gone")
    running.check_ledger()
    accounts = [broker.memory.ledger.device for broker in running.brokers.values()]
    await running.until(lambda: not any(account.held_bytes() for account in accounts), "the driver shows them no more")
    assert not any(broker.memory.frames.owners() for broker in running.brokers.values())


def small(world: World, *seeds: int, **spec) -> list[dict]:
    """Models of 32 MiB of weights, 32 MiB of working memory and a context of 4 MiB each; a device of 144 MiB holds two."""
    return [world.manifest(f"m{seed}", mib=32, seed=seed, working_mib=WORKING_MIB, **spec) for seed in seeds]


def where(world: World, *seeds: int) -> list[str]:
    return [world.instance(f"m{seed}").device for seed in seeds]


def mapped_from(process) -> set[str]:
    """The devices whose memory a process has mapped, as the kernel says."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {f"cuda:{row.split('emulated-')[1].split()[0]}" for row in maps if "memfd:emulated-" in row}


async def test_models_are_spread_over_the_devices_and_each_is_shown_its_own(world):
    await world.apply(*small(world, 1, 2, 3))
    for seed in (1, 2, 3):
        assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
    assert sorted(where(world, 1, 2, 3)) == list(DEVICES)
    for seed in (1, 2, 3):
        instance = world.instance(f"m{seed}")
        number = instance.device[-1]
        assert instance.process.plan.devices == ("/dev/null", "/dev/zero", f"/dev/nvidia{number}")
        assert mapped_from(instance.process) == {instance.device}
    world.check_ledger()


async def test_more_models_than_all_devices_hold_answer_in_turn_and_every_account_is_exact(world, gpus):
    await world.apply(*small(world, *SEEDS))
    for _ in range(3):
        for seed in SEEDS:
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
            check(world, gpus)
            instance = world.instance(f"m{seed}")
            assert world.report(f"m{seed}").device == instance.device
            assert mapped_from(instance.process) == {instance.device}
    resident = [s for s in SEEDS if world.instance(f"m{s}").resident]
    assert len(resident) == 6  # of seven, two on each of three devices
    assert sum(world.instance(f"m{seed}").history.evictions for seed in SEEDS) >= 1


async def test_sixty_requests_at_once_over_seven_models_are_all_answered_rightly_and_nobody_is_restarted(world):
    await world.apply(*small(world, *SEEDS))
    before = {seed: world.instance(f"m{seed}").history.restarts for seed in SEEDS}
    seeds = [SEEDS[index % len(SEEDS)] for index in range(60)]
    answers = await asyncio.gather(*(world.ask(f"m{seed}") for seed in seeds))
    assert answers == [pytest.approx(world.answer(32, seed)) for seed in seeds]
    assert {seed: world.instance(f"m{seed}").history.restarts for seed in SEEDS} == before
    world.check_ledger()


@pytest.mark.parametrize("parked", [False, True], ids=["with a process", "with a parked one"])
async def test_a_model_whose_device_is_busy_goes_to_another_and_its_frames_there_are_its_own(world, gpus, parked):
    await world.apply(*small(world, *SEEDS))
    for seed in SEEDS:
        await world.ask(f"m{seed}")
    asked = next(seed for seed in SEEDS if not world.instance(f"m{seed}").resident)
    instance = world.instance(f"m{asked}")
    old, pid = instance.device, instance.process.pid
    if parked and instance.tier == "warm":
        await world.brokers[old].moves.park(instance, "for a test", needed=False)
        assert instance.tier == "parked"
    busy = [s for s in SEEDS if s != asked and world.instance(f"m{s}").device == old]
    instance.history.last_start_seconds = 1.0  # whatever it was on a machine that computes other things too
    long = [asyncio.create_task(world.ask(f"m{seed}", "sleep:600")) for seed in busy]
    await world.until(lambda: all(world.instance(f"m{s}").line.in_flight for s in busy), "they compute")
    assert await world.ask(f"m{asked}", deadline=300.0) == pytest.approx(world.answer(32, asked))
    assert instance.device != old
    assert instance.process.pid != pid
    assert mapped_from(instance.process) == {instance.device}
    told = [event async for event in world.agent.events.follow(follow=False) if event.name == instance.model]
    assert any(event.reason == "Moved" and f"from {old}" in event.message for event in told)
    check(world, gpus)
    for seed in busy:
        os.kill(world.instance(f"m{seed}").process.pid, signal.SIGKILL)
    assert all(isinstance(answer, DispatchError) for answer in await asyncio.gather(*long, return_exceptions=True))


@contextmanager
def crowded(gpus, *numbers):
    """Somebody else has all that is free of these devices."""
    with ExitStack() as others:
        for number in numbers:
            others.enter_context(somebody_else(gpus.books[number]))
        yield


async def test_a_model_whose_device_somebody_else_has_filled_is_woken_on_another_at_once(world, gpus):
    """aibrix#2744: out of memory, and retried for ever where there is none."""
    await world.apply(*small(world, 1))
    instance = world.instance("m1")
    assert await world.ask("m1") == pytest.approx(world.answer(32, 1))
    await world.agent.evict("default", "m1", 10)
    first, pid = DEVICES.index(instance.device), instance.process.pid
    for broker in world.brokers.values():
        await give_frames_up(broker)
    others = [number for number in range(3) if number != first]
    with crowded(gpus, first, others[0]):
        assert await world.ask("m1") == pytest.approx(world.answer(32, 1))
        assert instance.device == DEVICES[others[1]]
        assert (instance.process.pid == pid, instance.failures.last) == (False, None)
    told = [event.reason for _, event in world.agent.events._events if event.name == "m1"]
    assert "DeviceFull" in told
    assert "Moved" in told


async def test_a_model_for_which_no_device_has_memory_says_so_and_comes_back_when_one_has(world, gpus):
    await world.apply(*small(world, 1))
    instance = world.instance("m1")
    await world.ask("m1")
    await world.agent.evict("default", "m1", 10)
    for broker in world.brokers.values():
        await give_frames_up(broker)
    with crowded(gpus, 0, 1, 2):
        with pytest.raises(DispatchError) as caught:
            await world.ask("m1")
        assert caught.value.reason is Reason.DEVICE_FULL
        assert not instance.shunned
    await world.until(lambda: not instance.failures.waiting(time.monotonic()), "it may be tried again")
    assert await world.ask("m1") == pytest.approx(world.answer(32, 1))


async def test_a_process_killed_on_one_device_leaves_all_accounts_exact_and_comes_back(world):
    await world.apply(*small(world, 1, 2, 3))
    for seed in (1, 2, 3):
        await world.ask(f"m{seed}")
    instance = world.instance("m2")
    device = world.brokers[instance.device]
    os.kill(instance.process.pid, signal.SIGKILL)
    await world.until(lambda: instance.process is None, "it is seen to be gone")
    await world.until(lambda: not device.memory.ledger.device.held_bytes(), "the driver shows it no more")
    world.check_ledger()
    await world.until(lambda: not instance.failures.waiting(time.monotonic()), "it may be tried again")
    assert await world.ask("m2") == pytest.approx(world.answer(32, 2))
    world.check_ledger()


async def test_kept_models_that_one_device_cannot_hold_together_are_kept_on_two(world):
    await world.apply(*small(world, 1, 2, 3, residency={"keepResident": True}), *small(world, 4))
    await world.until(lambda: all(world.instance(f"m{s}").resident for s in (1, 2, 3)), "they are resident")
    assert await world.ask("m4") == pytest.approx(world.answer(32, 4))
    assert all(world.instance(f"m{s}").resident for s in (1, 2, 3))
    world.check_ledger()


async def test_a_model_larger_than_a_device_is_refused_though_all_together_would_hold_it(world):
    await world.apply(world.manifest("large", mib=120, seed=9, working_mib=WORKING_MIB), wait=False)
    await world.until(lambda: world.report("large").reason == "TooLarge", "it is refused")
    assert "the budget is 144.00 MiB" in world.report("large").message


async def test_the_status_says_what_each_device_holds_and_draws(world, gpus):
    gpus.nvml.milliwatts[:] = 100_500, 200_000, 300_000
    await world.until(lambda: world.agent.report().pool.power_watts == 600.5, "it was asked")
    await world.apply(*small(world, 1, 2))
    await world.ask("m1")
    await world.ask("m2")
    report = world.agent.report().pool
    assert report.device == "cuda:0 to cuda:2"
    assert report.budget_bytes == 3 * BUDGET_BYTES
    assert report.resident_bytes == 2 * 32 * MIB
    contexts = [each.context_bytes for each in report.devices]
    assert sum(contexts) == report.context_bytes == 2 * CONTEXT_BYTES
    assert sum(held > 0 for held in contexts) == 2
    held = {name: broker.memory.ledger.device.held_bytes(kind=Kind.FRAMES) for name, broker in world.brokers.items()}
    entry = pod_entry("pod-0", report)
    assert {each["name"]: each["residentBytes"] for each in entry["perDevice"]} == held
    assert [each["powerWatts"] for each in entry["perDevice"]] == [100.5, 200.0, 300.0]
    assert sum(held.values()) == entry["residentBytes"]
    status = pool_status(generation=1, report=report, models=2, refusal=None, before={}, now_seconds=0.0)
    assert status["perDevice"] == entry["perDevice"]
    assert OmniPool.model_validate({"metadata": {"name": "p"}, "status": status}).status.per_device[0].name == "cuda:0"
    assert residency_entry("pod-0", world.report("m1"))["device"] in DEVICES


async def test_budgets_change_on_every_device(world):
    await world.apply(*small(world, *SEEDS))
    for seed in SEEDS:
        await world.ask(f"m{seed}")
    before, world.pool = world.pool, pool(memory=72 * MIB, count=len(DEVICES))
    try:
        await world.apply(*world.manifests.values())
        capacities = lambda: [b.memory.ledger.device.capacity_bytes for b in world.brokers.values()]  # noqa: E731
        await world.until(lambda: capacities() == [72 * MIB] * 3, "the new budget is kept")
        for seed in SEEDS:
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
        world.check_ledger()
        await world.apply()
        accounts = [broker.memory.ledger.device for broker in world.brokers.values()]
        await world.until(lambda: not any(account.held_bytes() for account in accounts), "nothing is held")
    finally:
        world.pool = before
        await world.apply()
    whole = BUDGET_BYTES // accounts[0].frame_bytes
    await world.until(lambda: all(account.frames == whole for account in accounts), "frames are made for all of it")


async def test_a_frozen_model_waits_where_it_is(world):
    await world.apply(*small(world, 1))
    instance, devices = world.instance("m1"), world.agent._devices
    before = instance.state
    for instance.state in (State.WARM, State.FROZEN):  # frozen it is tried again later, and not all the time
        assert devices.shun(instance) == (instance.state is State.WARM)
    instance.state = before


async def test_one_arena_serves_all_devices(world):
    await world.apply(*small(world, *SEEDS))
    for seed in SEEDS:
        await world.ask(f"m{seed}")
    assert len({id(broker.memory.arena) for broker in world.brokers.values()}) == 1
    assert world.ledger.host.snapshot().held["arena"] == {Kind.ARENA: 512 * MIB}
    assert sum(broker.memory.device.pinned_bytes for broker in world.brokers.values()) == 512 * MIB
