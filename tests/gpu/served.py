"""A zygote's CUDA parts on an emulated driver: preloaded by the agent's own zygote, so that models inherit them.

What is real in a model's process then: its sandbox, its commands, the descriptors of frames and fence that it is sent,
the mapping at addresses that stay, and the order in which it waits and computes. Torch computes on the CPU, and what
it would have on the GPU a model takes from the driver by `cache` and `leak`.
"""

from __future__ import annotations

import os
import time
import uuid

import torch
from emulated_place import BOOKS

from gpu import rehearsal
from gpu.emulated_book import Book
from omnimodel.memory.devices import cuda_driver
from omnimodel.memory.devices.cuda_window import CudaWindow
from omnimodel.runtime import serve
from omnimodel.runtime.engines import own

_cached: list[tuple[int, int]] = []  # addresses and sizes
_limit: list[int] = []


def book() -> Book:
    """Of the device that this process is shown."""
    shown = os.environ["CUDA_VISIBLE_DEVICES"]
    return BOOKS[uuid.UUID(shown.partition("-")[2]).bytes[-1]]


def cache(size_bytes: int) -> None:
    """Take device memory that is given back when caches are emptied, as torch does: within its limit."""
    if sum(size for _, size in _cached) + size_bytes > _limit[-1]:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes of {_limit[-1]}")
    _cached.append((_allocated(size_bytes), size_bytes))


def leak(size_bytes: int) -> None:
    """Take device memory for good."""
    _allocated(size_bytes)


def _allocated(size_bytes: int) -> int:
    """The address of new memory, whichever thread asks: torch sets the context of each."""
    cuda_driver.call("cuCtxSetCurrent", cuda_driver.call("cuDevicePrimaryCtxRetain", 0))
    return int(cuda_driver.call("cuMemAlloc", size_bytes))


def wait_until_told() -> None:
    """Wait for the test."""
    while not book().own().told:
        time.sleep(0.01)


def empty_cache() -> None:
    """What torch does."""
    while _cached:
        cuda_driver.call("cuMemFree", _cached.pop()[0])


cuda_driver._loaded[:] = [rehearsal.RehearsalDriver(capacity_bytes=1 << 40, book_of=lambda _number: book())]
CudaWindow._bind = rehearsal.bind
CudaWindow.wait = rehearsal.wait
own.torch_device = lambda _device: "cpu"
torch.cuda.empty_cache = empty_cache
serve.bound_device = _limit.append
