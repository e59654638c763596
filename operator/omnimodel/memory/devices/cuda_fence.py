"""How far a copy is: a counter in one page that the agent's stream writes and a model's stream waits for.

The page is a memfd of one model's process, mapped and registered with the driver on both sides, so that neither the
agent's host thread nor the model's stands between the copy of a layer and its computation. A value counts frames:
`base + n` says that the first n frames of the wake which began at `base` have arrived. Values go on from wake to
wake (and wrap), so that no reset can race with a wait. The process may write its own page and so harm only itself;
the agent never reads a decision from it.
"""

from __future__ import annotations

import logging
import mmap
import os

import numpy as np

from omnimodel.errors import OmniError
from omnimodel.memory.devices.cuda_driver import Context, address_of, call, driver

log = logging.getLogger(__name__)

_STUCK: list[FencePage] = []  # that the driver did not let go of: their addresses must not become anybody else's

PAGE_BYTES = mmap.PAGESIZE
_WRAP = 1 << 32


class FencePage:
    """A shared page with a counter, registered with the driver.

    Args:
        context: of the device whose streams write or wait.
        descriptor: a memfd of one page; stays the caller's.
    """

    def __init__(self, context: Context, descriptor: int) -> None:
        self._context = context
        self._memory = mmap.mmap(descriptor, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = np.frombuffer(self._memory, dtype=np.uint32)
        self._words[0] = self._words[0]  # the page must exist before it is registered
        context.enter()
        flags = driver()
        call(
            "cuMemHostRegister",
            address_of(self._memory),
            PAGE_BYTES,
            flags.CU_MEMHOSTREGISTER_PORTABLE | flags.CU_MEMHOSTREGISTER_DEVICEMAP,
        )
        self._device_address = int(call("cuMemHostGetDevicePointer", address_of(self._memory), 0))

    def value(self) -> int:
        """The counter as this process sees it now."""
        return int(self._words[0])

    def set(self, value: int) -> None:
        """Write the counter from the host: lets a stream go on that would wait for ever."""
        self._words[0] = value % _WRAP

    def write(self, stream: int, value: int) -> None:
        """Write the counter when the stream gets there; what the stream did before is visible by then."""
        flag = driver().CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        call("cuStreamWriteValue32", stream, self._device_address, value % _WRAP, int(flag))

    def wait(self, stream: int, value: int) -> None:
        """Make the stream wait until the counter has reached the value (in cyclic order)."""
        flag = driver().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        call("cuStreamWaitValue32", stream, self._device_address, value % _WRAP, int(flag))

    def close(self) -> None:
        """Take the page back from the driver."""
        self._context.enter()
        call("cuMemHostUnregister", address_of(self._memory))
        del self._words
        self._memory.close()


class Fence:
    """The agent's side of one process's fence.

    Args:
        context: of the device that copies.
    """

    def __init__(self, context: Context) -> None:
        self.descriptor = os.memfd_create("omnimodel-fence", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, PAGE_BYTES)
        self.page = FencePage(context, self.descriptor)
        self.base = 0

    def begin(self, frames: int) -> int:
        """Start a copy of so many frames; the value at which none of them has arrived."""
        base = self.base
        self.base = (base + frames) % _WRAP
        return base

    def close(self) -> None:
        """Take the page back from the driver; no copy may be under way."""
        try:
            self.page.close()
        except OmniError as error:  # a device that has had a fault gives nothing back
            _STUCK.append(self.page)
            log.warning("fence_not_closed error=%r", str(error))
        os.close(self.descriptor)


def arrived(value: int, base: int, frames: int) -> int:
    """Frames of a copy that have arrived, by the counter's value.

    Args:
        value: the counter.
        base: from `Fence.begin`.
        frames: of the copy.
    """
    ahead = (value - base) % _WRAP
    return 0 if ahead >= _WRAP // 2 else min(ahead, frames)
