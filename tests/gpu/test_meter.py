"""What NVML says, and when it is of no use."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from gpu.emulated_book import Book
from gpu.nvml import EmulatedNvml
from omnimodel.errors import OmniError
from omnimodel.memory.devices.cuda_meter import Meter, open_meter

MIB = 1 << 20
BUS = "0000:00:00.0"


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    found = EmulatedNvml(books=[Book(tmp_path / "book", 256 * MIB, 4 * MIB)])
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_who_has_memory_is_told_by_pid_and_what_the_device_draws(nvml):
    nvml.books[0].record(30 * MIB, 0)
    meter, why = open_meter(BUS)
    assert why == ""
    assert meter.process_bytes() == {os.getpid(): 30 * MIB}
    assert meter.used_bytes() == 30 * MIB
    assert (meter.watts(), meter.joules()) == (120.0, 5000.0)


def test_numbers_of_processes_that_are_not_those_of_this_machine_are_of_no_use(nvml, monkeypatch):
    nvml.books[0].record(30 * MIB, 0)
    listed = nvml.nvmlDeviceGetComputeRunningProcesses(0)
    listed[0].pid = 4_000_000  # as the host numbers them
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: listed)
    meter, why = open_meter(BUS)
    assert meter is None
    assert "numbers processes otherwise" in why


def test_a_gpu_that_does_not_answer_is_an_error_and_one_without_a_power_meter_is_not(nvml, monkeypatch):
    meter = Meter(BUS)
    nvml.silent = {0}
    with pytest.raises(OmniError, match="GPU is lost"):
        meter.process_bytes()

    def unsupported(_handle):
        raise nvml.NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", unsupported)
    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", unsupported)
    assert (meter.watts(), meter.joules()) == (None, None)


def test_without_the_library_of_the_driver_there_is_no_meter(monkeypatch):
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is an NVIDIA driver here")
    meter, why = open_meter(BUS)
    assert meter is None
    assert "NVML" in why
