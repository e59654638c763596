"""What the driver's management library (NVML) sees: bytes of each process, power and energy. It needs no context."""

from __future__ import annotations

import importlib
from typing import Any

from omnimodel.errors import OmniError


class Meter:
    """One GPU as NVML sees it.

    Args:
        bus_id: its address on the PCI bus (`Context.bus_id`); NVML numbers devices by its own order.

    Raises:
        OmniError: NVML is missing or does not know the device.
    """

    def __init__(self, bus_id: str) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
        except ImportError as error:
            raise OmniError("NVML", "the package nvidia-ml-py is not installed", "install omnimodel[agent]") from error
        except self._nvml.NVMLError as error:
            raise OmniError("NVML", f"device {bus_id}: {error}", "install the NVIDIA driver") from error

    def used_bytes(self) -> int:
        """Bytes in use on the device, by anyone."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def process_bytes(self) -> dict[int, int]:
        """Bytes of each process on the device, by its pid in NVML's own pid namespace."""
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {int(process.pid): int(process.usedGpuMemory or 0) for process in processes}

    def watts(self) -> float:
        """Power that the device draws now."""
        return int(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def joules(self) -> float:
        """Energy that the device has used since the driver was loaded."""
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
