"""What the driver's management library (NVML) says of faults: Xid errors as they happen, and a GPU that is gone.

It needs no context, and sees what a context of this process only sees at its next call.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from omnimodel.errors import OmniError

log = logging.getLogger(__name__)

# An application's own errors: the driver ends that process, and the GPU goes on.
# Source: NVIDIA's device plugin for Kubernetes, which marks a GPU unhealthy at every other one.
OF_APPLICATIONS = frozenset({13, 31, 43, 45, 68, 109})


OF_ALL = 0xFFFFFFFF  # the number of the GPU instance, in an event that concerns the whole GPU


class Faults:
    """Waits for faults of GPUs.

    Args:
        devices: by name, their addresses on the PCI bus; a MIG instance has that of its GPU.
        instances: by name, the number of the GPU instance of those that are MIG instances.

    Raises:
        OmniError: NVML is missing, or tells no faults of these devices.
    """

    def __init__(self, devices: Mapping[str, str], instances: Mapping[str, int] | None = None) -> None:
        self._instances = instances or {}
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise OmniError("NVML", "the package nvidia-ml-py is not installed", "install omnimodel[agent]") from error
        try:
            self._nvml.nvmlInit()
            self._handles = {
                name: self._nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode()) for name, bus_id in devices.items()
            }
            self._names = {bus_id: name for name, bus_id in devices.items()}
            self._listen()
        except self._nvml.NVMLError as error:
            raise OmniError("NVML", f"it tells no faults: {error}", "install the NVIDIA driver") from error

    def wait(self, timeout_seconds: float) -> Sequence[tuple[str, str]]:
        """Wait for a fault; of each device that has one, its name and what is wrong. A lost one is told of once.

        Raises:
            OmniError: it tells no more.
        """
        if not self._handles:
            time.sleep(timeout_seconds)
            return []
        lost = False
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(timeout_seconds * 1000))
            if event.eventType & self._nvml.nvmlEventTypeXidCriticalError and event.eventData not in OF_APPLICATIONS:
                name = self._name(event.device)
                concerned = event.gpuInstanceId in {OF_ALL, self._instances.get(name, OF_ALL)}
                return [(name, f"the driver reports Xid {event.eventData}")] if name and concerned else []
        except self._nvml.NVMLError_Timeout:
            pass
        except self._nvml.NVMLError_GpuIsLost:
            lost = True  # it does not say which one
        except self._nvml.NVMLError as error:
            raise OmniError("NVML", f"it tells no faults any more: {error}") from error
        gone = [name for name, handle in self._handles.items() if self._gone(handle)]
        if lost and not gone:
            raise OmniError("NVML", "it says that a GPU is lost, and all of them answer")
        if gone:
            self._forget(gone)
        return [(name, "it has fallen off the bus") for name in gone]

    def _listen(self) -> None:
        self._events = self._nvml.nvmlEventSetCreate()
        for handle in self._handles.values():
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)

    def _forget(self, gone: Sequence[str]) -> None:
        """Listen to the others only: of a set with a GPU that is lost every wait may fail, for the others, too."""
        for name in gone:
            del self._handles[name]
        try:
            self._nvml.nvmlEventSetFree(self._events)
            self._listen()
        except self._nvml.NVMLError as error:
            log.warning("faults_not_told error=%r", str(error))

    def _name(self, handle: Any) -> str:
        """Whose handle it is; empty when it is that of another device."""
        found = self._nvml.nvmlDeviceGetPciInfo(handle).busId
        return self._names.get((found.decode() if isinstance(found, bytes) else found).lower()[-12:], "")

    def _gone(self, handle: Any) -> bool:
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError_GpuIsLost:
            return True
        except self._nvml.NVMLError as error:
            log.warning("health_not_told error=%r", str(error))
        return False
