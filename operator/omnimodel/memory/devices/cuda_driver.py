"""The CUDA driver, as little of it as the cuda backend needs; nothing of it is loaded before the first call.

Every driver call goes through `call`, which turns a bad result into an OmniError that names the device and the call.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import uuid
from pathlib import Path
from typing import Any

from omnimodel.errors import CURES, LedgerError, OmniError, Reason

log = logging.getLogger(__name__)

CONTROL_NODE = "/dev/nvidiactl"
MEMORY_NODE = "/dev/nvidia-uvm"
GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each, by its address on the PCI bus
PCI_DEVICES = Path("/sys/bus/pci/devices")

_loaded: list[Any] = []  # the module, once it is


def driver() -> Any:
    """The module `cuda.bindings.driver`, loaded at the first call.

    Raises:
        OmniError: cuda-bindings is not installed.
    """
    if not _loaded:
        try:
            _loaded.append(importlib.import_module("cuda.bindings.driver"))
        except ImportError as error:
            raise OmniError("CUDA", "the package cuda-bindings is not installed", "install omnimodel[cuda]") from error
    return _loaded[0]


def available() -> bool:
    """Whether this machine has an NVIDIA GPU that can be used; loads nothing on a machine without the driver."""
    if not os.path.exists(CONTROL_NODE) and not os.path.exists("/proc/driver/nvidia/version"):
        return False
    try:
        return device_count() > 0
    except (OmniError, RuntimeError):
        return False


def device_count() -> int:
    """GPUs that the driver shows this process.

    Raises:
        OmniError: the driver does not start.
    """
    call("cuInit", 0)
    return int(call("cuDeviceGetCount"))


def device_bytes(name: str) -> int:
    """Bytes of a device; takes none of them.

    Raises:
        OmniError: there is no such device.
    """
    return int(call("cuDeviceTotalMem", _device(name)))


def device_nodes(name: str) -> tuple[str, ...]:
    """The device nodes that a process needs which computes on a device, and on no other.

    Raises:
        OmniError: there is no such device.
    """
    information = GPUS / _bus_id(_device(name)) / "information"
    try:
        rows = information.read_text().splitlines()
    except OSError as error:
        raise OmniError(
            f"device {name}", f"{information} cannot be read: {error.strerror}", "update the driver"
        ) from error
    minor = next((row.partition(":")[2].strip() for row in rows if row.startswith("Device Minor")), "")
    if not minor.isdecimal():
        raise OmniError(f"device {name}", f"{information} does not say its minor number", "update the driver")
    nodes = (CONTROL_NODE, MEMORY_NODE, f"/dev/nvidia{minor}")
    if not is_mig_instance(name):
        return nodes
    from omnimodel.memory.devices.cuda_mig import instance_nodes

    return (*nodes, *instance_nodes(name, device_uuid(name), minor))


def device_uuid(name: str) -> str:
    """What names a device for CUDA_VISIBLE_DEVICES, whichever other devices a process could see.

    Raises:
        OmniError: there is no such device.
    """
    kind = "MIG" if is_mig_instance(name) else "GPU"
    return f"{kind}-{uuid.UUID(bytes=bytes(call('cuDeviceGetUuid', _device(name)).bytes))}"


def is_mig_instance(name: str) -> bool:
    """Whether a device is a part of a GPU; CUDA shows a process no more than one such.

    Raises:
        OmniError: there is no such device.
    """
    from omnimodel.memory.devices.cuda_mig import is_instance

    raw: bytes = call("cuDeviceGetName", 256, _device(name))
    return is_instance(raw.split(b"\0", 1)[0].decode(errors="replace"))


def _device(name: str) -> Any:
    ordinal = ordinal_of(name)
    if ordinal >= device_count():
        raise OmniError(f"device {name}", f"the driver shows {device_count()} devices")
    return call("cuDeviceGet", ordinal)


def bus_id(name: str) -> str:
    """Address of a device on the PCI bus, in the form of /sys/bus/pci/devices.

    Raises:
        OmniError: there is no such device.
    """
    return _bus_id(_device(name))


def _bus_id(device: Any) -> str:
    raw: bytes = call("cuDeviceGetPCIBusId", 32, device)
    return raw.split(b"\0", 1)[0].decode().lower()[-12:]


def ordinal_of(name: str) -> int:
    """The number in a device's name: 1 of `cuda:1`, 0 of `cuda`.

    Raises:
        OmniError: it is no name of a GPU.
    """
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or name == "cuda"):
        raise OmniError(f"device {name}", "is no GPU's name", "use cuda or cuda:0")
    return int(number or 0)


def call(name: str, *arguments: Any) -> Any:
    """Call the driver; the call's values (None, one, or a tuple).

    Raises:
        LedgerError: the device, or memory that can be pinned, is used up.
        OmniError: the driver refused.
    """
    try:
        result, *values = getattr(driver(), name)(*arguments)
    except RuntimeError as error:  # how cuda-bindings says that libcuda, or a function of it, is missing
        raise OmniError("CUDA", f"{name}: {error}", "install the NVIDIA driver, 570 or later") from error
    if int(result) != 0:
        subject = "CUDA driver"
        problem = f"{name} failed with {getattr(result, 'name', result)}"
        if int(result) == int(driver().CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            if "Host" in name:
                raise LedgerError(subject, problem, "raise ulimit -l, or lower the pool's hostMemory")
            raise LedgerError(subject, problem, CURES[Reason.DEVICE_FULL], reason=Reason.DEVICE_FULL)
        raise OmniError(subject, problem, "look for Xid messages in the kernel's log", reason=Reason.INTERNAL)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def let_go(name: str, *arguments: Any) -> None:
    """Call the driver to give something back; a device that has had a fault takes nothing, and that is only noted."""
    try:
        call(name, *arguments)
    except OmniError as error:
        log.warning("not_given_back call=%s error=%r", name, str(error))


def ready(event: Any) -> bool:
    """Whether everything recorded before the event is done.

    Raises:
        OmniError: the work before it failed.
    """
    result = driver().cuEventQuery(event)[0]
    if int(result) == int(driver().CUresult.CUDA_ERROR_NOT_READY):
        return False
    if int(result) != 0:
        raise OmniError("CUDA driver", f"device work failed with {getattr(result, 'name', result)}")
    return True


class Context:
    """The primary context of one device, the one that torch uses too.

    Args:
        ordinal: number of the device, as in `cuda:0`.

    Raises:
        OmniError: there is no such device, or its context cannot be made.
    """

    def __init__(self, ordinal: int) -> None:
        if ordinal >= device_count():
            raise OmniError(f"cuda:{ordinal}", f"the driver shows {device_count()} devices")
        self.ordinal = ordinal
        self.device = call("cuDeviceGet", ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self.device)
        self.enter()

    def enter(self) -> None:
        """Make the context current in this thread; another device, or torch, may have changed it since."""
        call("cuCtxSetCurrent", self._context)

    def attribute(self, name: str) -> int:
        """A device attribute, by the name after CU_DEVICE_ATTRIBUTE_."""
        attribute = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", attribute, self.device))

    def bus_id(self) -> str:
        """Address on the PCI bus in the form of /sys/bus/pci/devices."""
        return _bus_id(self.device)

    def free_bytes(self) -> int:
        """Bytes that the driver says are free on the device."""
        self.enter()
        free, _total = call("cuMemGetInfo")
        return int(free)

    def total_bytes(self) -> int:
        """Bytes of the device."""
        return int(call("cuDeviceTotalMem", self.device))

    def synchronize(self) -> None:
        """Wait for all work of this process on the device."""
        self.enter()
        call("cuCtxSynchronize")

    def release(self) -> None:
        """Give the context back."""
        let_go("cuDevicePrimaryCtxRelease", self.device)


def allocation_property(ordinal: int) -> Any:
    """What cuMemCreate makes: pinned device memory that can be exported as a file descriptor."""
    cuda = driver()
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = ordinal
    return prop


def access(ordinal: int, *, writable: bool) -> list[Any]:
    """Access of one device to a mapping, for cuMemSetAccess."""
    cuda = driver()
    flags = cuda.CUmemAccess_flags
    descriptor = cuda.CUmemAccessDesc()
    descriptor.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    descriptor.location.id = ordinal
    descriptor.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return [descriptor]


def granularity_bytes(ordinal: int) -> int:
    """The smallest unit of device memory that can be mapped."""
    option = driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", allocation_property(ordinal), option))


def address_of(memory: mmap.mmap) -> int:
    """Address of a mapping in this process; the mapping must be writable and stay open."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def near_cpus(bus_id: str) -> set[int]:
    """CPUs on the NUMA node of a PCI device; all that this process may use where the machine does not say."""
    allowed = os.sched_getaffinity(0)
    try:
        listed = (PCI_DEVICES / bus_id / "local_cpulist").read_text().strip()
    except OSError:
        return allowed
    near: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return near & allowed or allowed
