"""Servers of foreign engines on an emulated GPU: put to sleep, woken, stopped, and held to what the driver says.

The real agent, sandboxes and control channels; `gpu/servers` stands for vLLM and SGLang, which have never run here.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

import psutil

from agent.world import MIB, World
from gpu.emulated_book import mapped_bytes
from gpu.machine import DEVICE_BYTES, give_frames_up, pool, somebody_else
from gpu.servers.standin import tensors
from gpu.serving import emptied, serving
from gpu.test_agent import gpu  # noqa: F401  (a fixture)
from omnimodel.agent import servers
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.memory.ledger import Kind
from omnimodel.protocol.dispatch import InferenceRequest

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

CONTEXT_BYTES = 8 * MIB
WEIGHTS_MIB, CACHE_MIB, GRANTED_MIB = 24, 24, 64
OPTIONS = {"vllm": {"cacheMemory": f"{CACHE_MIB}Mi"}, "sglang": {"cacheTokens": CACHE_MIB * 1024}}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def running(gpu, tmp_path_factory):  # noqa: F811
    servers = tmp_path_factory.mktemp("servers")
    shutil.copytree(Path(__file__).parent / "servers", servers, dirs_exist_ok=True)
    for path in [servers, *servers.parents[:2], *servers.rglob("*")]:
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    world = World(tmp_path_factory.mktemp("agent"))
    world.pool = pool(memory=192 * MIB)
    world.pool = world.pool.model_copy(
        update={"spec": world.pool.spec.model_validate(
            {**world.pool.spec.to_dict(), "volumes": [{"name": "servers", "path": str(servers)}]}
        )}
    )  # fmt: skip
    async with serving(world, gpu):
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(running):
    yield running
    await emptied(running)
    assert not running.ledger.device.held_bytes(kind=Kind.WORKING)


def server(world: World, name: str, engine: str = "vllm", *, seed: int = 1, fault: str = "", **spec) -> dict:
    """A model behind a server."""
    path, _ = world.weights(WEIGHTS_MIB, seed)
    content = {"at": "/choices/0/message/content", "equals": f"{digest(world, seed)} hello"}
    return {
        "metadata": {"name": name},
        "spec": {
            "source": {"path": str(path)},
            "runtime": {
                "engine": engine,
                "options": OPTIONS[engine],
                "environment": {"path": ["/servers"]},
                "env": {"STANDIN_FAULT": fault},
            },
            "mounts": [{"name": "servers", "source": {"volume": {"name": "servers"}}, "path": "/servers"}],
            "resources": {"deviceMemory": f"{GRANTED_MIB}Mi"},
            "probe": {"path": "/v1/chat/completions", "json": chat(name, "hello"), "expect": [content]},
            **spec,
        },
    }


def chat(name: str, text: str) -> dict:
    return {"model": name, "messages": [{"role": "user", "content": text}]}


@functools.cache
def digest(world: World, seed: int) -> str:
    """What a server says of its weights."""
    path, _ = world.weights(WEIGHTS_MIB, seed)
    return hashlib.sha256(tensors(path / "model.safetensors")).hexdigest()[:16]


async def ask(world: World, name: str, text: str = "hello") -> str:
    """Chat; the answer."""
    status, answer = await post(world, name, "/v1/chat/completions", chat(name, text))
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


async def post(world: World, name: str, path: str, body: dict) -> tuple[int, dict]:
    request = InferenceRequest(
        name, "POST", path, {"Content-Type": "application/json"}, json.dumps(body).encode(), None
    )
    async with world.agent.open(request) as response:
        return response.status, json.loads(b"".join([chunk async for chunk in response.body]) or b"{}")


def children(world: World, name: str) -> list[psutil.Process]:
    """The server of a model, and what it has started; nothing when its process has just ended."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(world.instance(name).process.pid).children(recursive=True)
        return [child for child in found if _runs(child)]
    return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def on_device(world: World, gpu, name: str, device: int = 0) -> int:  # noqa: F811
    """Bytes that the server of a model has of a device, by the driver."""
    process = world.instance(name).process
    return sum(mapped_bytes(child.pid, device) for child in children(world, name)) if process else 0


