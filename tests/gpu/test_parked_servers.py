"""Servers of foreign engines that sleep and are then parked, on an emulated GPU: nothing of them stays on it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.emulated_book import REFUSED
from gpu.test_servers import (  # noqa: F401  (fixtures)
    CONTEXT_BYTES,
    GRANTED_MIB,
    ask,
    children,
    evict,
    gpu,
    on_device,
    running,
    server,
    starts,
)
from gpu.test_servers import world as emptied_world  # noqa: F401  (a fixture)
from omnimodel.agent import parking
from omnimodel.agent.servers import weights_of
from omnimodel.errors import OmniError
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def world(emptied_world, gpu):  # noqa: F811
    emptied_world.began_seconds = time.time()
    yield emptied_world
    gpu.checkpoint = lambda _name, _pid: ()


def held(world: World, name: str) -> dict[Kind, int]:
    return dict(world.ledger.device.snapshot().held.get(f"default/{name}", {}))


def told(world: World, name: str) -> list[str]:
    """What was told of a model in this test."""
    events = [event for _, event in world.agent.events._events if event.time_seconds >= world.began_seconds]
    return [event.reason for event in events if event.name == name]


async def asleep(world: World, name: str, engine: str = "vllm", **spec) -> str:
    """A server that sleeps; what it said before."""
    await world.apply(server(world, name, engine, **spec))
    said = await ask(world, name)
    await evict(world, name)
    assert world.instance(name).rest.asleep
    return said


async def park(world: World, name: str) -> None:
    await world.broker.moves.park(world.instance(name), "for a test", needed=False)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_server_that_sleeps_and_is_not_wanted_is_parked_and_comes_back_the_same(world, gpu, engine):
    said = await asleep(world, engine, engine)
    pids = {child.pid for child in children(world, engine)}
    before, world.broker.idle_constants = world.broker.idle_constants, replace(
        world.broker.idle_constants, park_seconds=0.2
    )  # fmt: skip
    try:
        world.broker.kick()
        await world.until(lambda: world.report(engine).tier == "parked", "it is parked")
    finally:
        world.broker.idle_constants = before
    assert (on_device(world, gpu, engine), world.report(engine).device_bytes, held(world, engine)) == (0, 0, {})
    assert world.report(engine).ready
    steps = []

    def checkpoint(name, pid):
        steps.append((name, pid in pids, held(world, engine).get(Kind.WORKING)))
        return ()

    gpu.checkpoint = checkpoint
    assert await ask(world, engine) == said
    assert steps == [("restore", True, CONTEXT_BYTES), ("unlock", True, CONTEXT_BYTES)]
    assert {child.pid for child in children(world, engine)} == pids
    assert held(world, engine) == {Kind.WORKING: GRANTED_MIB * MIB}
    assert starts(world, engine) == 1
    await evict(world, engine)
    assert on_device(world, gpu, engine) == CONTEXT_BYTES == world.report(engine).device_bytes


async def test_a_sleeper_whose_room_is_needed_is_parked_and_not_ended_the_least_missed_first(world, gpu):
    await world.apply(
        server(world, "s1", seed=1), server(world, "s2", "sglang", seed=2),
        world.manifest("m1", mib=128, seed=3, working_mib=48),
    )  # fmt: skip
    said = [await ask(world, "s1"), await ask(world, "s2")]
    pids = {child.pid for name in ("s1", "s2") for child in children(world, name)}
    assert await world.ask("m1") == pytest.approx(world.answer(128, 3))
    assert [world.report(name).tier for name in ("s1", "s2")] == ["parked", "warm"]
    assert world.ledger.device.held_bytes("default/s1") == on_device(world, gpu, "s1") == 0
    assert [await ask(world, "s1"), await ask(world, "s2")] == said
    assert {child.pid for name in ("s1", "s2") for child in children(world, name)} == pids
    assert starts(world, "s1") == starts(world, "s2") == 1


async def test_a_server_that_does_not_come_back_is_started_anew_and_never_parked_again(world, gpu):
    said = await asleep(world, "lost")
    await park(world, "lost")
    assert world.report("lost").tier == "parked"
    pid = world.instance("lost").process.pid
    gpu.checkpoint = lambda name, _pid: REFUSED if name == "restore" else ()
    assert (await ask(world, "lost"), starts(world, "lost")) == (said, 2)
    assert world.instance("lost").process.pid != pid
    assert "ParkingFailed" in told(world, "lost")
    gpu.checkpoint = lambda _name, _pid: ()
    await evict(world, "lost")
    assert world.instance("lost").rest.asleep
    await park(world, "lost")
    assert (world.report("lost").tier, on_device(world, gpu, "lost")) == ("warm", CONTEXT_BYTES)
    assert (await ask(world, "lost"), starts(world, "lost")) == (said, 2)


@pytest.mark.parametrize("fault", ["frontend", ""], ids=["two processes hold memory", "the driver refuses"])
async def test_a_server_that_cannot_be_parked_is_stopped_where_its_room_is_needed(world, gpu, fault):
    gpu.checkpoint = lambda name, _pid: REFUSED if name == "lock" else ()
    name = f"s-{fault or 'refused'}"
    said = await asleep(world, name, fault=fault)
    await park(world, name)
    assert world.report(name).tier == "warm"
    assert on_device(world, gpu, name) == world.report(name).device_bytes > 0
    await world.broker.moves.park(world.instance(name), "its room is needed", needed=True)
    assert (world.report(name).tier, held(world, name)) == ("cold", {})
    assert (await ask(world, name), starts(world, name)) == (said, 2)


async def test_a_server_is_not_parked_where_the_host_is_short_and_nobody_waits_for_its_own_bytes(world, monkeypatch):
    monkeypatch.setattr(parking, "_ROOM_SECONDS", 600.0)
    said = await asleep(world, "short")
    host = world.ledger.host
    host.hold("somebody", Kind.PROCESS, host.free_bytes)
    try:
        async with asyncio.timeout(60):
            await park(world, "short")
        assert (world.report("short").tier, on_device(world, gpu, "short")) == ("warm", CONTEXT_BYTES)
        assert not world.broker.moves.parks.can(world.instance("short"))  # for a while
    finally:
        host.give_back("somebody", Kind.PROCESS)
    assert (await ask(world, "short"), starts(world, "short")) == (said, 1)


async def test_a_server_of_which_the_driver_does_not_say_who_holds_what_is_parked_when_it_does(world, gpu, monkeypatch):
    def unsaid() -> dict[int, int]:
        raise OmniError("cuda:0", "does not say who has how much of it")

    monkeypatch.setattr(parking, "_AGAIN_SECONDS", 0.0)
    said = await asleep(world, "unseen")
    instance = world.instance("unseen")
    with monkeypatch.context() as patch:
        patch.setattr(world.broker.memory.device.meter, "process_bytes", unsaid)
        await park(world, "unseen")
    assert (world.report("unseen").tier, instance.rest.unparkable) == ("warm", False)
    assert held(world, "unseen") == {Kind.WORKING: CONTEXT_BYTES} == {Kind.WORKING: on_device(world, gpu, "unseen")}
    await park(world, "unseen")
    assert (world.report("unseen").tier, held(world, "unseen")) == ("parked", {})
    assert (await ask(world, "unseen"), starts(world, "unseen")) == (said, 1)


async def test_two_that_leave_the_device_at_once_do_not_count_on_the_same_host_memory(world, monkeypatch):
    monkeypatch.setattr(parking, "_ROOM_SECONDS", 0.1)
    names = ("one", "other")
    await world.apply(*(server(world, name, seed=seed) for seed, name in enumerate(names)))
    said = [await ask(world, name) for name in names]
    host = world.ledger.host

    async def with_room(size_bytes: int, leave) -> None:
        host.hold("somebody", Kind.PROCESS, host.free_bytes - size_bytes)
        try:
            await asyncio.gather(*(leave(world, name) for name in names))
        finally:
            host.give_back("somebody", Kind.PROCESS)
        assert not host.held_bytes(kind=Kind.PROMISE)

    weights = {weights_of(world.instance(name).prepared.source) for name in names}
    await with_room(3 * weights.pop() // 2, evict)
    assert sorted(world.instance(name).rest.asleep for name in names) == [False, True]
    assert [await ask(world, name) for name in names] == said
    for name in names:
        await evict(world, name)
    await with_room(3 * CONTEXT_BYTES // 2, park)
    assert sorted(world.report(name).tier for name in names) == ["parked", "warm"]
    assert [await ask(world, name) for name in names] == said


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock", ""])
async def test_a_server_that_dies_on_its_way_or_parked_leaves_the_ledger_exact(world, gpu, step):
    def kill(name, pid):
        if name == step:
            os.kill(pid, signal.SIGKILL)
        return ()

    name = f"dies-{step or 'parked'}"
    said = await asleep(world, name)
    gpu.checkpoint = kill
    await park(world, name)
    if not step:
        os.kill(children(world, name)[-1].pid, signal.SIGKILL)
    if step not in {"restore", "unlock"}:
        await world.until(lambda: world.instance(name).process is None, "its process has ended with it")
        await world.until(lambda: not held(world, name), "its bytes are free")
        await world.until(lambda: not world.instance(name).failures.waiting(time.monotonic()), "it may be tried again")
    assert (await ask(world, name), starts(world, name)) == (said, 2)
    world.check_ledger()


async def test_servers_that_are_parked_and_brought_back_all_the_time_answer_all(world, gpu):
    names = [f"many{seed}" for seed in (1, 2, 3, 4)]
    await world.apply(
        *(server(world, name, ("vllm", "sglang")[seed % 2], seed=seed) for seed, name in enumerate(names, 1))
    )
    said = {name: await ask(world, name) for name in names}
    before, world.broker.idle_constants = world.broker.idle_constants, replace(
        world.broker.idle_constants, park_seconds=0.05
    )  # fmt: skip
    try:
        for number in range(6):
            asked = names[number % 2 :: 2]
            assert await asyncio.gather(*(ask(world, name) for name in asked)) == [said[name] for name in asked]
            world.check_ledger()
    finally:
        world.broker.idle_constants = before
    assert all(starts(world, name) == 1 for name in names)
    assert any("Parked" in told(world, name) for name in names)
