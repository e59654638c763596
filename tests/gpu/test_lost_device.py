"""GPUs that fail for good, on emulated drivers: what tells it, what is given up, and who serves on."""

from __future__ import annotations

import asyncio
import sys

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.emulated import EmulatedDriver
from gpu.machine import machine, pool
from gpu.nvml import EmulatedNvml, NVMLError, NVMLError_GpuIsLost
from memory.conformance import image
from omnimodel.controllers.pool_status import pod_entry, pool_report, pool_status
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.memory.devices import cuda_driver, open_devices
from omnimodel.memory.devices.cuda_health import OF_APPLICATIONS, Faults

FRAME = 2 << 20


@pytest.fixture
def nvml(monkeypatch):
    emulated = EmulatedNvml(3)
    monkeypatch.setitem(sys.modules, "pynvml", emulated)
    return emulated


def watched(*names: str) -> Faults:
    return Faults({name: f"0000:{int(name[-1]):02x}:00.0" for name in names})


def test_an_xid_of_the_hardware_is_a_fault_of_its_gpu(nvml):
    faults = watched("cuda:0", "cuda:1")
    nvml.tell(1, 79)
    assert faults.wait(5) == [("cuda:1", "the driver reports Xid 79")]
    assert faults.wait(0.01) == []


@pytest.mark.parametrize("xid", sorted(OF_APPLICATIONS))
def test_an_error_of_an_application_is_none(nvml, xid):
    faults = watched("cuda:0")
    nvml.tell(0, xid)
    assert faults.wait(5) == []


def test_a_gpu_of_others_may_fail(nvml):
    faults = watched("cuda:0")
    nvml.watched.add(2)
    nvml.tell(2, 79)
    assert faults.wait(5) == []


@pytest.mark.parametrize("told", [True, False], ids=["the wait says so", "nobody says so"])
def test_a_gpu_that_is_gone_from_the_bus_is_found(nvml, told):
    faults = watched("cuda:0", "cuda:1")
    nvml.says_gone = told
    nvml.gone.add(1)
    assert faults.wait(0.01) == [("cuda:1", "it has fallen off the bus")]
    assert faults.wait(0.01) == [], "it is told once"
    nvml.tell(0, 79)
    assert faults.wait(5) == [("cuda:0", "the driver reports Xid 79")], "the others are listened to"
    nvml.gone.add(0)
    assert faults.wait(0.01) == [("cuda:0", "it has fallen off the bus")]
    assert faults.wait(0.01) == []


def test_a_wait_that_fails_for_no_gpu_that_is_lost_tells_no_more(nvml):
    faults = watched("cuda:0")
    nvml.events.put(NVMLError_GpuIsLost("GPU is lost"))
    with pytest.raises(OmniError, match="all of them answer"):
        faults.wait(5)


def test_when_nvml_tells_nothing_any_more_that_is_said(nvml):
    faults = watched("cuda:0")
    nvml.events.put(NVMLError("Unknown Error"))
    with pytest.raises(OmniError, match="it tells no faults any more: Unknown Error"):
        faults.wait(5)
    with pytest.raises(OmniError, match="it tells no faults: Not Found"):
        watched("cuda:7")


@pytest.fixture
def driver(monkeypatch):
    emulated = EmulatedDriver(capacity_bytes=16 * FRAME, devices=2)
    monkeypatch.setattr(cuda_driver, "_loaded", [emulated])
    return emulated


@pytest.mark.parametrize("gone", [0, 1], ids=["that pinned the arena", "the other"])
def test_a_copy_to_a_device_that_is_lost_says_so_and_the_other_copies_on(driver, tmp_path, gone):
    devices = open_devices(["cuda:0", "cuda:1"], FRAME, arena_bytes=32 << 20)
    assert devices[0].arena.wait(30)
    path = image(tmp_path, 2 * FRAME)
    staged = devices[0].stage(str(path), 2 * FRAME)
    held = [device.create(2) for device in devices]
    copy = devices[gone].copy(staged, held[gone])
    driver.lose_device(gone)
    with pytest.raises(OmniError, match="CUDA_ERROR_ECC_UNCORRECTABLE") as caught:
        copy.wait(5)
    assert caught.value.reason is Reason.DEVICE_LOST
    assert "ECC" in devices[gone].fault()
    assert devices[1 - gone].fault() == ""
    devices[1 - gone].copy(staged, held[1 - gone]).wait(30)
    devices[0].unstage(staged)
    for device in reversed(devices):
        device.close()
    assert driver.left() == {}


