"""A MIG instance as a device: its name for CUDA, and the device nodes that a process needs on it.

CUDA shows a process one MIG instance at most, so an agent serves one: several instances are as many pods.

Source: NVIDIA's MIG user guide, "CUDA device enumeration" and "Device nodes and capabilities".
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from omnimodel.errors import OmniError

MINORS = Path("/proc/driver/nvidia-caps/mig-minors")  # rows such as `gpu0/gi3/ci0/access 31`
NODE = "/dev/nvidia-caps/nvidia-cap{}"


def is_instance(product: str) -> bool:
    """Whether a product's name, as CUDA says it, is that of a MIG instance: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""
    return re.search(r"\bMIG \d+[cg]\.", product) is not None


def instance_of(name: str, uuid: str) -> tuple[int, int]:
    """The numbers of an instance: of its GPU instance, and of its compute instance in that.

    Args:
        name: of the device, for messages.
        uuid: of the instance, `MIG-…`.

    Raises:
        OmniError: NVML does not say.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise OmniError(
            f"device {name}", "it is a MIG instance, and the package nvidia-ml-py is not installed",
            "install omnimodel[agent]",
        ) from error  # fmt: skip
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        return int(nvml.nvmlDeviceGetGpuInstanceId(handle)), int(nvml.nvmlDeviceGetComputeInstanceId(handle))
    except nvml.NVMLError as error:
        raise OmniError(f"device {name}", f"NVML does not know the MIG instance {uuid}: {error}") from error


def instance_nodes(name: str, uuid: str, gpu_minor: str) -> tuple[str, ...]:
    """The nodes by which a process may use an instance, beside those of its GPU.

    Args:
        name, uuid: see `instance_of`.
        gpu_minor: of the GPU that it is a part of.

    Raises:
        OmniError: the driver does not say which they are.
    """
    gpu_instance, compute_instance = instance_of(name, uuid)
    instance = f"gpu{gpu_minor}/gi{gpu_instance}"
    capabilities = (f"{instance}/access", f"{instance}/ci{compute_instance}/access")
    try:
        minors = dict(row.split() for row in MINORS.read_text().splitlines() if row)
        return tuple(NODE.format(int(minors[capability])) for capability in capabilities)
    except (OSError, ValueError, KeyError) as error:
        raise OmniError(
            f"device {name}", f"{MINORS} does not say the nodes of {instance}: {error}", "update the driver"
        ) from error
