"""A MIG instance as an agent's device, on emulated drivers."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import MIB, World
from gpu.emulated import EmulatedDriver
from gpu.emulated_book import Book
from gpu.machine import machine, pool
from gpu.nvml import EmulatedNvml
from omnimodel.errors import OmniError
from omnimodel.memory.devices import cuda_driver, cuda_mig
from omnimodel.memory.devices.cuda_driver import device_nodes, device_uuid
from omnimodel.memory.devices.cuda_health import OF_ALL, Faults
from omnimodel.memory.devices.cuda_meter import open_meter
from omnimodel.memory.devices.cuda_mig import is_instance

PRODUCT = "NVIDIA H200 MIG 3g.71gb"
UUID = "MIG-00000000-0000-0000-0000-000000000000"
MINORS = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi2/access 21\ngpu0/gi2/ci0/access 22\n"


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", True),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", True),
        ("NVIDIA H200", False),
        ("NVIDIA MIGHTY 2g", False),
    ],
)
def test_an_instance_is_told_by_its_name(product, expected):
    assert is_instance(product) is expected


@pytest.fixture
def nvml(monkeypatch):
    emulated = EmulatedNvml(1, {UUID: (2, 0)})
    monkeypatch.setitem(sys.modules, "pynvml", emulated)
    return emulated


@pytest.fixture
def instance(nvml, monkeypatch, tmp_path):
    """The second of two instances of a GPU."""
    monkeypatch.setattr(cuda_driver, "_loaded", [EmulatedDriver(1 << 30, product=PRODUCT)])
    minors = tmp_path / "mig-minors"
    minors.write_text(MINORS)
    monkeypatch.setattr(cuda_mig, "MINORS", minors)
    about = tmp_path / "0000:00:00.0"
    about.mkdir()
    (about / "information").write_text("Device Minor: \t 0\n")
    monkeypatch.setattr(cuda_driver, "GPUS", tmp_path)
    return minors


def test_a_process_is_shown_its_instance_and_no_other_of_the_same_gpu(instance):
    assert device_uuid("cuda:0") == UUID
    assert device_nodes("cuda:0")[2:] == (
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
    )


@pytest.mark.parametrize("minors", ["", "gpu0/gi2/access 21\n", "gpu0/gi2/access\n"])
def test_an_instance_whose_nodes_nobody_knows_is_not_given_away(instance, minors):
    instance.write_text(minors)
    with pytest.raises(OmniError, match="does not say the nodes of gpu0/gi2"):
        device_nodes("cuda:0")


def test_an_instance_that_nvml_does_not_know_is_not_given_away(instance, nvml):
    nvml.instances.clear()
    with pytest.raises(OmniError, match=f"NVML does not know the MIG instance {UUID}"):
        device_nodes("cuda:0")


@pytest.mark.parametrize(("gpu_instance", "found"), [(2, 1), (1, 0), (OF_ALL, 1)])
def test_a_fault_of_another_instance_of_the_same_gpu_is_none(nvml, gpu_instance, found):
    faults = Faults({"cuda:0": "0000:00:00.0"}, {"cuda:0": 2})
    nvml.tell(0, 94, gpu_instance)
    assert len(faults.wait(5)) == found


def test_nvml_is_asked_by_the_instance_and_knows_no_power_of_it(nvml, monkeypatch, tmp_path):
    nvml.books = [Book(tmp_path / "book", 256 * MIB, 4 * MIB)]
    nvml.books[0].record(30 * MIB, 0)
    meter, why = open_meter("0000:00:00.0", UUID)
    assert why == ""
    assert meter.process_bytes() == {os.getpid(): 30 * MIB}
    assert (meter.watts(), meter.joules()) == (None, None)
    assert "Not Found" in open_meter("0000:00:00.0", "MIG-another")[1]


@pytest.mark.slow
@pytest.mark.root
async def test_an_agent_serves_one_instance_and_says_why_it_serves_no_more(instance, tmp_path):
    (tmp_path / "agent").mkdir()
    with machine(tmp_path / "machine", product=PRODUCT, instances={UUID: (2, 0)}) as gpus:
        world = World(tmp_path / "agent")
        world.pool = pool(memory=128 * MIB, count=2)
        await world.agent.start()
        try:
            await world.apply(world.manifest("m1", mib=32, seed=1, working_mib=32))
            assert await world.ask("m1") == pytest.approx(world.answer(32, 1))
            assert world.instance("m1").process.plan.devices[2:] == device_nodes("cuda:0")[2:]
            report = world.agent.report().pool
            assert report.ready
            assert report.context_bytes > 0
            assert "not measured" not in report.message
            assert "CUDA shows a process one MIG instance" in report.message
            world.check_ledger()
        finally:
            await world.agent.stop(5.0)
        assert gpus.driver.left() == {}
