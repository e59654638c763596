"""What requests meet on their way: how long they were held, storms, alternation, short deadlines, changed minds."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from agent.world import HANDLER, World, command
from omnimodel.agent import instance
from omnimodel.agent.agent import Agent
from omnimodel.agent.journal import has_ended
from omnimodel.errors import DispatchError, Reason
from omnimodel.protocol.dispatch import InferenceRequest

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]


def two_that_exclude_each_other(world) -> list[dict]:
    """Two models of 104 MiB; the device of 176 MiB holds one."""
    return [world.manifest(f"m{seed}", seed=seed, working_mib=96) for seed in (1, 2)]


async def test_the_time_of_the_computation_is_no_waiting(world):
    await world.apply(world.manifest("m1", seed=1))
    await world.ask("m1")
    async with world.request("m1", "sleep:0.3") as response:
        hold = response.hold
    assert (hold.reason, hold.wake_seconds) == ("none", 0.0)
    await world.agent.evict("default", "m1", 10)
    async with world.request("m1", "sleep:0.3") as response:
        hold = response.hold
    assert hold.reason == "wake"
    assert 0 < hold.wake_seconds <= hold.waited_seconds


async def test_a_wrong_body_wakes_the_model_that_refuses_it(world):
    await world.apply(world.manifest("m1", seed=1))
    await world.agent.evict("default", "m1", 10)
    wakes = world.report("m1").wakes
    headers = {"Content-Type": "application/json"}
    async with world.agent.open(
        InferenceRequest("m1", "POST", "/v2/models/m1/infer", headers, b'{"inputs": 1}')
    ) as response:
        assert response.status == 400
    assert world.report("m1").wakes == wakes + 1


async def test_two_hundred_alternating_calls_are_all_answered_and_no_load_is_for_nothing(world, monkeypatch):
    await world.apply(*two_that_exclude_each_other(world))
    served_between: dict[str, list[int]] = {"m1": [], "m2": []}
    woken_at: dict[str, int] = {}
    add = world.agent.events.add

    def record(kind, namespace, name, reason, message, **rest):
        if reason == "Woken":
            woken_at[name] = world.report(name).served
        elif reason == "Evicted" and name in woken_at:
            served_between[name].append(world.report(name).served - woken_at.pop(name))
        add(kind, namespace, name, reason, message, **rest)

    monkeypatch.setattr(world.agent.events, "add", record)
    gate = asyncio.Semaphore(4)

    async def call(number: int) -> bool:
        seed = 1 + number % 2
        async with gate:
            return await world.ask(f"m{seed}") == pytest.approx(world.answer(8, seed))

    assert all(await asyncio.gather(*(call(number) for number in range(200))))
    assert served_between["m1"]
    assert all(count >= 1 for counts in served_between.values() for count in counts), served_between
    assert [world.instance(name).history.restarts for name in ("m1", "m2")] == [0, 0]


async def test_a_resident_model_is_held_for_nobody_while_others_load_and_leave_around_it(world):
    others = [world.manifest(f"m{seed}", seed=seed) for seed in (2, 3, 4, 5)]
    await world.apply(world.manifest("m1", seed=1, residency={"priority": 900}), *others)
    await world.ask("m1")
    wakes = world.report("m1").wakes
    stop = asyncio.Event()

    async def swap() -> int:
        rounds = 0
        while not stop.is_set():
            for seed in (2, 3, 4, 5):
                await world.ask(f"m{seed}")
            rounds += 1
        return rounds

    swapping = asyncio.create_task(swap())
    reasons = set()
    for _ in range(100):
        async with world.request("m1", "hello") as response:
            reasons.add(response.hold.reason)
            assert [chunk async for chunk in response.body]
    stop.set()
    assert await swapping > 0
    assert reasons == {"none"}
    assert world.report("m1").wakes == wakes


async def test_a_saturated_model_is_busy_and_not_broken(world):
    await world.apply(*two_that_exclude_each_other(world))
    restarts = [world.instance(name).history.restarts for name in ("m1", "m2")]
    calls = [world.ask(f"m{1 + number % 2}", "sleep:0.02") for number in range(120)]
    answers = await asyncio.gather(*calls)
    assert len(answers) == 120
    assert [world.instance(name).history.restarts for name in ("m1", "m2")] == restarts
    assert all(world.report(name).ready for name in ("m1", "m2"))


async def test_the_expiries_of_an_impatient_caller_harm_nobody_else(world):
    await world.apply(world.manifest("m1", seed=1, limits={"concurrency": 4, "queue": 200}))
    await world.ask("m1")
    impatient = [asyncio.create_task(world.ask("m1", "sleep:0.05", deadline=0.1)) for _ in range(100)]
    patient = [asyncio.create_task(world.ask("m1")) for _ in range(20)]
    assert set(await asyncio.gather(*patient)) == {world.answer(8, 1)}
    results = await asyncio.gather(*impatient, return_exceptions=True)
    expired = [error for error in results if isinstance(error, BaseException)]
    assert expired
    assert {(error.status, error.reason) for error in expired} == {(504, Reason.DEADLINE_EXCEEDED)}
    assert world.report("m1").ready
    assert world.instance("m1").history.restarts == 0
    assert world.report("m1").in_flight == 0


async def test_ten_models_made_at_once_are_all_ready_and_none_was_restarted(world):
    manifests = [world.manifest(f"m{seed}", seed=1 + seed % 4) for seed in range(10)]
    for manifest in manifests:
        del manifest["spec"]["resources"]
    await world.apply(*manifests)
    assert all(world.report(f"m{seed}").ready for seed in range(10))
    assert {world.instance(f"m{seed}").history.restarts for seed in range(10)} == {0}
    world.check_ledger()


async def test_who_changes_their_mind_does_not_wait_for_what_they_asked_for_by_mistake(world):
    await world.apply(*two_that_exclude_each_other(world), world.manifest("m3", seed=3))
    await world.ask("m1")
    busy = asyncio.create_task(world.ask("m1", "sleep:3"))
    await world.until(lambda: world.instance("m1").line.in_flight == 1)
    wakes = world.report("m2").wakes
    mistake = asyncio.create_task(world.ask("m2"))
    await world.until(lambda: world.instance("m2").line.waiting, "the mistake waits")
    mistake.cancel()
    await asyncio.gather(mistake, return_exceptions=True)
    assert await world.ask("m3") == pytest.approx(world.answer(8, 3))
    assert not busy.done(), "it did not wait for the victim of the mistake"
    await busy
    assert world.report("m2").wakes == wakes


async def stop(world, pid: int) -> None:
    """Let every thread of a process stand still."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    await world.until(lambda: all(") T " in state.read_text() for state in threads.glob("*/stat")), "it stands still")