async def evict(world: World, name: str) -> None:
    await world.agent.evict("default", name, 20)


def starts(world: World, name: str) -> int:
    log = world.agent.layout.log("default", name)
    return log.read_text().count("engine starts") if log.exists() else 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_server_that_is_evicted_sleeps_and_answers_the_same_after_its_wake(world, gpu, engine):  # noqa: F811
    await world.apply(server(world, f"{engine}-1", engine))
    name = f"{engine}-1"
    said = await ask(world, name)
    assert said == f"{digest(world, 1)} hello"
    pids = {child.pid for child in children(world, name)}
    assert on_device(world, gpu, name) == CONTEXT_BYTES + (WEIGHTS_MIB + CACHE_MIB) * MIB
    assert world.report(name).device_bytes == GRANTED_MIB * MIB
    for _ in range(3):
        await evict(world, name)
        assert on_device(world, gpu, name) == CONTEXT_BYTES == world.report(name).device_bytes
        assert (world.report(name).tier, world.instance(name).rest.asleep) == ("warm", True)
        assert "its server sleeps" in world.instance(name).message
        assert await ask(world, name) == said
        assert {child.pid for child in children(world, name)} == pids
    assert starts(world, name) == 1


async def test_more_servers_than_the_device_holds_answer_all_and_sleepers_give_way(world, gpu):  # noqa: F811
    names = [f"s{seed}" for seed in (1, 2, 3, 4)]
    await world.apply(
        *(server(world, name, ("vllm", "sglang")[seed % 2], seed=seed) for seed, name in enumerate(names, 1))
    )

    async def one(index: int) -> None:
        name = names[index % 4]
        assert await ask(world, name) == f"{digest(world, 1 + index % 4)} hello"
        assert gpu.used_bytes + sum(on_device(world, gpu, each) for each in names) <= DEVICE_BYTES
        world.check_ledger()

    for index in range(8):
        await one(index)
    await asyncio.gather(*(one(index) for index in range(40)))
    assert all(not world.instance(name).rest.sleepless for name in names)


async def test_a_wake_makes_room_again_for_what_others_are_seen_to_hold_meanwhile(world, gpu, monkeypatch):  # noqa: F811
    first = world.manifest("m1", mib=32, seed=1, working_mib=32)
    await world.apply(first)
    await world.ask("m1")
    await evict(world, "m1")  # its frames are free, and there
    frames, account = world.broker.memory.frames, world.ledger.device
    make_room, surplus = frames.make_room, []

    async def and_another_is_measured(worth):
        await make_room(worth)
        if account.promised("default/s1") and not surplus:
            account.hold("default/other", Kind.CONTEXT, (account.spare_frames() + 2) * account.frame_bytes)
            surplus.append(account.surplus_frames())

    monkeypatch.setattr(frames, "make_room", and_another_is_measured)
    try:
        await world.apply(first, server(world, "s1"))
        assert await ask(world, "s1") == f"{digest(world, 1)} hello"
    finally:
        account.give_back("default/other", Kind.CONTEXT)
    assert surplus[0] > 0


async def test_a_server_beside_models_of_frames_leaves_them_what_it_does_not_need(world, gpu):  # noqa: F811
    await world.apply(
        server(world, "s1"), *(world.manifest(f"m{seed}", mib=32, seed=seed, working_mib=32) for seed in (1, 2, 3))
    )
    for _ in range(2):
        assert await ask(world, "s1") == f"{digest(world, 1)} hello"
        for seed in (1, 2, 3):
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
        world.check_ledger()
        assert gpu.used_bytes + on_device(world, gpu, "s1") <= DEVICE_BYTES


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_requests_that_come_while_a_server_falls_asleep_are_held_and_answered(world, engine):
    await world.apply(server(world, f"held-{engine}", engine))
    name = f"held-{engine}"
    for _ in range(2):
        asked = [asyncio.create_task(ask(world, name, f"slow 0.0{number}")) for number in range(1, 7)]
        await world.until(lambda: world.instance(name).line.in_flight, "some are in flight")
        leaving = asyncio.create_task(evict(world, name))
        asked += [asyncio.create_task(ask(world, name, f"late {number}")) for number in range(94)]
        for answer in await asyncio.gather(*asked):
            assert answer.startswith(digest(world, 1))
        await asyncio.gather(leaving, return_exceptions=True)
    assert starts(world, name) == 1


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("keeps", "it kept 56.00 MiB of 56.00 MiB in its sleep"),
        ("refuses", "it did not fall asleep"),
        ("unseen", ""),
    ],
    ids=["that keeps its memory", "that refuses to sleep", "that the driver does not see"],
)
async def test_a_server_is_stopped(world, gpu, fault, why):  # noqa: F811
    name = f"{fault}-1"
    await world.apply(server(world, name, fault=fault))
    for number in (1, 2):
        said = await ask(world, name)
        assert starts(world, name) == number
        await evict(world, name)
        assert (world.report(name).tier, world.report(name).device_bytes) == ("warm", 0)
        assert (children(world, name), on_device(world, gpu, name)) == ([], 0)
        assert world.instance(name).rest.sleepless == why
        assert world.report(name).message.endswith(f"its server was stopped{': ' * bool(why)}{why}")
    assert await ask(world, name) == said


