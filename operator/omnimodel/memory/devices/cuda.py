"""The cuda backend, the agent's side: frames of device memory that are created once and recycled for ever.

A frame is one cuMemCreate handle, mapped writable here and sent to model processes as a file descriptor; fresh pages
cost the driver a scrub on every wake, recycled ones nothing (measured: docs/gpu.md). Images wait in pinned memory and
come over one stream of large copies; a second stream decodes what is coded and advances the fence after each frame,
so that a model's first layers compute while its last ones copy.

A process that holds a frame's descriptor could map it writable: CUDA has no read-only export. What it writes reaches
only its own model, because frames are overwritten or zeroed before they go to another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnimodel.errors import CURES, ImageError, LedgerError, OmniError, Reason
from omnimodel.memory.codec_file import read_index
from omnimodel.memory.devices import Frame, Meter, Parking, cuda_checkpoint
from omnimodel.memory.devices.available import available_bytes
from omnimodel.memory.devices.cuda_arena import PAGE_BYTES, Arena
from omnimodel.memory.devices.cuda_copy import Staged, Step, plan, slot_bytes
from omnimodel.memory.devices.cuda_driver import (
    Context,
    access,
    allocation_property,
    available,
    call,
    device_uuid,
    driver,
    is_mig_instance,
    let_go,
    near_cpus,
    ordinal_of,
)
from omnimodel.memory.devices.cuda_fence import Fence
from omnimodel.memory.devices.cuda_meter import open_meter
from omnimodel.memory.devices.cuda_transfer import CudaCopy, StreamedCopy
from omnimodel.memory.devices.cuda_unpack import TritonDecoder, Unpacker
from omnimodel.memory.devices.cuda_window import CudaWindow
from omnimodel.memory.index import PACKED_FILE
from omnimodel.memory.packing import can_pack

__all__ = ["FRAME_BYTES", "CudaCopy", "CudaDevice", "CudaWindow", "available"]

log = logging.getLogger(__name__)

_SLOTS = 4  # of an image that is read on the way: the disk fills one while others are copied and decoded

FRAME_BYTES = 64 << 20  # Source: docs/gpu.md, "Frame size"
CONTEXT_BYTES = 640 << 20  # 526 to 528 MiB of a new context, 640 after cuBLAS (H200, driver 580)


def _file_bytes(path: str, image_bytes: int | None) -> int:
    """Length of an image's file; None: it is not known what it should be."""
    try:
        found = os.stat(path).st_size
    except OSError as error:
        raise ImageError(path, f"cannot be opened: {error.strerror}") from error
    if image_bytes is not None and found != image_bytes:
        raise ImageError(path, f"has {found} bytes, its index says {image_bytes}", "publish the model again")
    return found


@dataclass(frozen=True)
class FrameMemory:
    """The driver's side of a frame.

    Args:
        allocation: the cuMemCreate handle.
        place: its place in the agent's range of addresses.
        address: where the agent has it mapped.
    """

    allocation: Any
    place: int
    address: int


