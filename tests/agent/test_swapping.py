"""More model bytes than the device has: everybody is answered, and every byte is accounted for at every moment."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from agent.world import MIB, World
from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway.refusals import error_object, status_of
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]


def four(world: World) -> list[dict]:
    """Four models of 8 MiB of weights and 48 MiB of working memory each; the device of 176 MiB holds three."""
    return [world.manifest(f"m{seed}", seed=seed) for seed in (1, 2, 3, 4)]


async def test_more_models_than_the_device_holds_all_answer_in_turn(world):
    await world.apply(*four(world))
    for _ in range(3):
        for seed in (1, 2, 3, 4):
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(8, seed))
            world.check_ledger()


async def test_fifty_requests_at_once_over_four_models_are_all_answered_rightly(world):
    await world.apply(*four(world))
    seeds = [1 + index % 4 for index in range(50)]
    answers = await asyncio.gather(*(world.ask(f"m{seed}") for seed in seeds))
    assert answers == [pytest.approx(world.answer(8, seed)) for seed in seeds]


async def test_the_budget_holds_at_every_moment_for_the_ledger_and_for_the_processes(world):
    await world.apply(*four(world))
    over = []
    stop = asyncio.Event()

    async def watch():
        while not stop.is_set():
            device = world.ledger.device
            if device.held_bytes() > device.capacity_bytes:
                over.append(("ledger", device.held_bytes()))
            frames = device.frames * device.frame_bytes
            working = 0
            for instance in world.broker.instances.values():
                process = instance.process
                if process is not None and instance.state == "resident":
                    working += await asyncio.to_thread(process.private_bytes)
            if frames + working > device.capacity_bytes:
                over.append(("processes", frames, working))
            await asyncio.sleep(0.005)

    watcher = asyncio.create_task(watch())
    order = random.Random(7)
    await asyncio.gather(*(world.ask(f"m{order.randint(1, 4)}") for _ in range(60)))
    stop.set()
    await watcher
    assert not over


async def test_a_request_in_flight_is_never_lost_to_a_swap(world):
    world_of_one = [world.manifest(f"m{seed}", seed=seed, working_mib=96) for seed in (1, 2)]
    await world.apply(*world_of_one)
    slow = asyncio.create_task(world.ask("m1", "sleep:1.5"))
    await world.until(lambda: world.instance("m1").line.in_flight == 1, "m1 is busy")
    assert await world.ask("m2") == pytest.approx(world.answer(8, 2))
    assert slow.done()
    assert await slow == pytest.approx(world.answer(8, 1))


@pytest.mark.parametrize("before", ["m1", "m2"], ids=["behind one that is computed", "until another model leaves"])
async def test_held_requests_are_served_in_the_order_they_came(world, before):
    one_by_one = world.manifest("m1", seed=1, limits={"concurrency": 1})
    await world.apply(one_by_one, world.manifest("m2", seed=2, working_mib=136))
    busy = asyncio.create_task(world.ask(before, "sleep:1"))
    await world.until(lambda: world.instance(before).line.in_flight == 1, "it computes")
    served: list[int] = []

    async def ask(number: int) -> None:
        await world.ask("m1", "sleep:0.02")
        served.append(number)

    asking = []
    for number in range(8):
        asking.append(asyncio.create_task(ask(number)))
        await world.until(lambda number=number: len(world.instance("m1").line.waiting) == number + 1, "it waits")
    assert not busy.done()
    await asyncio.gather(busy, *asking)
    assert served == list(range(8))


async def test_answers_are_equal_bit_for_bit_before_an_evict_and_after_the_wake(world):
    await world.apply(*four(world))
    before = await world.ask("m1")
    for _ in range(3):
        await world.agent.evict("default", "m1", 10)
        assert world.report("m1").tier == "warm"
        assert world.report("m1").device_bytes == 0
        await asyncio.gather(*(world.ask(f"m{seed}") for seed in (2, 3, 4)))
        assert await world.ask("m1") == before


async def test_frames_nobody_needed_are_not_copied_again(world):
    await world.apply(world.manifest("m1", seed=1))
    await world.ask("m1")
    await world.agent.evict("default", "m1", 10)
    digest = world.instance("m1").prepared.image.digest
    assert world.broker.memory.frames.valid_frames(digest) == 2
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def stands_still(world) -> None:
    """Stop the process of m1, and wait until each of its threads has seen the signal."""
    pid = world.instance("m1").process.pid
    os.kill(pid, signal.SIGSTOP)
    states = Path(f"/proc/{pid}/task").glob
    await world.until(lambda: all(") T " in state.read_text() for state in states("*/stat")), "it stands still")


@pytest.mark.parametrize("moment", ["idle", "in a forward pass", "in a wake", "in an evict"])
async def test_a_killed_process_leaves_the_ledger_exact_and_the_next_request_is_served(world, moment):
    await world.apply(world.manifest("m1", seed=1), world.manifest("m2", seed=2))
    await world.ask("m1")
    request = None
    if moment == "in a forward pass":
        request = asyncio.create_task(world.ask("m1", "sleep:30"))
        await world.until(lambda: world.instance("m1").line.in_flight == 1)
    elif moment == "in a wake":
        await world.agent.evict("default", "m1", 10)
        await stands_still(world)
        request = asyncio.create_task(world.ask("m1"))
        await world.until(lambda: world.instance("m1").state == "waking")
    elif moment == "in an evict":
        await stands_still(world)
        request = asyncio.create_task(world.agent.evict("default", "m1", 10))
        await world.until(lambda: world.instance("m1").state == "evicting")
    pid = world.instance("m1").process.pid
    os.kill(pid, signal.SIGKILL)
    await world.until(lambda: world.instance("m1").process is None or world.instance("m1").process.pid != pid)
    if request is not None:
        await asyncio.gather(request, return_exceptions=True)
    world.check_ledger()
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    assert await world.ask("m2") == pytest.approx(world.answer(8, 2))
    world.check_ledger()


async def test_commands_that_arrive_late_stop_no_other_model_and_every_swap_ends(world):
    """LLMKube#1837: processes stand still at random moments, so that wakes and evicts take any time and any order."""
    await world.apply(*four(world))
    order = random.Random(3)
    stopped = asyncio.Event()

    async def delay():
        while not stopped.is_set():
            processes = [instance.process for instance in world.broker.instances.values() if instance.process]
            if processes:
                process = order.choice(processes)
                os.kill(process.pid, signal.SIGSTOP)
                await asyncio.sleep(order.uniform(0.0, 0.5))
                if not process.exited.done():
                    os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(order.uniform(0.0, 0.05))

    pids = {}
    for seed in (1, 2, 3, 4):
        await world.ask(f"m{seed}")
        pids[seed] = world.instance(f"m{seed}").process.pid
    delaying = asyncio.create_task(delay())
    for _ in range(10):
        seeds = [order.randint(1, 4) for _ in range(4)]
        answers = await asyncio.gather(*(world.ask(f"m{seed}") for seed in seeds))
        assert answers == [pytest.approx(world.answer(8, seed)) for seed in seeds]
        world.check_ledger()
    stopped.set()
    await delaying
    assert {seed: world.instance(f"m{seed}").process.pid for seed in pids} == pids, "nobody was taken for dead"