async def test_a_server_without_a_probe_is_stopped_until_it_has_one(world):
    manifest = server(world, "unproven")
    probe = manifest["spec"].pop("probe")
    await world.apply(manifest)
    said = await ask(world, "unproven")
    await evict(world, "unproven")
    assert children(world, "unproven") == []
    assert "stopped: without a probe in its manifest" in world.report("unproven").message
    manifest["spec"]["probe"] = probe
    await world.apply(manifest)
    assert (await ask(world, "unproven"), starts(world, "unproven")) == (said, 2)
    await evict(world, "unproven")
    assert world.instance("unproven").rest.asleep


@pytest.mark.parametrize(
    ("moment", "asleep"),
    [("before it sleeps", False), ("while it falls asleep", True), ("when it has woken", True)],
)
async def test_a_driver_that_does_not_answer_for_a_moment_ends_no_server(world, gpu, monkeypatch, moment, asleep):  # noqa: F811
    name = f"unheard-{moment.replace(' ', '-')}"
    await world.apply(server(world, name))
    said = await ask(world, name)
    instance, meter = world.instance(name), world.broker.memory.device.meter
    process, process_bytes, refused = instance.process, meter.process_bytes, []

    def now() -> bool:
        if refused and time.monotonic() > refused[0] + 1:
            return False
        put_to_sleep = world.ledger.host.held_bytes(f"default/{name}", Kind.PROMISE) > 0
        return {
            "before it sleeps": instance.state == "evicting" and not put_to_sleep,
            "while it falls asleep": put_to_sleep,
            "when it has woken": instance.proving,
        }[moment]

    def says() -> dict[int, int]:
        if now():
            refused.append(time.monotonic())
            raise OmniError("cuda:0", "does not say who has how much of it")
        return process_bytes()

    monkeypatch.setattr(meter, "process_bytes", says)
    await evict(world, name)
    assert instance.rest.asleep == asleep
    assert on_device(world, gpu, name) == (CONTEXT_BYTES if asleep else 0)
    assert (await ask(world, name), starts(world, name)) == (said, 1 if asleep else 2)
    assert refused
    assert instance.process is process
    assert instance.failure is None