SERVER = """
import http.server, pathlib, sys, time
if pathlib.Path("/tmp/began").exists():
    time.sleep(600)
pathlib.Path("/tmp/began").touch()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = b'{"outputs": [{"name": "sum", "data": [7], "shape": [1], "datatype": "FP64"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    do_GET = do_POST
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_server_that_nobody_waits_for_any_more_does_not_hold_up_others_until_it_has_started(world):
    """llama-swap#727: a load whose only request was cancelled ran to its end, and the next model waited for it."""
    await world.apply(world.program("slow", SERVER, mib=120), world.manifest("m1", seed=1, working_mib=96))
    await world.ask("m1")
    slow, wakes = world.instance("slow"), world.report("slow").wakes
    assert (slow.process is not None, slow.resident) == (True, False)  # its second start never comes to an end
    request = asyncio.create_task(world.ask("slow"))
    await world.until(lambda: slow.state == "waking", "its server is being started")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert await world.ask("m1", deadline=60) == pytest.approx(world.answer(8, 1))
    assert world.report("slow").wakes == wakes
    assert slow.failure is None
    assert await world.ask("slow", deadline=60) == 7
    world.check_ledger()


async def test_a_process_that_does_not_leave_is_ended_and_what_it_held_is_free(world, monkeypatch):
    await world.apply(world.manifest("m1", seed=1), world.manifest("m2", seed=2))
    await world.ask("m1")
    pid = world.instance("m1").process.pid
    await stop(world, pid)
    with monkeypatch.context() as patch:
        patch.setattr(instance, "_ACKNOWLEDGE_SECONDS", 1.0)
        await world.agent.evict("default", "m1", 60)
    assert world.report("m1").tier == "cold"
    assert world.ledger.held_by("default/m1")[0] == 0
    told = [event.reason async for event in world.agent.events.follow(follow=False) if event.name == "m1"]
    assert "EvictTimeout" in told
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    world.check_ledger()