async def test_who_was_computed_for_when_the_process_died_is_told_of_what_it_died(world):
    await world.apply(world.manifest("m1", seed=1))
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1", "exit:3")
    assert caught.value.status == 502
    assert "exit status 3" in str(caught.value)
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_a_process_over_its_memory_dies_alone_with_that_reason(world):
    await world.apply(world.manifest("m1", seed=1), world.manifest("m2", seed=2))
    await world.ask("m2")
    neighbour = world.instance("m2").process.pid
    busy = asyncio.create_task(world.ask("m2", "sleep:1"))
    await world.until(lambda: world.instance("m2").line.in_flight == 1, "the neighbour computes")
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1", "hoard:200")
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    assert await busy == pytest.approx(world.answer(8, 2))
    assert await world.ask("m2") == pytest.approx(world.answer(8, 2))
    assert world.instance("m2").process.pid == neighbour
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    world.check_ledger()


async def test_a_model_that_outgrows_what_was_measured_gets_more(world):
    manifest = world.manifest("m1", seed=1)
    del manifest["spec"]["resources"]
    await world.apply(manifest)
    before = world.instance("m1").working_bytes
    with pytest.raises(DispatchError):
        await world.ask("m1", f"hoard:{before // MIB + 4}")
    await world.until(lambda: world.instance("m1").working_bytes > before, "it was granted more")
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_unknown_sizes_are_measured_one_at_a_time_and_all_become_ready(world):
    manifests = [world.manifest(f"m{seed}", seed=seed) for seed in range(1, 7)]
    for manifest in manifests:
        del manifest["spec"]["resources"]
    await world.apply(*manifests)
    for seed in range(1, 7):
        report = world.report(f"m{seed}")
        assert report.ready, report
        assert report.working_bytes > 0
        assert report.process is None or report.process.restarts == 0