async def test_a_server_that_nobody_sees_leave_is_killed_and_the_next_request_has_another(world, gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(servers, "_SETTLED_SECONDS", 0.3)
    await world.apply(server(world, "unseen"))
    said = await ask(world, "unseen")
    instance, meter = world.instance("unseen"), world.broker.memory.device.meter
    pid, process_bytes = instance.process.pid, meter.process_bytes

    def says() -> dict[int, int]:
        if instance.state == "evicting":
            raise OmniError("cuda:0", "does not say who has how much of it")
        return process_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(meter, "process_bytes", says)
        await evict(world, "unseen")
    await world.until(lambda: instance.process is None, "its process is gone")
    assert instance.failure.reason is Reason.EVICT_TIMEOUT
    assert "does not say who has how much" in instance.failure.problem
    await world.until(lambda: not instance.failures.waiting(time.monotonic()), "it may be tried again")
    assert await ask(world, "unseen") == said
    assert instance.process.pid != pid


async def test_what_a_killed_server_held_is_free_only_when_the_driver_shows_it_no_more(world, gpu, monkeypatch):  # noqa: F811
    await world.apply(server(world, "gone"))
    await ask(world, "gone")
    meter, pid = world.broker.memory.device.meter, children(world, "gone")[-1].pid
    before = meter.process_bytes()
    monkeypatch.setattr(meter, "process_bytes", lambda: before)  # it takes its time
    world.instance("gone").process.kill()
    await world.until(lambda: world.instance("gone").process is None, "its process is gone")
    assert world.ledger.device.held_bytes("default/gone") == 0
    assert world.ledger.device.held_bytes(f"default/gone ended {pid}") == GRANTED_MIB * MIB
    monkeypatch.undo()
    await world.until(lambda: not world.ledger.device.held_bytes(f"default/gone ended {pid}"), "it is free")


async def test_a_server_for_which_somebody_else_has_left_no_room_is_not_started_and_says_so(world, gpu):  # noqa: F811
    """llm-d FMA#746, NVIDIA/cuda-checkpoint#44: woken on a device that somebody else has filled."""
    await world.apply(server(world, "crowded"))
    said = await ask(world, "crowded")
    await evict(world, "crowded")
    await give_frames_up(world.broker)
    instance = world.instance("crowded")
    for parked in (False, True):
        if parked:
            await world.broker.moves.park(instance, "for a test", needed=False)
        with somebody_else(gpu.book_of(0)):
            with pytest.raises(DispatchError, match=r"of cuda:0 are needed, it has .* free") as caught:
                await ask(world, "crowded")
            assert caught.value.reason is Reason.DEVICE_FULL
            assert instance.tier == ("parked" if parked else "warm")
        instance.failures.recovered()  # and need not wait
        assert (await ask(world, "crowded"), starts(world, "crowded")) == (said, 1)
        await evict(world, "crowded")


async def test_a_server_that_answers_before_it_has_let_go_is_waited_for(world, gpu):  # noqa: F811
    await world.apply(server(world, "late", fault="late"))
    said = await ask(world, "late")
    await evict(world, "late")
    assert on_device(world, gpu, "late") == CONTEXT_BYTES == world.report("late").device_bytes
    assert (await ask(world, "late"), starts(world, "late")) == (said, 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_server_that_does_not_wake_is_started_anew_for_the_request_and_sleeps_no_more(world, engine):
    name = f"insomnia-{engine}"
    await world.apply(server(world, name, engine, fault="insomnia"))
    said = await ask(world, name)
    await evict(world, name)
    assert world.instance(name).rest.asleep
    assert (await ask(world, name), starts(world, name)) == (said, 2)
    assert "its server answered /" in world.instance(name).rest.sleepless
    await evict(world, name)
    assert (world.instance(name).rest.asleep, world.report(name).device_bytes) == (False, 0)
    assert "stopped: its server answered /" in world.report(name).message


async def test_a_server_that_dies_asleep_leaves_nothing_behind_and_the_next_request_has_another(world):
    await world.apply(server(world, "dies"))
    said = await ask(world, "dies")
    await evict(world, "dies")
    os.kill(children(world, "dies")[-1].pid, signal.SIGKILL)
    await world.until(lambda: world.instance("dies").process is None, "its process has ended with it")
    await world.until(lambda: not world.ledger.device.held_bytes("default/dies"), "its bytes are free")
    assert not world.instance("dies").rest.asleep
    assert (await ask(world, "dies"), starts(world, "dies")) == (said, 2)


async def test_a_server_that_wakes_with_wrong_weights_answers_nobody(world):
    await world.apply(server(world, "garbled", fault="garbled"))
    said = await ask(world, "garbled")
    await evict(world, "garbled")
    assert (await ask(world, "garbled"), starts(world, "garbled")) == (said, 2)
    assert "wrong answer" in world.instance("garbled").rest.sleepless
    await evict(world, "garbled")
    assert not world.instance("garbled").rest.asleep


async def test_a_server_that_takes_more_than_it_was_granted_does_not_serve(world):
    await world.apply(server(world, "greedy", fault="greedy"))
    report = world.report("greedy")
    assert (report.phase, report.ready, report.reason) == ("failed", False, "OutOfMemory")
    assert "its server holds 80.00 MiB of the device, of 64.00 MiB granted" in report.message
    await world.until(lambda: not world.ledger.device.held_bytes("default/greedy"), "its bytes are free")


async def test_nobody_is_let_in_to_a_server_that_is_still_being_measured(world, monkeypatch):
    await world.apply()  # which opens the device
    meter = world.broker.memory.device.meter
    ask_driver, asked, answers = meter.process_bytes, threading.Event(), threading.Event()

    def process_bytes():
        asked.set()
        assert answers.wait(60)
        return ask_driver()

    monkeypatch.setattr(meter, "process_bytes", process_bytes)
    try:
        await world.apply(server(world, "slowly", fault="greedy"), wait=False)
        instance = world.instance("slowly")
        await world.until(lambda: instance.resident and asked.is_set(), "the driver is asked what it holds")
        instance.door.admit()
        assert (instance.line.in_flight, instance.verified) == (0, False)
    finally:
        answers.set()
    await world.until(lambda: world.report("slowly").phase == "failed", "it does not serve")
    assert world.report("slowly").reason == "OutOfMemory"


async def test_what_the_system_tells_a_server_by_is_no_business_of_clients(world):
    await world.apply(server(world, "closed"))
    for path in ("/sleep", "/wake_up", "/collective_rpc", "//sleep", "/%73leep", "/v1x"):
        status, answer = await post(world, "closed", path, {})
        assert (status, answer["error"]["code"]) == (404, "not_found")
    assert await ask(world, "closed") == f"{digest(world, 1)} hello"


# Servers that cannot sleep

PROGRAM = """
import os, sys, time
sys.path.insert(0, "/servers")
from standin import Allocation, Handler, Threads, hashlib

held = Allocation(40 << 20)
if "--stray" in sys.argv and not os.fork():
    os.setsid()
    stray = Allocation(4 << 20)
    os.execv(sys.executable, [sys.executable, "-c", "import mmap, os, time; d = os.memfd_create('device-0');"
        "os.ftruncate(d, 4 << 20); m = mmap.mmap(d, 4 << 20); time.sleep(3600)"])

class Echo(Handler):
    def do_POST(self):
        self.body()
        self.say(200, {"outputs": [{"name": "served", "datatype": "INT64", "shape": [1], "data": [len(held.map) >> 20]}]})

print("engine starts", flush=True)
Threads(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
"""


def program(world: World, name: str, *arguments: str) -> dict:
    """A model behind a program of somebody's own."""
    found = server(world, name)
    del found["spec"]["probe"]
    found["spec"]["runtime"] = {
        "engine": "command",
        "task": "infer",
        "command": ["python", "-c", PROGRAM, "{port}", *arguments],
    }
    return found


async def test_a_program_is_stopped_and_counts_with_what_its_manifest_says(world, gpu):  # noqa: F811
    await world.apply(program(world, "own"))
    for number in (1, 2):
        assert await world.ask("own") == 40
        assert (starts(world, "own"), on_device(world, gpu, "own")) == (number, 40 * MIB)
        assert world.report("own").device_bytes == GRANTED_MIB * MIB
        pid = world.instance("own").process.pid
        await evict(world, "own")
        assert (on_device(world, gpu, "own"), world.report("own").device_bytes) == (0, 0)
        assert world.instance("own").process.pid == pid


async def test_a_program_that_leaves_memory_behind_is_killed_with_all_it_has_started(world, gpu):  # noqa: F811
    await world.apply(program(world, "stray", "--stray"))
    assert await world.ask("stray") == 40
    pids = [child.pid for child in children(world, "stray")]
    assert sum(map(mapped_bytes, pids)) == 44 * MIB
    await evict(world, "stray")
    await world.until(lambda: world.instance("stray").process is None, "its process is gone")
    assert not sum(map(mapped_bytes, pids))
    assert not world.ledger.device.held_bytes("default/stray")
    await world.until(lambda: not world.instance("stray").failures.waiting(time.monotonic()), "it may be tried again")
    assert await world.ask("stray") == 40