def small(world: World, *seeds: int) -> list[dict]:
    """Models of 32 MiB of weights, 32 MiB of working memory and a context of 4 MiB each; a device of 144 MiB holds two."""
    return [world.manifest(f"m{seed}", mib=32, seed=seed, working_mib=32) for seed in seeds]


@pytest.mark.slow
@pytest.mark.root
async def test_gpus_are_lost_one_after_another_and_the_others_serve_on(tmp_path, tmp_path_factory):
    with machine(tmp_path_factory.mktemp("gpus"), devices=3) as gpus:
        driver, world = gpus.driver, World(tmp_path)
        world.pool = pool(memory=144 * MIB, count=3)
        await world.agent.start()
        try:
            await world.apply(*small(world, 1, 2, 3))
            for seed in (1, 2, 3):
                assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
            placed = {world.instance(f"m{seed}").device: seed for seed in (1, 2, 3)}
            assert len(placed) == 3

            # one is lost under a request, and another request is held behind it
            first = placed["cuda:1"]
            world.instance(f"m{first}").line.concurrency = 1
            asked = asyncio.create_task(world.ask(f"m{first}", "sleep:60"))
            await world.until(lambda: world.instance(f"m{first}").line.in_flight == 1, "it computes")
            held = asyncio.create_task(world.ask(f"m{first}"))
            await world.until(lambda: len(world.instance(f"m{first}").line.waiting) == 1, "another is held")
            gpus.nvml.silent.add(1)
            driver.lose_device(1)
            with pytest.raises(DispatchError, match="its device cuda:1 is lost"):
                await asked
            assert await held == pytest.approx(world.answer(32, first))
            assert world.instance(f"m{first}").device != "cuda:1"
            assert world.brokers["cuda:1"].memory.ledger.device.held_bytes() == 0
            world.check_ledger()
            report = world.agent.report().pool
            assert report.ready
            assert report.budget_bytes == 2 * 144 * MIB
            assert "cuda:1: cuMemGetInfo failed with CUDA_ERROR_ECC_UNCORRECTABLE" in report.message
            entry = pod_entry("pod-0", report)
            assert [bool(device.get("problem")) for device in entry["perDevice"]] == [False, True, False]
            status = pool_status(
                generation=1, report=pool_report("default", [entry]), models=3, refusal=None, before={}, now_seconds=0.0
            )
            ready = next(condition for condition in status["conditions"] if condition["type"] == "Ready")
            assert ready["status"] == "True"
            assert "pod-0: cuda:1: cuMemGetInfo failed" in ready["message"]

            # another under a copy, which a request computes behind
            second = next(seed for seed in (1, 2, 3) if world.instance(f"m{seed}").device == "cuda:2")
            await world.agent.evict("default", f"m{second}", 10)
            driver.flows.clear()
            try:
                asked = asyncio.create_task(world.ask(f"m{second}"))
                await world.until(lambda: world.instance(f"m{second}").line.in_flight == 1, "it has the request")
                driver.lose_device(2)
            finally:
                driver.flows.set()
            with pytest.raises(DispatchError, match="CUDA_ERROR_ECC_UNCORRECTABLE"):
                await asked
            for seed in (1, 2, 3):  # all in turn on the last one
                assert await world.ask(f"m{seed}") == pytest.approx(world.answer(32, seed))
                assert world.instance(f"m{seed}").device == "cuda:0"
                world.check_ledger()
            assert world.brokers["cuda:2"].memory.ledger.device.held_bytes() == 0

            # and the last by an Xid
            gpus.nvml.tell(0, 79)
            await world.until(lambda: not world.agent.report().pool.ready, "none is left")
            report = world.agent.report().pool
            assert report.reason == "DeviceLost"
            assert "cuda:0: the driver reports Xid 79" in report.message
            for seed in (1, 2, 3):
                with pytest.raises(DispatchError, match="is lost") as caught:
                    await world.ask(f"m{seed}")
                assert caught.value.reason is Reason.DEVICE_LOST
            await world.until(lambda: not world.agent._devices.watched, "all are told of")
            told = [
                event.message async for event in world.agent.events.follow(follow=False) if event.kind == "OmniPool"
            ]
            assert len([message for message in told if "device cuda:" in message]) == 3
        finally:
            await world.agent.stop(5.0)
        assert driver.left() == {}
