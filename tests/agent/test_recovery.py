"""What breaks off in an unforeseen way: it is told, nothing leaks, and the next request is served."""

import asyncio
import errno
import time

import pytest

from agent.world import HANDLER
from omnimodel.agent.agent import Agent
from omnimodel.agent.ingress import _NotTakenError
from omnimodel.agent.instance import State
from omnimodel.agent.views import model_state
from omnimodel.errors import DispatchError, Reason
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

HANGS = HANDLER.replace(
    "    def build(self):\n",
    """    def build(self):
        if os.environ.get("HANG") and torch.empty(0).device.type == "meta":
            print("begun", flush=True)
            time.sleep(600)
""",
)


def breaks(error: Exception):
    def broken(*_args, **_more):
        raise error

    return broken


async def test_a_request_that_leaves_while_its_process_is_seen_to_end_gives_its_place_back(world, monkeypatch):
    await world.apply(world.manifest("m1", seed=1, limits={"concurrency": 1}))
    await world.ask("m1")
    instance, reached = world.instance("m1"), asyncio.Event()

    async def not_sent(*_):
        raise _NotTakenError(instance.process)

    async def ended(_):
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(world.agent.ingress, "_send", not_sent)
        patch.setattr(instance.lifetime, "ended", ended)
        request = asyncio.create_task(world.ask("m1"))
        await reached.wait()
        assert instance.line.in_flight == 1
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    assert instance.line.in_flight == 0
    assert await world.ask("m1", deadline=60) == pytest.approx(world.answer(8, 1))


async def test_a_request_that_was_not_sent_keeps_its_place_and_is_no_further_arrival(world):
    await world.apply(world.manifest("m1", seed=1))
    line = world.instance("m1").line
    line.concurrency = 0
    young = [line.arrive(now) for now in (20.0, 30.0)]
    gap_seconds = line.gap_seconds
    old = line.come_back(10.0)
    assert list(line.waiting) == [old, *young]
    assert (line.gap_seconds, line.last_arrival_seconds) == (gap_seconds, 30.0)
    for waiter in (old, *young):
        waiter.leave()


async def test_a_start_that_breaks_off_is_told_and_not_tried_again_at_once(world, monkeypatch):
    await world.apply(world.manifest("m1", seed=1))
    instance = world.instance("m1")
    await world.broker.orders.stop(instance, "for the test")
    with monkeypatch.context() as patch:
        patch.setattr(instance, "_spawn", breaks(RuntimeError("no more threads")))
        with pytest.raises(DispatchError) as caught:
            await world.ask("m1", deadline=60)
    assert (caught.value.status, caught.value.reason) == (503, Reason.INTERNAL)
    assert "no more threads" in caught.value.problem
    assert caught.value.retry_after_seconds
    instance.failures.recovered()
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_an_image_that_cannot_be_mapped_fails_its_wake_alone(world, monkeypatch):
    await world.apply(world.manifest("m1", seed=1))
    instance, memory = world.instance("m1"), world.broker.memory
    await world.agent.evict("default", "m1", 10)
    memory.arena.drop(instance.prepared.image.digest)
    with monkeypatch.context() as patch:
        patch.setattr(memory.device, "stage", breaks(OSError(errno.ENOMEM, "Cannot allocate memory")))
        with pytest.raises(DispatchError) as caught:
            await world.ask("m1", deadline=60)
    assert "Cannot allocate memory" in caught.value.problem
    assert world.ledger.device.held_bytes(kind=Kind.PROMISE) == 0
    world.check_ledger()
    instance.failures.recovered()
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_a_preparation_that_breaks_off_fails_and_says_so(world, monkeypatch):
    broken = FileNotFoundError(errno.ENOENT, "No such file", "/models/dangling")
    with monkeypatch.context() as patch:
        patch.setattr(world.agent._opened.preparation, "prepare", breaks(broken))
        await world.apply(world.manifest("m1", seed=1))
        report = world.report("m1")
        assert (report.phase, report.reason) == ("failed", Reason.INTERNAL)
        assert "/models/dangling" in report.message
    await world.apply(world.manifest("m1", seed=2))
    assert await world.ask("m1") == pytest.approx(world.answer(8, 2))


async def test_frozen_requests_of_a_removed_revision_still_get_their_model_back(world):
    await world.apply(world.manifest("m1", seed=1))
    instance, moves = world.instance("m1"), world.broker.moves
    await world.agent.evict("default", "m1", 10)
    instance.removed = "a newer revision serves"
    assert not instance.wanted
    assert not model_state(instance, time.monotonic(), moves).loadable
    instance.state, instance.frozen_since_seconds = State.FROZEN, time.monotonic()
    seen = model_state(instance, time.monotonic(), moves)
    assert (instance.wanted, seen.loadable, seen.frozen_bytes) == (True, True, instance.working_bytes)
    instance.state, instance.frozen_since_seconds, instance.removed = State.WARM, None, ""


async def test_a_model_that_is_deleted_while_it_loads_does_not_finish_loading_first(world):
    manifest = world.manifest("m1", seed=1, handler=HANGS)
    manifest["spec"]["runtime"]["env"] = {"HANG": "yes"}
    await world.apply(manifest, wait=False)
    await world.until(lambda: world.instance("m1").state == "starting", "it is being started")
    await world.apply()
    await world.until(lambda: not world.broker.instances, "it is gone, 20 minutes before its load would be given up")


async def test_a_system_that_stops_while_a_model_loads_ends_it(world, tmp_path):
    manifest = world.manifest("m1", seed=1, handler=HANGS)
    manifest["spec"]["runtime"]["env"] = {"HANG": "yes"}
    agent = Agent(tmp_path / "state")
    await agent.start()
    try:
        await agent.apply([world.process(manifest)], world.pool)
        log = agent.layout.log("default", "m1")
        await world.until(lambda: log.exists() and b"begun" in log.read_bytes(), "it loads", seconds=400)
    finally:
        async with asyncio.timeout(120):
            await agent.stop(0.0)
    assert not list((tmp_path / "state" / "run").glob("*.sock"))
