"""NVML of an emulated driver: stands in for the module `pynvml`."""

# ruff: noqa: N801, N802, N815  (names are the library's own)
from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace

from gpu.emulated_book import Book, programs_bytes


class NVMLError(Exception):
    pass


class NVMLError_Timeout(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class EmulatedNvml:
    """Handles are numbers of devices.

    Args:
        devices: how many there are.
        instances: of MIG, by UUID: numbers of GPU instance and compute instance.
        books: of the devices, of which it tells; it lists no processes of a device without one.
    """

    NVMLError, NVMLError_Timeout, NVMLError_GpuIsLost = NVMLError, NVMLError_Timeout, NVMLError_GpuIsLost
    nvmlEventTypeXidCriticalError = 8

    def __init__(
        self,
        devices: int = 1,
        instances: dict[str, tuple[int, int]] | None = None,
        books: Sequence[Book] = (),
    ) -> None:
        self.devices = devices
        self.books = books
        self.milliwatts, self.millijoules = [120_000] * devices, [5_000_000] * devices
        self.silent: set[int] = set()  # devices whose processes it does not list
        self.instances = instances or {}
        self.gone: set[int] = set()
        self.says_gone = True  # whether a wait fails while a device that is gone is among those watched
        self.watched: set[int] = set()
        self.events: queue.Queue[SimpleNamespace | NVMLError] = queue.Queue()

    def tell(self, device: int, xid: int, gpu_instance: int = 0xFFFFFFFF) -> None:
        """Have the driver report an Xid, of a whole GPU or of a MIG instance of it."""
        assert device in self.watched
        event = SimpleNamespace(device=device, eventType=8, eventData=xid, gpuInstanceId=gpu_instance)
        self.events.put(event)

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        number = int(bus_id.decode().split(":")[1], 16)
        if number >= self.devices:
            raise NVMLError("Not Found")
        return number

    def nvmlEventSetCreate(self):
        self.watched, self.events = set(), queue.Queue()
        return self.events

    def nvmlEventSetFree(self, events):
        assert events is self.events

    def nvmlDeviceRegisterEvents(self, handle, types, events):
        assert types == 8
        assert events is self.events
        self.watched.add(handle)

    def nvmlEventSetWait_v2(self, events, milliseconds):
        assert events is self.events
        if self.says_gone and self.watched & self.gone:
            raise NVMLError_GpuIsLost("GPU is lost")
        try:
            found = events.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise NVMLError_Timeout("Timeout") from None
        if isinstance(found, NVMLError):
            raise found
        return found

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle in self.gone:
            raise NVMLError_GpuIsLost("GPU is lost")
        return SimpleNamespace(used=self.books[handle].used_bytes() if self.books else 0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        """Those that have a context, programs without the emulated driver among them."""
        if handle in self.silent | self.gone:
            raise NVMLError_GpuIsLost("GPU is lost")
        if not self.books:
            return []
        device = 0 if handle in self.instances else handle
        book = self.books[device]
        held = {
            pid: slot.bytes + (slot.imported if book.counts_imports else 0)
            for pid, slot in book.processes()
            if slot.bytes
        }
        held = {**programs_bytes(device), **held}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size_bytes) for pid, size_bytes in held.items()]

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle in self.instances:
            raise NVMLError("Not Supported")
        return self.milliwatts[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle in self.instances:
            raise NVMLError("Not Supported")
        return self.millijoules[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid.decode() not in self.instances:
            raise NVMLError("Not Found")
        return uuid.decode()

    def nvmlDeviceGetGpuInstanceId(self, handle):
        return self.instances[handle][0]

    def nvmlDeviceGetComputeInstanceId(self, handle):
        return self.instances[handle][1]
