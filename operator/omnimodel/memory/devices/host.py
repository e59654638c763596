"""Frames in host memory: memfd pages, for machines without an accelerator and for tests.

The agent keeps a writable mapping of each frame and nothing else that could write it: a model's process is sent a
read-only descriptor of a file of mode 0600 whose size is sealed. Pages are 2 MiB where the kernel can collapse them:
mapping and unmapping is about a hundred times faster than with 4 KiB pages.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from omnimodel.errors import ImageError, LedgerError, OmniError
from omnimodel.memory.devices import Frame, Meter, Parking, pages
from omnimodel.memory.devices.available import available_bytes

COPY_CHUNK_BYTES = 4 << 20
_EHWPOISON = 133  # errno has no name for it
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW; not WRITE: frames are recycled


@dataclass
class HostFrame:
    """The backend's side of a frame.

    Args:
        address: of the agent's writable mapping.
        huge: whether it has 2 MiB pages.
    """

    address: int
    huge: bool = False


@dataclass
class HostStaged:
    """An image file, mapped read-only; it stays mapped as long as something is copied from it."""

    path: str
    address: int
    image_bytes: int
    owned: bool = False  # by this user, whom the kernel tells which of its pages are in memory
    copies: int = 0
    unstaged: bool = False


class HostCopy:
    """A copy that is under way; see `devices.Copy`."""

    fence_base = None

    def __init__(self, path: str, ends: Sequence[int], skipped: Sequence[bool], on_end: Callable[[], None]) -> None:
        self.path = path
        self._on_end = on_end
        self._ends = ends
        self._done = list(skipped)
        self._watermark = 0
        self._open = len(ends) - sum(self._done)
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._began_seconds = time.perf_counter()
        self._took_seconds = 0.0
        self._advance()

    def _advance(self) -> None:
        while self._watermark < len(self._done) and self._done[self._watermark]:
            self._watermark += 1
        if self._open == 0:
            self._took_seconds = time.perf_counter() - self._began_seconds
            self._on_end()
            self._finished.set()

    def chunk_ended(self, number: int, error: BaseException | None = None) -> None:
        """Say that one chunk has been copied, or why it has not."""
        with self._lock:
            self._error = self._error or error
            self._done[number] = error is None
            self._open -= 1
            self._advance()

    def wait(self, timeout_seconds: float | None = None) -> float:
        """Wait for the end; seconds that the copy took."""
        if not self._finished.wait(timeout_seconds):
            raise TimeoutError(f"{self.path}: not copied in {timeout_seconds} s")
        if self._error is not None:
            raise ImageError(self.path, f"cannot be copied: {self._error}") from self._error
        return self._took_seconds

    def done_bytes(self) -> int:
        """Bytes that have arrived, from the start of the image on."""
        with self._lock:
            return self._ends[self._watermark - 1] if self._watermark else 0


class HostDevice:
    """Frames in host memory; see `devices.Device`.

    Args:
        frame_bytes: size of a frame, a multiple of 2 MiB.
        threads: that copy; 0 for one per core this process may use.
    """

    name = "host"
    on_host = True
    pinned_bytes = 0  # images lie in the page cache
    pinning = ""
    page_bytes = 1
    stream_bytes = 0
    context_bytes = 0
    meter: Meter | None = None  # the kernel tells what a process holds
    unmetered = ""
    parking: Parking | None = None

    def __init__(self, frame_bytes: int, *, threads: int = 0) -> None:
        if frame_bytes <= 0 or frame_bytes % pages.HUGE_PAGE_BYTES:
            raise OmniError(
                "device host", f"frames of {frame_bytes} bytes are no multiple of 2Mi", "set device.frameSize to 16Mi"
            )
        self.frame_bytes = frame_bytes
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="copy")
        self._lock = threading.Lock()
        self._next_id = 0
        self._frames: dict[int, Frame] = {}

    def create(self, count: int) -> list[Frame]:
        """Create frames, all or none."""
        free_bytes = self.free_bytes()
        if count * self.frame_bytes > free_bytes:
            raise LedgerError(
                "device host",
                f"{count} frames need {count * self.frame_bytes} bytes, the machine has {free_bytes} free",
                "lower the pool's device.memory",
            )
        made: list[Frame] = []
        try:
            for _ in range(count):
                made.append(self._create())  # noqa: PERF401 (what was made must be known when one fails)
        except OSError as error:
            self.destroy(made)
            cure = "raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else "free memory"
            raise LedgerError("device host", f"no frame could be made: {error.strerror}", cure) from error
        return made

    def _create(self) -> Frame:
        with self._lock:
            number = self._next_id
            self._next_id += 1
        descriptor = os.memfd_create(f"frame{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, self.frame_bytes)
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
            os.fchmod(descriptor, 0o600)  # a dropped uid cannot reopen it for writing through /proc
            frame = self._own(number, descriptor)
            frame.handle.huge = self._fault_in(frame.handle.address)
        finally:
            os.close(descriptor)  # the mapping stays: one descriptor a frame is enough
        with self._lock:
            self._frames[number] = frame
        return frame

    def _own(self, number: int, descriptor: int) -> Frame:
        readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Frame(number, readable, HostFrame(self._map(descriptor)))
        except OSError:
            os.close(readable)
            raise

    def _map(self, descriptor: int) -> int:
        """Map a frame writable; its address."""
        address = pages.reserve(self.frame_bytes)
        try:
            pages.map_shared(descriptor, self.frame_bytes, address=address, writable=True)
        except OSError:
            pages.release(address, self.frame_bytes)
            raise
        return address

    def adopt(self, descriptors: Mapping[int, int]) -> list[Frame]:
        """Take frames over, all or none; their owner can open them for writing again."""
        taken: list[Frame] = []
        try:
            for number, readable in descriptors.items():
                descriptor = os.open(f"/proc/self/fd/{readable}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    if os.fstat(descriptor).st_size != self.frame_bytes:
                        raise LedgerError("device host", f"what is to be frame {number} has another size")
                    taken.append(Frame(number, readable, HostFrame(self._map(descriptor))))
                finally:
                    os.close(descriptor)
        except (LedgerError, OSError) as error:
            for frame in taken:
                pages.release(frame.handle.address, self.frame_bytes)
            for readable in descriptors.values():
                os.close(readable)
            if isinstance(error, OSError):
                raise LedgerError("device host", f"a frame cannot be taken over: {error.strerror}") from error
            raise
        with self._lock:
            self._frames |= {frame.id: frame for frame in taken}
            self._next_id = max([self._next_id, *(number + 1 for number in descriptors)])
        return taken

    def _fault_in(self, address: int) -> bool:
        """Fault the frame in now, so that its pages are charged here and not to the model that reads them first."""
        for offset in range(0, self.frame_bytes, pages.HUGE_PAGE_BYTES):
            pages.zero(address + offset, 1)  # a hole cannot be collapsed
        if pages.collapse(address, self.frame_bytes):
            return True
        pages.zero(address, self.frame_bytes)
        return False

    def destroy(self, frames: Sequence[Frame]) -> None:
        """Give frames back to the system; pages go when no process maps them any more."""
        for frame in frames:
            with self._lock:
                if self._frames.pop(frame.id, None) is None:
                    continue
            pages.release(frame.handle.address, self.frame_bytes)
            os.close(frame.descriptor)

    def stage(self, path: str, image_bytes: int, *, whole: bool = True) -> HostStaged:
        """Map an image file and read it into the page cache, all of it.

        Raises:
            ImageError: the file is not there, has another length, or cannot be read.
        """
        assert whole
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ImageError(path, f"cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            size_bytes = status.st_size
            if size_bytes != image_bytes:
                raise ImageError(path, f"has {size_bytes} bytes, its index says {image_bytes}")
            if image_bytes == 0:
                return HostStaged(path, 0, 0)
            address = pages.map_shared(descriptor, image_bytes)
        except OSError as error:
            raise ImageError(
                path, f"cannot be mapped: {error.strerror}", "free memory, or raise vm.max_map_count"
            ) from error
        finally:
            os.close(descriptor)
        try:
            _read_in(path, address, image_bytes)
        except ImageError:
            pages.release(address, image_bytes)
            raise
        return HostStaged(path, address, image_bytes, status.st_uid == os.geteuid())

    def unstage(self, staged: HostStaged) -> None:
        """Unmap an image file, at the end of copies under way; the kernel may drop its pages from then on."""
        with self._lock:
            staged.unstaged = True
        self._unmap_unused(staged)

    def _unmap_unused(self, staged: HostStaged) -> None:
        with self._lock:
            if staged.unstaged and not staged.copies and staged.address:
                pages.release(staged.address, staged.image_bytes)
                staged.address = 0

    def _copy_ended(self, staged: HostStaged) -> None:
        with self._lock:
            staged.copies -= 1
        self._unmap_unused(staged)

    def decodes(self) -> bool:
        """No: frames of host memory are filled from images that are stored as they are."""
        return False

    def fence(self) -> None:
        """None: a process maps frames when they are filled."""

    def copy(
        self, staged: HostStaged, frames: Sequence[Frame], *, valid: Sequence[bool] = (), fence: Any | None = None
    ) -> HostCopy:
        """Start copying in the device's threads."""
        assert fence is None
        needed = -(-staged.image_bytes // self.frame_bytes)
        if len(frames) != needed:
            raise OmniError("device host", f"{len(frames)} frames for an image that needs {needed}")
        held = list(valid) or [False] * needed
        chunks: list[_Chunk] = []
        for number, frame in enumerate(frames):
            begin = number * self.frame_bytes
            end = min(begin + self.frame_bytes, staged.image_bytes)
            for offset in range(begin, end, COPY_CHUNK_BYTES):
                size_bytes = min(COPY_CHUNK_BYTES, end - offset)
                last = offset + size_bytes == end
                chunks.append(
                    _Chunk(
                        target=frame.handle.address + offset - begin,
                        source=staged.address + offset,
                        size_bytes=size_bytes,
                        tail_bytes=begin + self.frame_bytes - end if last else 0,
                        end=offset + size_bytes,
                        skipped=held[number],
                        owned=staged.owned,
                    )
                )
        with self._lock:
            if staged.unstaged:
                raise OmniError("device host", f"{staged.path} is not in the arena any more")
            staged.copies += 1
        copy = HostCopy(
            staged.path,
            [chunk.end for chunk in chunks],
            [chunk.skipped for chunk in chunks],
            lambda: self._copy_ended(staged),
        )
        todo = [number for number, chunk in enumerate(chunks) if not chunk.skipped]
        shared = iter(todo)  # next() on a list's iterator is atomic under the GIL
        for _ in range(min(self._threads, len(todo))):
            self._pool.submit(_work, copy, shared, chunks)
        return copy

    def fault(self) -> str:
        """See `Device.fault`: the memory of a machine that has one ends the machine."""
        return ""

    def free_bytes(self) -> int:
        """What this process may still use: MemAvailable, or less under a memory limit."""
        return available_bytes()

    def close(self) -> None:
        """Destroy every frame and end the copying threads."""
        self._pool.shutdown()
        self.destroy(list(self._frames.values()))


@dataclass(frozen=True)
class _Chunk:
    """A piece of a copy; `tail_bytes` behind it are zeroed: they held another model's bytes.

    `owned` is as in `HostStaged`.
    """

    target: int
    source: int
    size_bytes: int
    tail_bytes: int
    end: int
    skipped: bool
    owned: bool


def _work(copy: HostCopy, numbers: Iterator[int], chunks: Sequence[_Chunk]) -> None:
    for number in numbers:
        chunk = chunks[number]
        try:
            if not (chunk.owned and pages.in_memory(chunk.source, chunk.size_bytes)):
                _read_in(copy.path, chunk.source, chunk.size_bytes)
            pages.copy(chunk.target, chunk.source, chunk.size_bytes)
            if chunk.tail_bytes:
                pages.zero(chunk.target + chunk.size_bytes, chunk.tail_bytes)
        except BaseException as error:
            copy.chunk_ended(number, error)
        else:
            copy.chunk_ended(number)


def _read_in(path: str, address: int, size_bytes: int) -> None:
    """Read a mapped file in: a file cut short or a bad disk is an error here, and SIGBUS for the agent without it."""
    if pages.populate(address, size_bytes) in {errno.EFAULT, _EHWPOISON}:
        raise ImageError(path, "cannot be read from the disk", "publish the model again")