async def test_requests_race_with_evictions_by_hand_and_none_is_lost(world):
    await world.apply(world.manifest("m1", seed=1))
    stop = asyncio.Event()

    async def evict() -> int:
        times = 0
        while not stop.is_set():
            with contextlib.suppress(DispatchError):  # it was asked without a pause
                await world.agent.evict("default", "m1", 10)
                times += 1
        return times

    evicting = asyncio.create_task(evict())
    answers = [await asyncio.gather(*(world.ask("m1") for _ in range(4))) for _ in range(25)]
    stop.set()
    assert await evicting > 0
    assert {answer for row in answers for answer in row} == {world.answer(8, 1)}
    assert world.instance("m1").history.restarts == 0


@pytest.mark.parametrize("body", ["whole", "in parts"])
async def test_what_is_asked_after_a_process_was_killed_is_served_by_the_next(world, body):
    await world.apply(world.manifest("m1", seed=1))
    await world.ask("m1")  # its connection is kept
    process = world.instance("m1").process
    os.kill(process.pid, signal.SIGKILL)
    assert has_ended(process._pidfd, 30.0)  # which the agent has not seen yet
    assert await asked(world, body) == pytest.approx(world.answer(8, 1))
    assert world.instance("m1").history.restarts == 1
    world.check_ledger()


async def asked(world, body: str) -> float:
    """The answer to a request with a body that is whole, or comes in parts as from another pod."""
    if body == "whole":
        return await world.ask("m1")
    content = json.dumps(command("hello")).encode()

    class Parts:  # it can be iterated over, and is no iterator itself: so are they that come from another pod
        async def __aiter__(self):
            yield content[:10]
            yield content[10:]

    headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
    request = InferenceRequest("m1", "POST", "/v2/models/m1/infer", headers, Parts())
    async with world.agent.open(request) as response:
        answer = b"".join([chunk async for chunk in response.body])
    assert response.status == 200, answer
    return json.loads(answer)["outputs"][0]["data"][0]


async def test_what_a_killed_process_was_at_is_not_sent_again(world):
    says = HANDLER.replace("        word,", "        print('begins', command, flush=True)\n        word,")
    await world.apply(world.manifest("m1", seed=1, handler=says))
    await world.ask("m1")
    log = world.agent.layout.log("default", "m1")
    asking = asyncio.create_task(world.ask("m1", "sleep:30"))
    await world.until(lambda: "begins sleep:30" in log.read_text())
    os.kill(world.instance("m1").process.pid, signal.SIGKILL)
    with pytest.raises(DispatchError, match="killed from outside") as caught:
        await asking
    assert (caught.value.status, caught.value.reason) == (502, Reason.CRASHED)
    assert log.read_text().count("begins sleep:30") == 1
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_who_is_cut_off_by_a_system_that_stops_is_told_so_with_the_whole_name(tmp_path):
    world = World(tmp_path)
    world.agent = Agent(tmp_path / "state")
    await world.agent.start()
    try:
        await world.apply(world.manifest("m1", seed=1, limits={"concurrency": 1}))
        await world.ask("m1")
        asking = asyncio.create_task(world.ask("m1", "sleep:60"))
        await world.until(lambda: world.instance("m1").session.connector._acquired, "it was sent")
        held = asyncio.create_task(world.ask("m1"))
        await world.until(lambda: world.instance("m1").line.waiting, "another waits")
    finally:
        stopping = asyncio.create_task(world.agent.stop(0.5))
        await asyncio.sleep(0)
    late = asyncio.create_task(world.ask("m1"))
    errors = await asyncio.gather(asking, held, late, return_exceptions=True)
    await stopping
    assert {(error.status, error.reason, error.retry_after_seconds) for error in errors} == {(503, Reason.DRAINING, 5)}
    cut_off, *others = map(str, errors)
    assert others == ["OmniModel default/m1: the system is stopping; try again later"] * 2
    assert "did not end in the time that was left to it" in cut_off
    assert "--drain" in cut_off


async def test_who_was_held_too_long_is_told_in_a_sentence_what_for(world):
    await world.apply(*two_that_exclude_each_other(world))
    await world.ask("m1")
    await world.ask("m2")
    busy = asyncio.create_task(world.ask("m2", "sleep:2"))
    await world.until(lambda: world.instance("m2").line.in_flight == 1)
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1", deadline=0.3)
    assert caught.value.problem == (
        "the request was held for 0.3 s, its deadline, waiting for room on the device (the model was evicted for "
        "default/m2)"
    )
    with pytest.raises(DispatchError, match="it was not resident after") as caught:
        await world.agent.wake("default", "m1", 0.3)
    assert ": evicted for" not in caught.value.problem
    await busy
