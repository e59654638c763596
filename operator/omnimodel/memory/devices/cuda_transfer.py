"""Copies under way: of an image that is in the arena, and of one that is read from its file on the way.

What is larger than the arena goes through a few slots of it, each as large as a frame: a thread reads the next part
into a slot that the device has emptied, and queues its copy. So the disk and the line work at the same time, and the
model's first layers compute when the first parts have arrived, as with any other copy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnimodel.errors import ImageError, OmniError, lost
from omnimodel.memory.devices.cuda_copy import Staged, Step
from omnimodel.memory.devices.cuda_driver import call, ready
from omnimodel.memory.devices.cuda_fence import Fence, arrived

if TYPE_CHECKING:
    from omnimodel.memory.devices import Frame
    from omnimodel.memory.devices.cuda import CudaDevice

_POLL_SECONDS = 0.0002


class CudaCopy:
    """A copy under way in the device's streams.

    Args:
        device: that copies.
        staged: what it copies.
        frames: how many it fills.
        bases: where the device's own fence and the process's fence begin to count.
        events: recorded at its beginning and its end.
    """

    def __init__(
        self, device: CudaDevice, staged: Staged, frames: int, bases: tuple[int, int], events: tuple[Any, Any]
    ) -> None:
        self.device, self._staged, self._frames = device, staged, frames
        self._base, self.fence_base = bases
        self._began, self._ended = events
        self._seconds: float | None = None
        self._failed = False
        self._waiting = threading.Lock()

    def break_off(self) -> None:
        """Copy no more than what is on its way already."""

    def reads(self, staged: Staged | None = None) -> bool:
        """Whether it has not been seen to end, and reads from there."""
        return self._seconds is None and not self._failed and staged in (None, self._staged)

    def wait(self, timeout_seconds: float | None = None) -> float:
        """Wait for its end; seconds that the copy took on the device.

        Raises:
            ImageError: the device could not copy it.
            OmniError: nor can it copy anything any more.
            TimeoutError: it is not done in time.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._waiting:
            if self._seconds is not None:
                return self._seconds
            self.device.context.enter()
            try:
                while not ready(self._ended):
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"{self._staged.path}: not copied after {timeout_seconds} s")
                    time.sleep(_POLL_SECONDS)
                self._seconds = float(call("cuEventElapsedTime", self._began, self._ended)) / 1e3
            except OmniError as error:
                self._failed = True
                if problem := self.device.fault():
                    raise lost(self.device.name, problem) from error
                raise ImageError(
                    self._staged.path, f"was not copied to {self.device.name}: {error.problem}", error.cure
                ) from error
            for event in (self._began, self._ended):
                call("cuEventDestroy", event)
        return self._seconds

    def done_bytes(self) -> int:
        """Bytes that have arrived so far, from the start of the image on."""
        if self._seconds is not None:
            return self._staged.image_bytes
        frames = arrived(self.device.progress.page.value(), self._base, self._frames)
        return min(frames * self.device.frame_bytes, self._staged.image_bytes)


class StreamedCopy(CudaCopy):
    """A copy whose image is read from its file on the way; it begins with `start`.

    Args:
        device: that copies.
        staged: slots that the image goes through.
        steps: from `plan`.
        frames: that it fills.
        fence: of the process that will have the frames.
        events: recorded at its beginning and its end.
        emptied: an event for each slot.
    """

    def __init__(
        self,
        device: CudaDevice,
        staged: Staged,
        steps: Sequence[Step],
        frames: Sequence[Frame],
        *,
        fence: Fence | None,
        events: tuple[Any, Any],
        emptied: Sequence[Any],
    ) -> None:
        base = fence.begin(len(frames)) if fence else 0
        super().__init__(device, staged, len(frames), (0, base), events)
        self._fences = [(fence, base)] if fence else []
        self._steps, self._into, self._emptied = steps, frames, emptied
        self._arrived = 0
        self._error: OmniError | None = ImageError(staged.path, "was not read to its end", "see the log for why")
        self._broken_off = threading.Event()
        self._feeder = threading.Thread(target=self._feed, name="feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._feeder.start()

    def break_off(self) -> None:
        """Read no further; it fails."""
        self._broken_off.set()
        self._feeder.join()

    def wait(self, timeout_seconds: float | None = None) -> float:
        """See `CudaCopy`; it fails, too, when the image cannot be read."""
        began = time.monotonic()
        self._feeder.join(timeout_seconds)
        if self._feeder.is_alive():
            raise TimeoutError(f"{self._staged.path}: not read after {timeout_seconds} s")
        left = None if timeout_seconds is None else max(0.0, began + timeout_seconds - time.monotonic())
        try:
            seconds = super().wait(left)
        finally:
            with contextlib.suppress(OmniError):  # a device that has had a fault gives nothing back
                while self._emptied and not self.reads():
                    call("cuEventDestroy", self._emptied[-1])
                    self._emptied = self._emptied[:-1]
        if self._error is not None:
            raise self._error
        return seconds

    def done_bytes(self) -> int:
        """Bytes that have arrived so far, as far as it is known: a slot's when the slot is used again."""
        if not self.reads() and self._error is None:
            return self._staged.image_bytes
        return min(self._arrived * self.device.frame_bytes, self._staged.image_bytes)

    def _feed(self) -> None:
        try:
            self.device.context.enter()
            for step in self._steps:
                self._push(step)
            self._error = None
        except OmniError as error:
            self._error = error
        finally:
            with contextlib.suppress(OmniError):  # then waiting for the end says so
                self.device.end(self._ended)

    def _push(self, step: Step) -> None:
        slot, part = self._emptied[step.slot], step.part
        while part is not None and not ready(slot) and not self._broken_off.is_set():
            time.sleep(_POLL_SECONDS)
        if self._broken_off.is_set():
            raise ImageError(self._staged.path, "was not copied to its end, since nobody waits for it any more")
        if part is not None:
            self._arrived = max(self._arrived, part.arrived)
            self.device.arena.read(self._staged.path, part.extents, part.size_bytes, part.offset)
        self.device.push(step, self._into[step.frame], self._fences, slot if part is not None else None)
