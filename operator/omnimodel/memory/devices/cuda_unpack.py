"""Decoding on the way: coded blocks land in a small ring of staging buffers and are decoded into their frames.

The line's stream fills buffer k while another stream decodes buffer k-1; both run ahead of the host. Triton and torch
are loaded here, when the first packed image is staged.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from omnimodel.memory.codec import TILE, Layout, encode
from omnimodel.memory.devices.cuda_copy import Step
from omnimodel.memory.devices.cuda_driver import Context, call, driver

RING = 3
SLACK_BYTES = 1 << 20  # padding between the blocks of a frame; codec_file refuses more


Decode = Callable[[int, int, Layout, int], None]
"""Decodes the block at the first address to the second, in a stream."""


class TritonDecoder:
    """The Triton kernel on addresses and streams of the driver, compiled for one device.

    Args:
        context: of the device.
    """

    def __init__(self, context: Context) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._kernel: Any = importlib.import_module("omnimodel.memory.codec_kernel")
        self._device = f"cuda:{context.ordinal}"
        self._streams: dict[int, Any] = {}
        context.enter()
        for values in (np.zeros(TILE, np.uint16), np.zeros(TILE, np.uint8)):
            block, layout = encode(values)
            memory = int(call("cuMemAlloc", block.nbytes + values.nbytes))
            try:
                call("cuMemcpyHtoD", memory, block.__array_interface__["data"][0], block.nbytes)
                self(memory, memory + block.nbytes, layout, 0)  # compiles it, before a model waits for it
                context.synchronize()
            finally:
                call("cuMemFree", memory)

    def __call__(self, block: int, target: int, layout: Layout, stream: int) -> None:
        """Decode the block at one address to another, in a stream."""
        if stream not in self._streams:
            self._streams[stream] = self._torch.cuda.ExternalStream(stream, device=self._device)
        address = self._kernel.Address
        with self._torch.cuda.stream(self._streams[stream]):
            out = self._torch.int16 if layout.item_bytes == 2 else self._torch.int8
            self._kernel.unpack(address(block, self._torch.uint8), address(target, out), layout)


class Unpacker:
    """The ring of one device.

    Args:
        context: of the device.
        frame_bytes: of the device.
        decode: what decodes one block.
    """

    def __init__(self, context: Context, frame_bytes: int, decode: Decode) -> None:
        context.enter()
        self._decode = decode
        self._buffers = [int(call("cuMemAlloc", frame_bytes + SLACK_BYTES)) for _ in range(RING)]
        untimed = int(driver().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._emptied = [call("cuEventCreate", untimed) for _ in range(RING)]
        self._next = 0

    def reserve(self, line: int) -> int:
        """The address of the next staging buffer; the line's stream waits until it has been decoded."""
        call("cuStreamWaitEvent", line, self._emptied[self._next], 0)
        return self._buffers[self._next]

    def unpack(self, step: Step, address: int, frame_bytes: int, stream: int) -> None:
        """Decode the buffer that was reserved last into a frame, in the given stream.

        Args:
            step: whose pieces are in the buffer.
            address: of the frame.
            frame_bytes: of the device; the step's frame starts at so many bytes of the image.
            stream: that has waited for the copy into the buffer.
        """
        buffer = self._buffers[self._next]
        for block in step.blocks:
            stored = buffer + block.stored_at - step.stored_at
            target = address + block.offset - step.frame * frame_bytes
            if block.layout is None:
                call("cuMemcpyDtoDAsync", target, stored, block.size_bytes, stream)
            else:
                self._decode(stored, target, block.layout, stream)
        call("cuEventRecord", self._emptied[self._next], stream)
        self._next = (self._next + 1) % RING

    def close(self) -> None:
        """Give the buffers back; no copy may be under way."""
        for buffer in self._buffers:
            call("cuMemFree", buffer)
        for event in self._emptied:
            call("cuEventDestroy", event)
