"""A zygote's CUDA parts on an emulated driver: preloaded by the agent's own zygote, so that models inherit them.

What is real in a model's process then: its sandbox, its commands, the descriptors of frames and fence that it is sent,
the mapping at addresses that stay, and the order in which it waits and computes. Torch computes on the CPU.
"""

from __future__ import annotations

from gpu import rehearsal
from omnimodel.memory.devices import cuda_driver
from omnimodel.memory.devices.cuda_window import CudaWindow
from omnimodel.runtime.engines import own

cuda_driver._loaded[:] = [rehearsal.RehearsalDriver(capacity_bytes=1 << 40)]
CudaWindow._bind = rehearsal.bind
CudaWindow.wait = rehearsal.wait
own.torch_device = lambda _device: "cpu"
