"""The side of a model's process for frames in host memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnimodel.errors import OmniError
from omnimodel.memory.devices import pages

if TYPE_CHECKING:
    import torch


class HostWindow:
    """A reserved range of addresses; see `devices.Window`.

    Args:
        frames: how many frames it spans.
        frame_bytes: size of a frame, a multiple of 2 MiB.
    """

    def __init__(self, frames: int, frame_bytes: int) -> None:
        self.frames = frames
        self.frame_bytes = frame_bytes
        self.size_bytes = frames * frame_bytes
        self.address = pages.reserve(self.size_bytes) if frames else 0
        self.mapped = False

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """A flat uint8 tensor over part of the window; touching it while nothing is mapped is SIGSEGV."""
        import torch

        if not 0 <= offset <= offset + size <= self.size_bytes:
            raise OmniError("window", f"bytes {offset} to {offset + size} are outside its {self.size_bytes}")
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # A ctypes array counts as writable, so that torch does not warn; the pages are read-only all the same.
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(self.address + offset), dtype=torch.uint8)

    def follow(self, descriptor: int) -> None:
        """No fence comes from a host device."""
        os.close(descriptor)

    def map(self, descriptors: Sequence[int], *, fence_base: int | None = None) -> None:
        """Map frames read-only over the whole range; closes the descriptors.

        Args:
            descriptors: one a frame, in order.
            fence_base: None, for the copy is over.

        Raises:
            OmniError: it is not one descriptor a frame, or the kernel refuses; then nothing is mapped.
        """
        assert fence_base is None
        try:
            if len(descriptors) != self.frames:
                raise OmniError("window", f"{len(descriptors)} frames were sent for a window of {self.frames}")
            try:
                for number, descriptor in enumerate(descriptors):
                    if os.fstat(descriptor).st_size != self.frame_bytes:
                        raise OmniError("window", f"descriptor {number} is no frame of {self.frame_bytes} bytes")
                    address = self.address + number * self.frame_bytes
                    pages.map_shared(descriptor, self.frame_bytes, address=address, populate=True)
            except OSError as error:
                raise OmniError("window", f"frames cannot be mapped: {error.strerror}") from error
            self.mapped = True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if not self.mapped:
                self.unmap()

    def unmap(self) -> None:
        """Take the frames out of the range. Nothing runs on a CPU behind the caller's back, so there is no fence."""
        if self.frames:
            pages.blank(self.address, self.size_bytes)
        self.mapped = False

    def wait(self, end_offset: int) -> None:
        """What is mapped has arrived."""

    def settle(self) -> None:
        """What is mapped has arrived."""

    def close(self) -> None:
        """Give the addresses back; no tensor of the window may be alive."""
        if self.frames:
            pages.release(self.address, self.size_bytes)
            self.frames = 0
        self.mapped = False