async def test_the_only_waiter_of_a_model_that_gives_up_takes_its_wake_along(world):
    await world.apply(*[world.manifest(f"m{seed}", seed=seed, working_mib=96) for seed in (1, 2)])
    busy = asyncio.create_task(world.ask("m1", "sleep:2"))
    await world.until(lambda: world.instance("m1").line.in_flight == 1)
    wakes = world.report("m2").wakes
    with pytest.raises(DispatchError) as caught:
        await world.ask("m2", deadline=0.3)
    assert caught.value.status == 504
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    await busy
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    assert world.report("m2").wakes == wakes


async def test_a_client_that_goes_away_frees_its_place_at_once(world):
    await world.apply(world.manifest("m1", seed=1, limits={"concurrency": 1}))
    request = asyncio.create_task(world.ask("m1", "sleep:0.5"))
    await world.until(lambda: world.instance("m1").line.in_flight == 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert world.instance("m1").line.in_flight == 0
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


@pytest.mark.parametrize("tier", ["resident", "warm"])
async def test_a_full_queue_says_so_whatever_the_tier(world, tier):
    await world.apply(world.manifest("m1", seed=1, limits={"concurrency": 1, "queue": 2}))
    await world.ask("m1")
    if tier == "warm":
        await world.agent.evict("default", "m1", 10)
    requests = [asyncio.create_task(world.ask("m1", "sleep:0.3")) for _ in range(12)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    refused = [error for error in results if isinstance(error, DispatchError)]
    assert refused
    assert {error.status for error in refused} == {429}
    assert all(error.retry_after_seconds for error in refused)
    assert len(results) - len(refused) >= 2


async def test_running_over_the_deadline_ends_the_work_too(world):
    await world.apply(world.manifest("m1", seed=1))
    await world.ask("m1")
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1", "sleep:1", deadline=0.2)
    assert caught.value.status == 504
    assert world.instance("m1").line.in_flight == 0
    restarts = world.instance("m1").history.restarts
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    assert world.instance("m1").history.restarts == restarts


async def test_a_model_larger_than_the_budget_is_refused_with_both_numbers(world):
    await world.apply(world.manifest("big", mib=40, seed=9, working_mib=150), world.manifest("m1", seed=1))
    with pytest.raises(DispatchError) as caught:
        await world.ask("big")
    assert "190.00 MiB" in str(caught.value)
    assert "176.00 MiB" in str(caught.value)
    assert caught.value.reason is Reason.TOO_LARGE
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_a_kept_model_is_never_evicted_and_others_are_told_why_they_cannot_come(world):
    kept = world.manifest("kept", seed=1, working_mib=48, residency={"keepResident": True})
    await world.apply(kept, world.manifest("large", seed=2, working_mib=130), world.manifest("small", seed=3))
    assert await world.ask("small") == pytest.approx(world.answer(8, 3))
    with pytest.raises(DispatchError) as caught:
        await world.ask("large")
    assert caught.value.reason is Reason.SHARES_WITH_KEPT
    answered = error_object(caught.value)["error"]
    assert (status_of(caught.value), answered["code"]) == (503, "shares_with_kept")
    assert "keepResident" in answered["message"]
    refused = world.report("large")
    assert (refused.ready, refused.reason) == (False, Reason.SHARES_WITH_KEPT)
    assert "leave" in refused.message
    assert "keepResident" in refused.message
    events = [event async for event in world.agent.events.follow(follow=False)]
    assert (Reason.SHARES_WITH_KEPT, refused.message) in {(event.reason, event.message) for event in events}
    assert world.report("kept").tier == "resident"
    assert world.report("kept").wakes == 1
    with pytest.raises(DispatchError):
        await world.agent.evict("default", "kept", 1)


async def test_an_idle_model_leaves_after_its_last_answer_and_not_during_one(world):
    await world.apply(world.manifest("m1", seed=1, residency={"idleAfter": "2s"}))
    await world.ask("m1", "sleep:2.5")
    assert world.report("m1").tier == "resident"
    await world.until(lambda: world.report("m1").tier == "warm", "it left")
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_the_device_holds_nothing_of_a_deleted_model(world):
    await world.apply(world.manifest("m1", seed=1), world.manifest("m2", seed=2))
    await world.ask("m1")
    slow = asyncio.create_task(world.ask("m1", "sleep:0.7"))
    await world.until(lambda: world.instance("m1").line.in_flight == 1)
    group = world.instance("m1").process.group
    await world.apply(world.manifest("m2", seed=2))
    assert await slow == pytest.approx(world.answer(8, 1))
    await world.until(lambda: "default/m1" not in world.broker.instances)
    await world.until(lambda: not any(os.path.exists(path) for path in group.paths), "its control groups are gone")
    assert "default/m1" not in world.broker.memory.frames.owners().values()
    assert world.ledger.held_by("default/m1") == (0, 0)
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1")
    assert caught.value.status == 404
    assert world.ledger.device.held_bytes(kind=Kind.PROMISE) == 0
