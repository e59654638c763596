"""What the driver's management library (NVML) sees: bytes of each process, power and energy. It needs no context."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from omnimodel.errors import OmniError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Meter:
    """One GPU as NVML sees it; see `devices.Meter`.

    Args:
        bus_id: its address on the PCI bus (`Context.bus_id`); NVML numbers devices by its own order.
        instance: the UUID of the part of it that is meant, where that is a MIG instance.

    Raises:
        OmniError: NVML is missing or does not know the device.
    """

    def __init__(self, bus_id: str, instance: str = "") -> None:
        self._bus_id = bus_id
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise OmniError("NVML", "the package nvidia-ml-py is not installed", "install omnimodel[agent]") from error
        self._ask(self._nvml.nvmlInit)
        self._handle = self._ask(
            lambda: (
                self._nvml.nvmlDeviceGetHandleByUUID(instance.encode())
                if instance
                else self._nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
            )
        )

    def used_bytes(self) -> int:
        """Bytes in use on the device, by anyone."""
        return int(self._ask(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle)).used)

    def process_bytes(self) -> dict[int, int]:
        """Bytes of each process on the device, by its pid in the pid namespace of this process.

        Whether frames that a process has imported count as its bytes, NVML's manual leaves open: take it at its word
        only for a process that has none mapped.
        """
        found: dict[int, int] = {}
        for process in self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)):
            found[int(process.pid)] = found.get(int(process.pid), 0) + int(process.usedGpuMemory or 0)
        return found

    def watts(self) -> float | None:
        """Power that the device draws now; None where it cannot tell."""
        return self._milli(self._nvml.nvmlDeviceGetPowerUsage)

    def joules(self) -> float | None:
        """Energy that the device has used since the driver was loaded; None where it cannot tell."""
        return self._milli(self._nvml.nvmlDeviceGetTotalEnergyConsumption)

    def _milli(self, question: Callable[[Any], int]) -> float | None:
        try:
            return int(question(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            log.debug("not_told bus_id=%s error=%s", self._bus_id, error)
            return None

    def _ask(self, question: Callable[[], _T]) -> _T:
        try:
            return question()
        except self._nvml.NVMLError as error:
            raise OmniError("NVML", f"device {self._bus_id}: {error}", "see whether nvidia-smi answers") from error


def open_meter(bus_id: str, instance: str = "") -> tuple[Meter | None, str]:
    """The meter of a device on which this process has a context, or why what it would say of processes is no use.

    The driver numbers processes as the one that asks sees them (its open kernel modules from 535.113 on, function
    `os_find_ns_pid`); before, it gave the host's numbers also in a container, where nobody can tell whose they are.
    That this process finds itself shows that the numbers are right.
    """
    try:
        meter = Meter(bus_id, instance)
        if os.getpid() in meter.process_bytes():
            return meter, ""
        why = "the driver (NVML) numbers processes otherwise than this machine or pod does"
    except OmniError as error:
        why = str(error)
    log.warning("not_metered bus_id=%s why=%r", bus_id, why)
    return None, why
