"""Models that a server spreads over several GPUs, on an emulated driver: room on all of them or on none."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.machine import Machine, check, machine, pool
from gpu.servers.standin import parts, tensors
from gpu.test_servers import PROGRAM, ask, children, evict, on_device, server, starts
from omnimodel.controllers.status import residency_entry
from omnimodel.errors import DispatchError, Reason

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

BUDGET_BYTES = 144 * MIB
CONTEXT_BYTES = 8 * MIB
CACHE_MIB, GRANTED_MIB = 32, 80  # of both GPUs together, beside 24 MiB of weights
EACH_BYTES = GRANTED_MIB * MIB // 2
HELD_BYTES = CONTEXT_BYTES + (24 + CACHE_MIB) * MIB // 2
OPTIONS = {"vllm": {"cacheMemory": f"{CACHE_MIB}Mi"}, "sglang": {"cacheTokens": CACHE_MIB * 1024}}


def served(folder: Path, count: int) -> World:
    """An agent for GPUs of 144 MiB each."""
    servers = folder / "servers"
    shutil.copytree(Path(__file__).parent / "servers", servers)
    for path in [servers, *servers.parents[:2], *servers.rglob("*")]:
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    world = World(folder / "agent")
    world.pool = pool(memory=BUDGET_BYTES, count=count)
    volumes = {"volumes": [{"name": "servers", "path": str(servers)}]}
    spec = world.pool.spec.model_validate({**world.pool.spec.to_dict(), **volumes})
    world.pool = world.pool.model_copy(update={"spec": spec})
    return world


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    with machine(tmp_path_factory.mktemp("gpus"), devices=2) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def running(gpus, tmp_path_factory):
    world = served(tmp_path_factory.mktemp("spread"), count=3)  # one more than the machine has
    async with gpus.served_by(world):
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(running):
    yield running
    await running.apply()
    await running.until(lambda: not running.agent._devices.instances, "all models are gone")
    await running.until(lambda: not any(held_of(running)), "nothing is held")
    running.check_ledger()


def held_of(world: World, name: str | None = None) -> list[int]:
    """Bytes of each GPU in its ledger, of a model or of all."""
    holder = f"default/{name}" if name else None
    return [broker.memory.ledger.device.held_bytes(holder) for broker in world.brokers.values()]


def spread(world: World, name: str, engine: str = "vllm", *, seed: int = 1, devices: int = 2, fault: str = "", **spec):
    """A model whose server takes 36 MiB of each of two GPUs, of 40 that are granted."""
    made = server(world, name, engine, seed=seed, fault=fault, **spec)
    made["spec"]["runtime"]["options"] = OPTIONS[engine]
    made["spec"]["resources"] = {"deviceMemory": f"{GRANTED_MIB}Mi", "devices": devices}
    made["spec"]["probe"]["expect"] = [{"at": "/choices/0/message/content", "equals": said(world, seed)}]
    return made


@functools.cache
def said(world: World, seed: int = 1, text: str = "hello") -> str:
    """What a server answers whose two parts have the weights between them."""
    path, _ = world.weights(24, seed)
    halves = parts(tensors(path / "model.safetensors"), 2)
    return f"{'+'.join(hashlib.sha256(half).hexdigest()[:16] for half in halves)} {text}"


def small(world: World, *seeds: int, **spec) -> list[dict]:
    """Models of 32 MiB of weights, 32 MiB of working memory and a context of 4 MiB each, on one GPU."""
    return [world.manifest(f"m{seed}", mib=32, seed=seed, working_mib=32, **spec) for seed in seeds]


def exact(world: World, gpus: Machine, *names: str) -> None:
    """The ledger of each GPU has what is held of it, and no less than the driver sees of servers."""
    check(world, gpus)
    for number, broker in enumerate(world.brokers.values()):
        account = broker.memory.ledger.device
        assert account.held_bytes() <= account.capacity_bytes
        for name in names:
            instance, held_bytes = world.instance(name), account.held_bytes(f"default/{name}")
            assert on_device(world, gpus, name, number) <= held_bytes
            if instance.resident and not instance.leaving:
                assert held_bytes == EACH_BYTES
            if instance.process is None:
                assert not held_bytes


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_model_over_two_gpus_answers_and_each_holds_its_part(world, gpus, engine):
    await world.apply(spread(world, engine, engine))
    assert await ask(world, engine) == said(world)
    process = world.instance(engine).process
    assert process.plan.devices == ("/dev/null", "/dev/zero", "/dev/nvidia0", "/dev/nvidia1")
    assert [on_device(world, gpus, engine, number) for number in (0, 1)] == [HELD_BYTES] * 2
    assert held_of(world, engine) == [EACH_BYTES] * 2
    report = world.report(engine)
    assert (report.device, report.device_bytes, report.working_bytes) == (
        "cuda:0, cuda:1",
        2 * EACH_BYTES,
        2 * EACH_BYTES,
    )
    assert residency_entry("pod-0", report)["device"] == "cuda:0, cuda:1"
    for _ in range(3):
        await evict(world, engine)
        assert "its server sleeps" in world.instance(engine).message
        assert [on_device(world, gpus, engine, number) for number in (0, 1)] == [CONTEXT_BYTES] * 2
        assert held_of(world, engine) == [CONTEXT_BYTES] * 2
        assert (world.report(engine).tier, world.report(engine).device_bytes) == ("warm", 2 * CONTEXT_BYTES)
        assert await ask(world, engine) == said(world)
    assert starts(world, engine) == 1
    pool_report = world.agent.report().pool
    assert [device.working_bytes for device in pool_report.devices] == [EACH_BYTES] * 2
    assert pool_report.footprint_bytes == GRANTED_MIB * MIB


async def test_it_swaps_with_models_of_one_gpu_and_with_others_over_both(world, gpus):
    both = {"one": 1, "two": 2, "three": 3}
    await world.apply(*(spread(world, name, seed=seed) for name, seed in both.items()), *small(world, 1, 2, 3, 4, 5))

    async def one(name: str) -> None:
        if name in both:
            assert await ask(world, name) == said(world, both[name])
        else:
            assert await world.ask(name) == pytest.approx(world.answer(32, int(name[1:])))

    names = [*both, "m1", "m2", "m3", "m4", "m5"]
    for name in [*names, *names[::-1], "one", "m1", "two", "m2", "three", "m3"]:
        await one(name)
        exact(world, gpus, *both)
    for _ in range(2):
        await asyncio.gather(*(one(names[index % len(names)]) for index in range(32)))
        world.check_ledger()
        assert not any(world.instance(name).spread.waits for name in names)
    assert all(world.instance(name).history.evictions for name in both)
    assert {world.instance(name).device for name in names} == {"cuda:0", "cuda:1"}


async def test_a_server_that_keeps_its_memory_on_one_gpu_of_two_is_stopped(world, gpus):
    await world.apply(spread(world, "keeps", fault="keeps@1"))
    await ask(world, "keeps")
    await evict(world, "keeps")
    assert "it kept 36.00 MiB of 36.00 MiB in its sleep" in world.instance("keeps").message
    assert (children(world, "keeps"), held_of(world, "keeps")) == ([], [0, 0])
    assert await ask(world, "keeps") == said(world)


async def test_a_server_that_takes_more_of_one_gpu_than_its_part_does_not_serve(world):
    await world.apply(spread(world, "greedy", fault="greedy@1"))
    report = world.report("greedy")
    assert (report.ready, report.reason) == (False, "OutOfMemory")
    assert "its server holds 52.00 MiB of cuda:1, of 40.00 MiB granted" in report.message
    await world.until(lambda: not any(held_of(world, "greedy")), "its bytes are free on both")


async def test_a_start_that_fails_on_one_gpu_leaves_nothing_on_the_other(world, gpus):
    await world.apply(spread(world, "dies", fault="dies@1"), *small(world, 1, 2, 3, 4))
    assert not world.report("dies").ready
    assert "its engine ended while it started" in world.report("dies").message
    for seed in (1, 2, 3, 4):
        assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
    instance = world.instance("dies")
    await world.until(lambda: not instance.resident and instance.name not in world.broker.moves, "it is at rest")
    assert (held_of(world, "dies"), instance.spread.waits) == ([0, 0], False)
    exact(world, gpus, "dies")


async def test_a_server_that_is_killed_frees_both_gpus_and_comes_back(world, gpus):
    await world.apply(spread(world, "killed"))
    await ask(world, "killed")
    os.kill(world.instance("killed").process.pid, signal.SIGKILL)
    await world.until(lambda: not any(held_of(world, "killed")), "its bytes are free on both")
    await world.until(lambda: not world.instance("killed").failures.waiting(time.monotonic()), "it may be tried again")
    assert await ask(world, "killed") == said(world)
    exact(world, gpus, "killed")


async def test_kept_models_that_leave_no_room_on_one_gpu_of_two_are_named(world, gpus):
    kept = small(world, 1, 2, 3, residency={"keepResident": True})
    await world.apply(*kept)
    await world.until(lambda: all(world.instance(f"m{seed}").resident for seed in (1, 2, 3)), "they are resident")
    full = max(world.brokers.values(), key=lambda broker: len(broker.instances)).name
    await world.apply(*kept, spread(world, "both"), wait=False)
    await world.until(lambda: world.report("both").reason == "SharesWithKept", "it is refused")
    assert f"on {full} it needs 40.00 MiB on the device, but the models that are kept" in world.report("both").message
    assert not any(broker.reserving for broker in world.brokers.values())
    with pytest.raises(DispatchError, match=r"kept resident leave 8\.00 MiB of 144\.00 MiB") as refused:
        await ask(world, "both")
    assert refused.value.reason is Reason.SHARES_WITH_KEPT
    for seed in (1, 2, 3):
        assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
    gone = next(seed for seed in (1, 2, 3) if world.instance(f"m{seed}").device == full)
    await world.apply(*(model for model in kept if model["metadata"]["name"] != f"m{gone}"), spread(world, "both"))
    await world.until(lambda: world.report("both").ready, "there is room on both now")
    assert await ask(world, "both") == said(world)
    exact(world, gpus, "both")


async def test_room_that_waits_for_the_other_gpu_is_free_again_when_nobody_waits(world):
    models = small(world, 1, 2, 3, 4)
    await world.apply(spread(world, "both"), *models)
    for seed in (1, 2, 3, 4):
        await world.ask(f"m{seed}")
    instance = world.instance("both")
    assert not instance.resident
    busy = [seed for seed in (1, 2, 3, 4) if world.instance(f"m{seed}").device == "cuda:1"]
    long = [asyncio.create_task(world.ask(f"m{seed}", "sleep:600")) for seed in busy]
    await world.until(lambda: all(world.instance(f"m{seed}").line.in_flight for seed in busy), "they compute")
    asked = asyncio.create_task(ask(world, "both"))
    await world.until(lambda: instance.spread.has_aside("cuda:0"), "the first GPU has room for it")
    assert world.brokers["cuda:0"].reserving == {"default/both"}
    asked.cancel()
    await world.until(lambda: not instance.spread.waits, "it is given up")
    assert not world.brokers["cuda:0"].reserving
    there = [seed for seed in (1, 2, 3, 4) if seed not in busy]
    for seed in there:
        assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
    assert all(world.instance(f"m{seed}").resident for seed in there)
    world.check_ledger()
    for seed in busy:
        os.kill(world.instance(f"m{seed}").process.pid, signal.SIGKILL)
    await asyncio.gather(*long, return_exceptions=True)


async def test_more_devices_than_the_machine_has_are_refused_with_both_numbers(world):
    await world.apply(spread(world, "three", devices=3))
    report = world.report("three")
    assert (report.ready, report.reason) == (False, "TooLarge")
    assert "is spread over 3 devices, and its pool has 2 here that can be used" in report.message
    with pytest.raises(DispatchError, match="is spread over 3 devices"):
        await ask(world, "three")


async def test_a_program_is_told_how_many_gpus_it_sees(world, gpus):
    made = spread(world, "own")
    del made["spec"]["probe"]
    served_parts = PROGRAM.replace("held = Allocation(40 << 20)", "held = Allocation(20 << 20)\nmore = Allocation(20 << 20, int(sys.argv[2]) - 1)")  # fmt: skip
    command = ["python", "-c", served_parts, "{port}", "{devices}"]
    made["spec"]["runtime"] = {"engine": "command", "task": "infer", "command": command}
    await world.apply(made)
    assert await world.ask("own") == 20
    assert [on_device(world, gpus, "own", number) for number in (0, 1)] == [20 * MIB] * 2
    assert held_of(world, "own") == [EACH_BYTES] * 2
    await evict(world, "own")
    assert held_of(world, "own") == [0, 0]


async def test_when_one_of_its_gpus_is_lost_it_goes_to_others_or_is_refused(tmp_path, tmp_path_factory):
    with machine(tmp_path_factory.mktemp("gpus"), devices=3) as gpus:
        world = served(tmp_path, count=3)
        await world.agent.start()
        try:
            await world.apply(spread(world, "both"), *small(world, 1))
            assert await ask(world, "both") == said(world)
            first, second = world.instance("both").spread.devices
            asked = asyncio.create_task(ask(world, "both", "slow 60"))
            await world.until(lambda: world.instance("both").line.in_flight == 1, "it computes")
            gpus.nvml.silent.add(int(second[-1]))
            gpus.driver.lose_device(int(second[-1]))
            with pytest.raises(DispatchError, match=f"its device {second} is lost"):
                await asked
            assert world.brokers[first].lost is None
            assert await ask(world, "both") == said(world)
            devices = world.instance("both").spread.devices
            assert len(devices) == 2
            assert second not in devices
            assert [bool(held) for held in held_of(world, "both")] == [name != second for name in world.brokers]
            assert world.agent.report().pool.ready

            gpus.nvml.silent.add(int(first[-1]))
            gpus.driver.lose_device(int(first[-1]))
            await world.until(lambda: world.brokers[first].lost is not None, "it is seen")
            await world.until(lambda: world.instance("both").process is None, "its process is killed")
            with pytest.raises(DispatchError, match="is spread over 2 devices, and its pool has 1 here") as refused:
                await ask(world, "both")
            assert refused.value.reason is Reason.TOO_LARGE
            assert "fewer resources.devices" in refused.value.cure
            assert not world.report("both").ready
            assert not any(held_of(world, "both"))
            assert await world.ask("m1") == pytest.approx(world.answer(32, 1))
            assert not any(broker.reserving for broker in world.brokers.values())
            world.check_ledger()
        finally:
            await world.agent.stop(5.0)
        assert gpus.driver.left() == {}
