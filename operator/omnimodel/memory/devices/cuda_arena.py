"""The arena: host memory that images wait in, registered with the driver so that it can be copied at the line rate.

It is made in chunks of at most 1 GiB by a background thread (huge pages, first touched by threads on the device's
NUMA node), and handed out in extents of whole 2 MiB pages, so that an image may lie scattered and nothing has to be
moved. Registering is a callable: without a driver the whole of it runs in plain memory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from omnimodel.errors import ImageError, LedgerError
from omnimodel.memory.devices.cuda_driver import address_of
from omnimodel.quantity import format_bytes

if TYPE_CHECKING:
    from omnimodel.memory.devices.cuda_transfer import CudaCopy

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30  # one registration of 14 GiB takes seconds and cannot be interrupted
PAGE_BYTES = 2 << 20
READ_BYTES = 16 << 20
READERS = 8
BLOCK_BYTES = 4096  # what O_DIRECT needs offsets, sizes and addresses to be multiples of


@dataclass(frozen=True)
class Extent:
    """A contiguous part of the arena."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class Piece:
    """A contiguous part of an image in host memory: where it is, and how much."""

    address: int
    size_bytes: int


class FreeList:
    """Which bytes of the arena are free: pure arithmetic on addresses, exact to the page.

    Extents next to each other are merged only within the range in which they were added, because a copy must not
    cross from one registration into another.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # as added: (address, size)
        self._free: list[tuple[int, int]] = []  # sorted by address
        self.total_bytes = 0
        self.free_bytes = 0

    def add(self, address: int, size_bytes: int) -> None:
        """Add a range of whole pages."""
        self._ranges.append((address, size_bytes))
        self.total_bytes += size_bytes
        self._give(address, size_bytes)

    def take(self, size_bytes: int) -> list[Extent]:
        """Take so many bytes, rounded up to whole pages: in one extent where there is one, else in the fewest.

        Raises:
            LedgerError: less than that is free; then nothing is taken.
        """
        wanted = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        if wanted > self.free_bytes:
            raise LedgerError(
                "arena",
                f"{wanted} bytes are wanted and {self.free_bytes} of {self.total_bytes} are free",
                "raise the pool's hostMemory",
            )
        taken: list[Extent] = []
        while wanted:
            fitting = [part for part in self._free if part[1] >= wanted]
            address, size = min(fitting, key=lambda part: part[1]) if fitting else max(self._free, key=lambda p: p[1])
            used = min(size, wanted)
            self._free.remove((address, size))
            if size > used:
                self._free.append((address + used, size - used))
                self._free.sort()
            taken.append(Extent(address, used))
            self.free_bytes -= used
            wanted -= used
        return taken

    def give(self, extents: Sequence[Extent]) -> None:
        """Give extents back.

        Raises:
            LedgerError: some of it is free already, or was never part of the arena.
        """
        for extent in extents:
            self._give(extent.address, extent.size_bytes)

    def _give(self, address: int, size: int) -> None:
        home = next((r for r in self._ranges if r[0] <= address and address + size <= r[0] + r[1]), None)
        if home is None or any(address < a + s and a < address + size for a, s in self._free):
            raise LedgerError(
                "arena", f"{size} bytes at {address:#x} were given back by someone who does not hold them"
            )
        self.free_bytes += size
        for neighbour in [p for p in self._free if p[0] + p[1] == address or address + size == p[0]]:
            if home[0] <= neighbour[0] and neighbour[0] + neighbour[1] <= home[0] + home[1]:
                self._free.remove(neighbour)
                address, size = min(address, neighbour[0]), size + neighbour[1]
        self._free.append((address, size))
        self._free.sort()


def pieces(extents: Sequence[Extent], offset: int, size_bytes: int) -> list[Piece]:
    """Where a part of an image lies: the extents cut to [offset, offset + size_bytes)."""
    found = []
    start = 0
    for extent in extents:
        low, high = max(offset, start), min(offset + size_bytes, start + extent.size_bytes)
        if low < high:
            found.append(Piece(extent.address + low - start, high - low))
        start += extent.size_bytes
    return found


class Arena:
    """Registered host memory and the images in it.

    Args:
        capacity_bytes: how large it becomes; rounded down to whole pages.
        register: called with (address, bytes) of each chunk before it is used, from the background thread.
        unregister: called with the address of each chunk at close.
        cpus: on which the pages are touched first; empty: on any.
        chunk_bytes: size of one registration.
        told: called from the background thread when `pinning` says something else.
    """

    def __init__(
        self,
        capacity_bytes: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        cpus: set[int] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self.capacity_bytes = self._wanted_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self._told = told
        self._register, self._unregister = register, unregister
        self._cpus = cpus or set()
        self._chunk_bytes = chunk_bytes
        self._chunks: list[tuple[int, mmap.mmap]] = []
        self._free = FreeList()
        self._changed = threading.Condition()
        self.copying = threading.RLock()
        self.copies: list[CudaCopy] = []  # out of it, to all devices, that may be under way
        self._failure: Exception | None = None
        self._closing = False
        self._maker = threading.Thread(target=self._make, name="arena", daemon=True)
        self._maker.start()

    @property
    def made_bytes(self) -> int:
        """Bytes registered so far."""
        return self._free.total_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no image holds, those not registered yet included."""
        with self._changed:
            return self._free.free_bytes + self.capacity_bytes - self._free.total_bytes

    @property
    def pinning(self) -> str:
        """How far it is, in tenths, or that it became no larger, in words; empty when all of it is registered."""
        wanted = format_bytes(self._wanted_bytes)
        if self._failure is not None:
            return f"only {format_bytes(self.made_bytes)} of {wanted} could be pinned for images: {self._failure}"
        if self.made_bytes == self._wanted_bytes:
            return ""
        return f"{100 * self.made_bytes // self._wanted_bytes // 10 * 10} % of {wanted} are pinned for images so far"

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all of it is registered (or failed); whether it is."""
        self._maker.join(timeout_seconds)
        return not self._maker.is_alive() and self._failure is None

    def take(self, size_bytes: int) -> list[Extent]:
        """Take extents for an image; waits for chunks that are still being registered.

        Raises:
            LedgerError: there is no room; evict an image first.
        """
        with self._changed:
            while size_bytes > self._free.free_bytes and self._maker.is_alive() and not self._closing:
                if size_bytes > self._free.free_bytes + self.capacity_bytes - self._free.total_bytes:
                    break
                self._changed.wait(0.5)
            return self._free.take(size_bytes)

    def give(self, extents: Sequence[Extent]) -> None:
        """Give extents back."""
        with self._changed:
            self._free.give(extents)

    def close(self) -> None:
        """Unregister everything; no copy may be under way."""
        self._closing = True
        self._maker.join()
        for address, memory in self._chunks:
            self._unregister(address)
            memory.close()
        self._chunks.clear()

    def _make(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)  # of this thread; its page faults take memory of that node
        try:
            with ThreadPoolExecutor(4, "arena-touch") as touchers:
                while self.made_bytes < self.capacity_bytes and not self._closing:
                    size = min(self._chunk_bytes, self.capacity_bytes - self.made_bytes)
                    self._make_chunk(size, touchers)
        except Exception as error:
            log.exception("arena incomplete bytes=%d of=%d", self.made_bytes, self.capacity_bytes)
            with self._changed:
                self._failure = error
                self.capacity_bytes = self.made_bytes
                self._changed.notify_all()
            self._told()

    def _make_chunk(self, size: int, touchers: ThreadPoolExecutor) -> None:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                log.warning("arena without huge pages")
        whole = np.frombuffer(memory, dtype=np.uint8)
        parts = np.array_split(whole, 4)
        list(touchers.map(_touch, parts))
        del whole, parts
        address = address_of(memory)
        self._register(address, size)
        before = self.pinning
        with self._changed:
            self._chunks.append((address, memory))
            self._free.add(address, size)
            self._changed.notify_all()
        if self.pinning != before:
            self._told()
        log.debug("arena bytes=%d of=%d", self.made_bytes, self.capacity_bytes)

    def read(self, path: str, extents: Sequence[Extent], size_bytes: int, offset: int = 0) -> bool:
        """Read a file into extents, past the page cache where the file system can; whether it could.

        Args:
            path: of the file.
            extents: at least as large as what is read.
            size_bytes, offset: what of it; the offset is a multiple of 4096.

        Raises:
            ImageError: the file is shorter than the image, or cannot be read.
        """
        cuts: list[tuple[int, Piece]] = []
        for begin in range(0, size_bytes, READ_BYTES):
            start = offset + begin
            for piece in pieces(extents, begin, min(READ_BYTES, size_bytes - begin)):
                cuts.append((start, piece))
                start += piece.size_bytes
        try:
            direct = True
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:  # tmpfs and some network file systems have no O_DIRECT
                direct = False
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ImageError(path, f"cannot be read: {error.strerror}") from error
        try:
            with ThreadPoolExecutor(READERS, "arena-read") as readers:
                direct = direct and self._can_read(descriptor, cuts)
                for arrived, wanted in readers.map(lambda cut: self._read_piece(descriptor, *cut), cuts):
                    if arrived < wanted:
                        raise ImageError(path, "is shorter than its index says", "publish the model again")
        except OSError as error:
            raise ImageError(path, f"cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)
        return direct

    def _can_read(self, descriptor: int, cuts: Sequence[tuple[int, Piece]]) -> bool:
        """Whether a file can be read past the page cache: some file systems open it so, and refuse to read.

        Then it is read as any other from here on.
        """
        for offset, piece in cuts[:1]:
            try:
                os.preadv(descriptor, [self.view(piece.address, BLOCK_BYTES)], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
                return False
        return True

    def _read_piece(self, descriptor: int, offset: int, piece: Piece) -> tuple[int, int]:
        # O_DIRECT wants whole blocks; extents are whole pages, so a rounded-up read stays inside its own extent
        rounded = -(-piece.size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        view = self.view(piece.address, rounded)
        done = 0
        while done < piece.size_bytes:
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done, piece.size_bytes

    def view(self, address: int, size_bytes: int) -> memoryview:
        """The memory itself."""
        for start, memory in self._chunks:
            if start <= address and address + size_bytes <= start + len(memory):
                return memoryview(memory)[address - start : address - start + size_bytes]
        raise LedgerError("arena", f"{size_bytes} bytes at {address:#x} are not in it")


def _touch(part: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    part[:: mmap.PAGESIZE] = 0
