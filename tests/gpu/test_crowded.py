"""A GPU that others use too, host memory that cannot be pinned, and many models at once: on an emulated driver."""

from __future__ import annotations

import functools
import time

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.greedy import evict, gpu, greedy, running, told, world  # noqa: F401  (fixtures)
from gpu.machine import check, give_frames_up, pool, somebody_else
from omnimodel.errors import DispatchError, Reason
from omnimodel.memory.devices import cuda, cuda_arena
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]


async def test_ten_models_of_unknown_size_made_at_once_are_all_ready_and_none_was_restarted(world, gpu):  # noqa: F811
    manifests = [greedy(world, f"m{number}", 1 + number % 4) for number in range(10)]
    for manifest in manifests:
        del manifest["spec"]["resources"]
        manifest["spec"]["runtime"]["options"]["cacheMib"] = 24
    await world.apply(*manifests)
    for number in range(10):
        report = world.report(f"m{number}")
        assert report.ready, report
        assert report.working_bytes == (24 + 6 + 16 + 2) * MIB  # a quarter and 16 MiB more, in steps of 4
        assert world.instance(f"m{number}").history.restarts == 0
    check(world, gpu)


async def test_a_wake_for_which_somebody_else_has_left_no_room_says_so_and_the_next_one_comes(world, gpu):  # noqa: F811
    await world.apply(greedy(world, "small"), world.manifest("large", mib=96, seed=2, working_mib=32))
    assert await world.ask("large") == pytest.approx(world.answer(96, 2))
    await evict(world, "large")
    account = world.ledger.device
    await give_frames_up(world.broker)
    pid = world.instance("large").process.pid
    with somebody_else(gpu.book):
        with pytest.raises(DispatchError, match=r"frames need \d+ bytes, it has \d+ free") as caught:
            await world.ask("large")
        assert caught.value.reason is Reason.DEVICE_FULL
        assert "device.memory" in caught.value.cure
        assert "frames need" in told(world, "large")["DeviceFull"]
        world.check_ledger()
        assert (
            account.held_bytes("default/large", Kind.PROMISE) == account.held_bytes("default/large", Kind.FRAMES) == 0
        )
    instance = world.instance("large")
    await world.until(lambda: not instance.failures.waiting(time.monotonic()), "it may be tried again")
    assert await world.ask("large") == pytest.approx(world.answer(96, 2))
    assert instance.process.pid == pid
    check(world, gpu)


async def test_host_memory_that_cannot_be_pinned_is_said_and_what_could_be_serves(gpu, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cuda, "Arena", functools.partial(cuda_arena.Arena, chunk_bytes=32 * MIB))
    other = World(tmp_path)
    other.pool = pool(memory=64 * MIB)
    await other.agent.start()
    try:
        gpu.driver.fail["cuMemHostRegister"] = 1 + 2  # the page of the device's fence, and two chunks
        await other.apply()
        try:
            await other.until(lambda: "only 64Mi of 512Mi could be pinned" in other.agent.report().pool.message, "said")
        finally:
            del gpu.driver.fail["cuMemHostRegister"]
        assert other.agent.report().pool.ready
        assert other.ledger.host.held_bytes(kind=Kind.ARENA) == 64 * MIB
        await other.apply(*(other.manifest(f"m{seed}", mib=16, seed=seed, working_mib=16) for seed in range(1, 7)))
        for _ in range(2):
            for seed in range(1, 7):  # of six images four have room
                assert await other.ask(f"m{seed}") == pytest.approx(other.answer(16, seed))
        assert other.broker.memory.arena.held_bytes <= 64 * MIB
        other.check_ledger()
    finally:
        await other.agent.stop(5.0)
