"""The cuda backend, a model process's side: one address range for ever, frames in it from wake to evict.

Tensors are made over the range once. A wake maps frames under them and an evict takes the frames away, so no pointer
in the model changes and graphs captured before a swap replay after it. While nothing is mapped, a kernel that touches
the range ends the process's context; the runtime runs none then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnimodel.errors import LedgerError, OmniError
from omnimodel.memory.devices.cuda_driver import (
    Context,
    access,
    allocation_property,
    call,
    driver,
    granularity_bytes,
    ordinal_of,
)
from omnimodel.memory.devices.cuda_fence import FencePage, arrived

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.0002


class CudaWindow:
    """A reserved range of addresses on one GPU.

    Args:
        device: its name as this process sees it, `cuda:0`.
        frames: how many the image needs.
        frame_bytes: of the device.

    Raises:
        OmniError: no device, or no driver.
    """

    def __init__(self, device: str, frames: int, frame_bytes: int) -> None:
        ordinal = ordinal_of(device)
        self._context = Context(ordinal)
        self._ordinal = ordinal
        self._frames, self._frame_bytes = frames, frame_bytes
        self.size_bytes = frames * frame_bytes
        self._base = int(call("cuMemAddressReserve", self.size_bytes, 0, 0, 0)) if frames else 0
        self._access = access(ordinal, writable=False)
        self._mapped = 0
        self._page: FencePage | None = None
        self._fence_base = 0
        self._waiting = False
        self._whole: torch.Tensor | None = None

    def _bind(self) -> torch.Tensor:
        """A tensor over the whole range: torch asks the driver whose address it is, so that it must be mapped."""
        import torch

        device = torch.device("cuda", self._ordinal)
        if not self._frames:
            return torch.empty(0, dtype=torch.uint8, device=device)
        range_of = _AddressRange(self._base, self.size_bytes)
        if self._mapped:
            return torch.as_tensor(range_of, device=device)
        unit = granularity_bytes(self._ordinal)
        allocation = call("cuMemCreate", unit, allocation_property(self._ordinal), 0)
        call("cuMemMap", self._base, unit, 0, allocation, 0)
        call("cuMemSetAccess", self._base, unit, access(self._ordinal, writable=True), 1)
        try:
            return torch.as_tensor(range_of, device=device)
        finally:
            self._context.synchronize()
            call("cuMemUnmap", self._base, unit)
            call("cuMemRelease", allocation)

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """A flat uint8 tensor over `size` bytes at `offset`; it must not be touched while nothing is mapped."""
        if not 0 <= offset <= offset + size <= self.size_bytes:
            raise LedgerError(f"cuda:{self._ordinal}", f"{size} bytes at {offset} are outside of {self.size_bytes}")
        if self._whole is None:
            self._whole = self._bind()
        return self._whole[offset : offset + size]

    def follow(self, descriptor: int) -> None:
        """Use the agent's fence from the next wake on; closes the descriptor."""
        try:
            self._page = FencePage(self._context, descriptor)
        finally:
            os.close(descriptor)

    def map(self, descriptors: Sequence[int], *, fence_base: int | None = None) -> None:
        """Map frames read-only over the whole range; closes the descriptors.

        Args:
            descriptors: one a frame, in order.
            fence_base: the fence's value at which no frame has arrived; None when the copy is over.

        Raises:
            LedgerError: frames are mapped already, or they are not as many as the range needs.
            OmniError: the driver refused; then nothing is mapped.
        """
        self._context.enter()
        kind = driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        left = list(descriptors)
        try:
            if self._mapped or len(left) != self._frames:
                problem = f"{len(left)} frames for {self._frames} ({self._mapped} are mapped)"
                raise LedgerError(f"cuda:{self._ordinal}", problem)
            while left:
                allocation = call("cuMemImportFromShareableHandle", left[0], kind)
                os.close(left.pop(0))
                try:
                    address = self._base + self._mapped * self._frame_bytes
                    call("cuMemMap", address, self._frame_bytes, 0, allocation, 0)
                    self._mapped += 1
                finally:
                    call("cuMemRelease", allocation)  # the mapping keeps the memory, and unmapping lets go of it
            if self._mapped:
                call("cuMemSetAccess", self._base, self.size_bytes, self._access, 1)
        except BaseException:
            for descriptor in left:
                os.close(descriptor)
            if len(left) < len(descriptors):
                self._take_away()
            raise
        self._fence_base = fence_base if fence_base is not None else self._fence_base
        self._waiting = fence_base is not None

    def wait(self, end_offset: int, stream: int | None = None) -> None:
        """Make a stream wait until the image has arrived up to `end_offset`; nothing happens when it has.

        While a stream is captured into a graph it cannot wait: capture when the whole image is there.

        Args:
            end_offset: bytes from the image's start.
            stream: the driver's handle; default: torch's current stream.
        """
        if self._page is None or not self._waiting:
            return
        frames = arrived(self._page.value(), self._fence_base, self._frames)
        self._waiting = frames < self._frames
        needed = -(-end_offset // self._frame_bytes)
        if frames >= needed:
            return
        if stream is None:
            import torch

            stream = torch.cuda.current_stream(self._ordinal).cuda_stream
        self._context.enter()  # of this thread, which may not have computed yet: the default stream is its context's
        self._page.wait(stream, self._fence_base + needed)

    def settle(self) -> None:
        """Wait in this thread until the whole image has arrived, and may be read on any stream."""
        while self._waiting and self._page is not None:
            self._waiting = arrived(self._page.value(), self._fence_base, self._frames) < self._frames
            if self._waiting:
                time.sleep(_POLL_SECONDS)

    def abandon(self) -> None:
        """Let streams go on that wait for a copy which will never come; what they compute is worthless."""
        if self._page is not None:
            self._page.set(self._fence_base + self._frames)

    def unmap(self) -> None:
        """Fence, then take the frames out of the range."""
        self._context.synchronize()
        self._take_away()

    def _take_away(self) -> None:
        if not self._mapped:
            return
        try:
            call("cuMemUnmap", self._base, self._mapped * self._frame_bytes)
        except OmniError:  # the driver's manual leaves open whether one call may span several allocations
            for frame in range(self._mapped):
                call("cuMemUnmap", self._base + frame * self._frame_bytes, self._frame_bytes)
        self._mapped = 0

    def close(self) -> None:
        """Unmap, and give the addresses back; no tensor over them may be used any more."""
        self.unmap()
        if self._page is not None:
            self._page.close()
        if self._base:
            call("cuMemAddressFree", self._base, self.size_bytes)
        self._whole = None
        self._context.release()


class _AddressRange:
    """Device memory as torch takes it: the CUDA array interface, version 3."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