class CudaDevice:
    """One GPU.

    Args:
        name: `cuda:1` with its number among those that the driver shows this process; `cuda` is the first.
        frame_bytes: size of one frame; a multiple of the device's granularity (2 MiB).
        arena_bytes: host memory to pin for images, in the background; None: half of what is available.
        arena: of another device of this process, to copy from that one instead.
        told: called from another thread when `pinning` says something else.

    Raises:
        OmniError: there is no such device.
    """

    on_host = False
    page_bytes = PAGE_BYTES
    context_bytes = CONTEXT_BYTES
    parking: Parking | None = cuda_checkpoint

    def __init__(
        self,
        name: str,
        frame_bytes: int = FRAME_BYTES,
        arena_bytes: int | None = None,
        arena: Arena | None = None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        ordinal = ordinal_of(name)
        self.name = f"cuda:{ordinal}"
        self.frame_bytes = frame_bytes
        self.context = Context(ordinal)
        self.meter: Meter | None
        self.meter, self.unmetered = open_meter(
            self.context.bus_id(), device_uuid(name) if is_mig_instance(name) else ""
        )
        self._lock = threading.RLock()
        self._property = allocation_property(ordinal)
        self._access = access(ordinal, writable=True)
        self._reserved_frames = self.context.total_bytes() // frame_bytes
        self._base = int(call("cuMemAddressReserve", self._reserved_frames * frame_bytes, 0, 0, 0))
        self._vacant = list(range(self._reserved_frames - 1, -1, -1))
        self._frames: dict[int, Frame] = {}
        self._next_id = 0
        self._line = self._stream()
        self._finish = self._stream()
        self._copied = self._event()
        self.progress = Fence(self.context)
        self._unpacker: Unpacker | None = None
        self._decodes: bool | None = None  # None: nobody has asked yet
        self._own_arena = arena is None
        if arena is None:
            pinned_bytes = available_bytes() // 2 if arena_bytes is None else arena_bytes
            near = near_cpus(self.context.bus_id())
            arena = Arena(pinned_bytes, self._register, self._unregister, near, told=told)
        self.arena = arena
        self._slot_bytes = slot_bytes(frame_bytes)
        self.stream_bytes = min(_SLOTS, arena.capacity_bytes // self._slot_bytes) * self._slot_bytes

    def create(self, count: int) -> list[Frame]:
        """Create frames.

        Raises:
            LedgerError: the device has no room; then none was created.
        """
        made: list[Frame] = []
        with self._lock:
            free_bytes = self.free_bytes()
            try:
                if count * self.frame_bytes > free_bytes:
                    raise LedgerError(f"device {self.name}", "has no room", reason=Reason.DEVICE_FULL)
                for _ in range(count):
                    made.append(self._create_one())  # noqa: PERF401  # what was made before an error is needed
            except OmniError as error:
                self.destroy(made)
                if not isinstance(error, LedgerError):  # the driver failed for another reason than want of room
                    raise
                raise LedgerError(
                    f"device {self.name}",
                    f"{count} frames need {count * self.frame_bytes} bytes, it has {free_bytes} free ({error.problem})",
                    error.cure or CURES[error.reason],
                    reason=error.reason,
                ) from error
        log.info("frames created device=%s count=%d bytes=%d", self.name, count, count * self.frame_bytes)
        return made

    def _create_one(self) -> Frame:
        if not self._vacant:
            raise LedgerError(f"device {self.name}", "has no room")
        kind = driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        place = self._vacant[-1]
        address = self._base + place * self.frame_bytes
        with contextlib.ExitStack() as undo:
            allocation = call("cuMemCreate", self.frame_bytes, self._property, 0)
            undo.callback(let_go, "cuMemRelease", allocation)
            try:
                descriptor = int(call("cuMemExportToShareableHandle", allocation, kind, 0))
            except OmniError as error:  # the driver does not say that it is for want of a file descriptor
                raise LedgerError(f"device {self.name}", error.problem, "raise the limit of open files") from error
            undo.callback(os.close, descriptor)
            call("cuMemMap", address, self.frame_bytes, 0, allocation, 0)
            undo.callback(let_go, "cuMemUnmap", address, self.frame_bytes)
            call("cuMemSetAccess", address, self.frame_bytes, self._access, 1)
            undo.pop_all()
        self._vacant.pop()
        frame = Frame(self._next_id, descriptor, FrameMemory(allocation, place, address))
        self._next_id += 1
        self._frames[frame.id] = frame
        return frame

    def adopt(self, descriptors: Mapping[int, int]) -> list[Frame]:
        """Refuse: which process has written into frames of a GPU nobody can say after the agent is gone."""
        for descriptor in descriptors.values():
            os.close(descriptor)
        raise LedgerError(f"device {self.name}", "frames of an agent that is gone are not taken over")

    def destroy(self, frames: Sequence[Frame]) -> None:
        """Give frames back to the device for good; the memory is free once no process maps them any more."""
        self.context.enter()
        with self._lock:
            let_go("cuStreamSynchronize", self._finish)
            for frame in frames:
                if self._frames.pop(frame.id, None) is None:
                    continue
                let_go("cuMemUnmap", frame.handle.address, self.frame_bytes)
                let_go("cuMemRelease", frame.handle.allocation)
                os.close(frame.descriptor)
                self._vacant.append(frame.handle.place)

    def stage(self, path: str, image_bytes: int, *, whole: bool = True) -> Staged:
        """Read an image, or the packed form of one, into the arena.

        Args:
            path: of the file; one named `image.packed` is decoded on its way into frames.
            image_bytes: of the image itself.
            whole: False: take room for parts of it, `stream_bytes`, and read them while it is copied.

        Raises:
            LedgerError: the arena has no room; take an image out of it first.
            ImageError: the file is damaged, or shorter than it should be.
        """
        packed = read_index(path) if os.path.basename(path) == PACKED_FILE else None
        if packed:
            if (packed.image_bytes, packed.frame_bytes) != (image_bytes, self.frame_bytes):
                found = f"{packed.image_bytes} bytes in frames of {packed.frame_bytes}"
                raise ImageError(path, f"was packed for an image of {found}", "pack it again")
            self._prepare_unpacker()
        stored = _file_bytes(path, None if packed else image_bytes)
        if not whole:
            slots = tuple(self.arena.take(self.stream_bytes))
            return Staged(path, image_bytes, self.stream_bytes, slots, packed, self._slot_bytes)
        extents = self.arena.take(stored)
        began = time.perf_counter()
        try:
            direct = self.arena.read(path, extents, stored)
        except BaseException:
            self.arena.give(extents)
            raise
        seconds = time.perf_counter() - began
        log.info("image staged path=%s bytes=%d seconds=%.3f direct=%s", path, stored, seconds, direct)
        return Staged(path, image_bytes, stored, tuple(extents), packed)

    def unstage(self, staged: Staged) -> None:
        """Take an image out of the arena; a copy of it that is under way ends first, or is broken off."""
        for copy in [copy for copy in self.arena.copies if copy.reads(staged)]:
            copy.break_off()
            copy.device.settle()
        self.arena.give(staged.extents)

    def settle(self) -> None:
        """Wait until nothing is copied to it any more."""
        self.context.enter()
        let_go("cuStreamSynchronize", self._finish)

    def decodes(self) -> bool:
        """Whether images may be packed: frames have a size to pack for, and the decoder could be made."""
        with self._lock:
            if self._decodes is None:
                try:
                    if can_pack(self.frame_bytes):
                        self._prepare_unpacker()
                except (OmniError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                    log.warning("no_decoder device=%s error=%r", self.name, error)  # of Triton, or of its compiler
                self._decodes = self._unpacker is not None
            return self._decodes

    def fence(self) -> Fence:
        """A fence for one model process: pass it to `copy`, and its descriptor to the process."""
        return Fence(self.context)

    def copy(
        self, staged: Staged, frames: Sequence[Frame], *, valid: Sequence[bool] = (), fence: Any | None = None
    ) -> CudaCopy:
        """Start copying an image into frames, in order; the rest of the last frame is zeroed.

        Args:
            staged: from `stage`.
            frames: as many as the image needs.
            valid: per frame, whether it already holds its part of this image; default: none does.
            fence: of the model's process, advanced by one after each frame; the process is told the copy's
                `fence_base`.
        """
        steps = plan(staged, self.frame_bytes, len(frames), valid)
        if staged.packed:
            self._prepare_unpacker()  # another device of this process may have staged it
        self.context.enter()
        with self._lock, self.arena.copying:
            if staged.slots and any(copy.reads(staged) for copy in self.arena.copies):
                raise LedgerError(f"device {self.name}", f"{staged.path} is being copied already")
            events = self._event(timed=True), self._event(timed=True)
            call("cuEventRecord", events[0], self._line)
            copy: CudaCopy
            if staged.slots:
                emptied = [self._event() for _ in range(staged.slots)]
                copy = StreamedCopy(self, staged, steps, frames, fence=fence, events=events, emptied=emptied)
                copy.start()
            else:
                fences = [(f, f.begin(len(frames))) for f in (self.progress, fence) if f is not None]
                for step in steps:
                    self.push(step, frames[step.frame], fences)
                self.end(events[1])
                copy = CudaCopy(self, staged, len(frames), (fences[0][1], fences[-1][1]), events)
            self.arena.copies = [*(one for one in self.arena.copies if one.reads()), copy]
        return copy

    def push(self, step: Step, frame: Frame, fences: Sequence[tuple[Fence, int]], emptied: Any | None = None) -> None:
        """Queue one step of a copy.

        Args:
            step: what comes from memory that holds it now.
            frame: that it fills.
            fences: to advance afterwards, and where each began to count.
            emptied: event that says when the step's memory is not read any more.
        """
        with self._lock:
            self._enqueue(step, frame.handle.address)
            for each, base in fences:
                each.page.write(self._finish, base + step.frame + 1)
            if emptied is not None:
                call("cuEventRecord", emptied, self._finish)

    def end(self, event: Any) -> None:
        """Have an event recorded behind all that was pushed."""
        call("cuEventRecord", event, self._finish)

    def _enqueue(self, step: Step, address: int) -> None:
        unpacker = self._unpacker if step.blocks else None
        target = unpacker.reserve(self._line) if unpacker else address
        for piece in step.pieces:
            call("cuMemcpyHtoDAsync", target, piece.address, piece.size_bytes, self._line)
            target += piece.size_bytes
        if step.zero_from < self.frame_bytes:
            call("cuMemsetD8Async", address + step.zero_from, 0, self.frame_bytes - step.zero_from, self._line)
        if step.pieces:
            call("cuEventRecord", self._copied, self._line)
            call("cuStreamWaitEvent", self._finish, self._copied, 0)
        if unpacker:
            unpacker.unpack(step, address, self.frame_bytes, self._finish)

    def _prepare_unpacker(self) -> None:
        self.context.enter()
        with self._lock:
            if self._unpacker is None:
                self._unpacker = Unpacker(self.context, self.frame_bytes, TritonDecoder(self.context))

    def free_bytes(self) -> int:
        """Bytes that the driver says are free."""
        return self.context.free_bytes()

    def fault(self) -> str:
        """See `Device.fault`. A context that has had an error answers every call with it, until its process ends."""
        try:
            self.free_bytes()
        except OmniError as error:
            return error.problem
        return ""

    @property
    def pinned_bytes(self) -> int:
        """See `Device`."""
        return self.arena.capacity_bytes if self._own_arena else 0

    @property
    def pinning(self) -> str:
        """See `Device`."""
        return self.arena.pinning if self._own_arena else ""

    def close(self) -> None:
        """Destroy everything."""
        for copy in [copy for copy in self.arena.copies if copy.device is self]:
            copy.break_off()
        self.settle()
        self.destroy(list(self._frames.values()))
        if self._unpacker:
            with contextlib.suppress(OmniError):
                self._unpacker.close()
        if self._own_arena:
            self.arena.close()
        self.progress.close()
        let_go("cuMemAddressFree", self._base, self._reserved_frames * self.frame_bytes)
        self.context.release()

    def _stream(self) -> int:
        return int(call("cuStreamCreate", int(driver().CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def _event(self, *, timed: bool = False) -> Any:
        flags = driver().CUevent_flags
        return call("cuEventCreate", int(flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING))

    def _register(self, address: int, size_bytes: int) -> None:
        self.context.enter()
        call("cuMemHostRegister", address, size_bytes, int(driver().CU_MEMHOSTREGISTER_PORTABLE))

    def _unregister(self, address: int) -> None:
        self.context.enter()
        let_go("cuMemHostUnregister", address)
