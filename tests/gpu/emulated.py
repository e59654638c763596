"""A CUDA driver of host memory: what the cuda backend calls, run for real on memfds, in the worst order allowed.

Frames are memfds, addresses are real, so copies and mappings really happen and a touch of what is not mapped is
SIGSEGV. Several devices have memories and contexts of their own: what is made in a context is used in that one, and no
device reaches the memory of another. Streams are queues, and whenever somebody waits, a random stream's next operation
runs: an order that the driver would allow and that nobody meant shows up as wrong bytes. Calls are held against the
number of arguments of the real functions of cuda-bindings, and everything that is given out must be given back.
"""

# ruff: noqa: N802  (functions have the driver's own names)
from __future__ import annotations

import ctypes
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cuda.bindings.driver as real
import numpy as np

from gpu.emulated_book import Book
from omnimodel.memory.codec import Layout, decode
from omnimodel.memory.devices import cuda, cuda_driver, pages

if TYPE_CHECKING:
    import pytest

UNIT = 2 << 20
NO_CONTEXT = (  # calls that a device which has had a fault still answers
    "cuInit", "cuDevice", "cuCtxSetCurrent", "cuMemCreate", "cuMemRelease", "cuMemExport", "cuMemImport", "cuMemMap",
    "cuMemUnmap", "cuMemSetAccess", "cuMemAddress",
)  # fmt: skip
_WITHOUT_CONTEXT = frozenset({"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceTotalMem", "cuDriverGetVersion"})


class EmulatedDriver:
    """Stands in for the module `cuda.bindings.driver`.

    Args:
        capacity_bytes: of each device.
        seed: of the order in which streams proceed.
        devices: how many there are.
        product: what they are called.
        book_of: the book of each device by its number, where other processes use them, too.
    """

    def __init__(
        self,
        capacity_bytes: int,
        seed: int = 0,
        devices: int = 1,
        product: str = "NVIDIA H200",
        book_of: Callable[[int], Book] | None = None,
    ) -> None:
        assert devices == 1 or " MIG " not in product, "CUDA shows a process one MIG instance"
        self.product = product
        self.book_of = book_of
        self.contexts = [0] * devices
        self.capacity_bytes = capacity_bytes
        self.used = [0] * devices  # bytes of each device
        self.lost: set[int] = set()
        self.current = threading.local()  # the device whose context a thread has
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.handles: dict[int, tuple[int, int]] = {}  # handle -> (inode, size)
        self.memories: dict[int, list[int]] = {}  # inode -> [descriptor, references, size, device]
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> (inode, size)
        self.plain: dict[int, int] = {}
        self.made: set[int] = set()  # inodes of memories that are this process's own
        self.registered: dict[int, int] = {}
        self.registrars: dict[int, int] = {}  # address -> device
        self.streams: dict[int, deque[tuple[str, Callable[[], bool]]]] = {0: deque()}
        self.homes: dict[int, int] = {}  # stream, event or plain memory -> device
        self.events: dict[int, tuple[int, int]] = {}  # event -> (recorded, reached)
        self.numbers = iter(range(1, 1 << 40))
        self.fail: dict[str, int] = {}  # call -> after how many it fails
        self.unmaps_many = True  # whether one call may unmap several allocations
        self.after: Callable[[str], None] = lambda _: None  # told the name of each operation that has run

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        function = object.__getattribute__(self, f"do_{name}")
        expected = getattr(real, name).__doc__.split("\n")[0].split("(", 1)[1]
        count = 0 if expected.startswith(")") else expected.count(",") + 1

        def checked(*arguments: Any) -> tuple[Any, ...]:
            assert len(arguments) == count, f"{name} takes {expected}"
            if name.startswith("cuCheckpoint"):  # these may block, and nothing else may wait for them
                outcome = function(*arguments)
                return (outcome,) if isinstance(outcome, real.CUresult) else (real.CUresult.CUDA_SUCCESS, *outcome)
            if self.book_of is not None and name not in _WITHOUT_CONTEXT:
                self.book_of(0).wait_until_running()  # who is checkpointed has one device
            with self.lock:
                if name in self.fail:
                    if self.fail[name] == 0:
                        return (real.CUresult.CUDA_ERROR_UNKNOWN, None)
                    self.fail[name] -= 1
                if self.lost and not name.startswith(NO_CONTEXT) and self.here in self.lost:
                    return (real.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, None)
                outcome = function(*arguments)
                self._record()
            if isinstance(outcome, real.CUresult):
                return (outcome, None)
            return (real.CUresult.CUDA_SUCCESS, *outcome) if outcome is not None else (real.CUresult.CUDA_SUCCESS,)

        return checked

    def _record(self) -> None:
        """Keep the books, where there are any."""
        if self.book_of is None:
            return
        others = {inode for inode, _ in self.mapped.values()} - self.made
        for device, used_bytes in enumerate(self.used):
            book = self.book_of(device)
            context_bytes = book.context_bytes if self.contexts[device] else 0
            plain_bytes = sum(size for address, size in self.plain.items() if self.homes[address] == device)
            imported = [self.memories[inode] for inode in others]
            book.record(
                used_bytes + plain_bytes + context_bytes, sum(memory[2] for memory in imported if memory[3] == device)
            )

    def _has_no_room(self, device: int, size: int) -> bool:
        if self.book_of is None:
            return self.used[device] + size > self.capacity_bytes
        book = self.book_of(device)
        return book.used_bytes() + size > book.capacity_bytes

    # device and context

    @property
    def used_bytes(self) -> int:
        return sum(self.used)

    @property
    def here(self) -> int:
        """The device of the current context."""
        found = getattr(self.current, "device", None)
        assert found is not None, "this thread has no context"
        return int(found)

    def do_cuInit(self, flags):
        assert flags == 0

    def do_cuDeviceGetCount(self):
        return (len(self.used),)

    def do_cuDeviceGet(self, ordinal):
        assert 0 <= ordinal < len(self.used)
        return (ordinal,)

    def do_cuDevicePrimaryCtxRetain(self, device):
        context_bytes = self.book_of(device).context_bytes if self.book_of and not self.contexts[device] else 0
        if context_bytes and self._has_no_room(device, context_bytes):
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.contexts[device] += 1
        return (device + 1,)

    def do_cuDevicePrimaryCtxRelease(self, device):
        self.contexts[device] -= 1

    def do_cuCtxSetCurrent(self, context):
        self.current.device = context - 1

    def do_cuDeviceGetName(self, length, device):
        return (self.product.encode().ljust(length, b"\0"),)

    def do_cuDeviceGetPCIBusId(self, length, device):
        return (b"00000000:%02x:00.0\0\0" % device,)

    def do_cuDeviceGetUuid(self, device):
        found = real.CUuuid()
        ctypes.memmove(found.getPtr(), bytes([*bytes(15), device]), 16)
        return (found,)

    def do_cuDeviceTotalMem(self, device):
        return (self.capacity_bytes,)

    def do_cuMemGetInfo(self):
        used_bytes = self.used[self.here] if self.book_of is None else self.book_of(self.here).used_bytes()
        return (self.capacity_bytes - used_bytes, self.capacity_bytes)

    def do_cuMemGetAllocationGranularity(self, prop, option):
        return (UNIT,)

    # memory

    def do_cuMemCreate(self, size, prop, flags):
        assert size % UNIT == 0
        device = prop.location.id
        if device in self.lost:
            return real.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE
        if self._has_no_room(device, size):
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        descriptor = os.memfd_create(f"emulated-{device}")
        os.ftruncate(descriptor, size)
        self.used[device] += size
        self.made.add(os.fstat(descriptor).st_ino)
        return (self._handle(descriptor, device),)

    def _handle(self, descriptor: int, device: int = 0) -> int:
        status = os.fstat(descriptor)
        memory = self.memories.setdefault(status.st_ino, [descriptor, 0, status.st_size, device])
        if memory[0] != descriptor:
            os.close(descriptor)
        memory[1] += 1
        handle = next(self.numbers)
        self.handles[handle] = (status.st_ino, status.st_size)
        return handle

    def _drop(self, inode: int) -> None:
        memory = self.memories[inode]
        memory[1] -= 1
        if memory[1] == 0:
            os.close(memory[0])
            if inode in self.made:
                self.made.remove(inode)
                self.used[memory[3]] -= memory[2]
            del self.memories[inode]

    def do_cuMemRelease(self, handle):
        inode, _ = self.handles.pop(handle)
        self._drop(inode)

    def do_cuMemExportToShareableHandle(self, handle, kind, flags):
        inode, _ = self.handles[handle]
        return (os.dup(self.memories[inode][0]),)

    def do_cuMemImportFromShareableHandle(self, descriptor, kind):
        if os.fstat(descriptor).st_size == 0:
            return real.CUresult.CUDA_ERROR_INVALID_VALUE
        return (self._handle(os.dup(descriptor)),)

    def do_cuMemAddressReserve(self, size, alignment, address, flags):
        address = pages.reserve(size)
        self.reserved[address] = size
        return (address,)

    def do_cuMemAddressFree(self, address, size):
        assert self.reserved.pop(address) == size
        assert not self._inside(address, size), "freed while mapped"
        pages.release(address, size)

    def _inside(self, address: int, size: int) -> list[int]:
        return sorted(a for a in self.mapped if address <= a < address + size)

    def do_cuMemMap(self, address, size, offset, handle, flags):
        inode, length = self.handles[handle]
        assert size == length
        assert offset == 0
        assert any(a <= address and address + size <= a + s for a, s in self.reserved.items())
        assert not self._inside(address, size), "mapped twice"
        self.mapped[address] = (inode, size)
        self.memories[inode][1] += 1

    def do_cuMemSetAccess(self, address, size, access, count):
        parts = self._inside(address, size)
        assert sum(self.mapped[a][1] for a in parts) == size, "access to more than what is mapped"
        assert count == len(access) == 1
        devices = {self.memories[self.mapped[part][0]][3] for part in parts}
        assert devices == {access[0].location.id}, "access of one device to another's memory"
        writable = access[0].flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for part in parts:
            inode, length = self.mapped[part]
            pages.map_shared(self.memories[inode][0], length, address=part, writable=writable)

    def do_cuMemUnmap(self, address, size):
        parts = self._inside(address, size)
        if len(parts) > 1 and not self.unmaps_many:
            return real.CUresult.CUDA_ERROR_INVALID_VALUE
        assert sum(self.mapped[a][1] for a in parts) == size, "unmapped more than what is mapped"
        pages.blank(address, size)
        for part in parts:
            self._drop(self.mapped.pop(part)[0])
        return None

    def do_cuMemAlloc(self, size):
        if self.book_of is not None and self._has_no_room(self.here, size):
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        address = pages.reserve(size)
        descriptor = os.memfd_create("plain")
        os.ftruncate(descriptor, size)
        pages.map_shared(descriptor, size, address=address, writable=True)
        os.close(descriptor)
        self.plain[address] = size
        self.homes[address] = self.here
        return (address,)

    def do_cuMemFree(self, address):
        self.homes.pop(address, None)
        pages.release(address, self.plain.pop(address))

    def do_cuMemHostRegister(self, address, size, flags):
        assert self.here >= 0
        assert flags & real.CU_MEMHOSTREGISTER_PORTABLE or len(self.used) == 1, "pinned for one device only"
        assert address % 4096 == 0
        assert address not in self.registered
        self.registered[address] = size
        self.registrars[address] = self.here

    def do_cuMemHostUnregister(self, address):
        del self.registered[address]

    def do_cuMemHostGetDevicePointer(self, address, flags):
        return (address,)

    # streams

    def do_cuStreamCreate(self, flags):
        stream = next(self.numbers)
        self.streams[stream] = deque()
        self.homes[stream] = self.here
        return (stream,)

    def do_cuEventCreate(self, flags):
        event = next(self.numbers)
        self.events[event] = (0, 0)
        self.homes[event] = self.here
        return (event,)

    def do_cuEventDestroy(self, event):
        del self.events[event], self.homes[event]

    def _enqueue(self, stream: int, name: str, work: Callable[[], object], ready: Callable[[], bool] = lambda: True):
        assert self.homes.get(stream, self.here) == self.here, "a stream of another context"

        def run() -> bool:
            if not ready():
                return False
            work()
            return True

        self.streams[stream].append((name, run))

    def _registered(self, address: int, size: int) -> bool:
        return any(a <= address and address + size <= a + s for a, s in self.registered.items())

    def do_cuMemcpyHtoDAsync(self, target, source, size, stream):
        assert self._registered(source, size), "copied out of memory that is not pinned, or across registrations"
        homes = {self.memories[inode][3] for at, (inode, length) in self.mapped.items() if at <= target < at + length}
        assert homes <= {self.here}, "copied to another device's memory"
        self._enqueue(stream, "copy", lambda: pages.copy(target, source, size))

    def do_cuMemcpyDtoDAsync(self, target, source, size, stream):
        self._enqueue(stream, "move", lambda: pages.copy(target, source, size))

    def do_cuMemsetD8Async(self, target, value, size, stream):
        self._enqueue(stream, "set", lambda: ctypes.memset(target, value, size))

    def do_cuEventRecord(self, event, stream):
        assert self.homes[event] == self.here, "an event of another context"
        recorded, reached = self.events[event]
        self.events[event] = (recorded + 1, reached)

        def reach() -> None:
            if event in self.events:
                self.events[event] = (self.events[event][0], recorded + 1)

        self._enqueue(stream, "record", reach)

    def do_cuStreamWaitEvent(self, stream, event, flags):
        wanted = self.events[event][0]
        self._enqueue(stream, "wait", lambda: None, lambda: self.events[event][1] >= wanted)

    def do_cuEventQuery(self, event):
        for _ in range(self.random.randrange(4)):
            self.step()
        recorded, reached = self.events[event]
        return None if reached >= recorded else real.CUresult.CUDA_ERROR_NOT_READY

    def do_cuEventElapsedTime(self, began, ended):
        return (1.0,)

    def do_cuStreamWriteValue32(self, stream, address, value, flags):
        assert self._registered(address, 4)
        self._enqueue(stream, "write", lambda: setattr(ctypes.c_uint32.from_address(address), "value", value))

    def do_cuStreamWaitValue32(self, stream, address, value, flags):
        def reached() -> bool:
            return (ctypes.c_uint32.from_address(address).value - value) % (1 << 32) < 1 << 31

        self._enqueue(stream, "hold", lambda: None, reached)

    def do_cuStreamSynchronize(self, stream):
        while self.streams[stream]:
            assert self.step(), "the streams wait for each other for ever"

    def do_cuCtxSynchronize(self):
        while any(self.streams.values()):
            assert self.step(), "the streams wait for each other for ever"

    # checkpoint: a test says what happens; where there is a book, what it lets happen does happen there

    checkpoint: Callable[[str, int], Any] = staticmethod(lambda _name, _pid: ())

    def _step(self, name: str, pid: int) -> Any:
        outcome = self.checkpoint(name, pid)
        if self.book_of is None or isinstance(outcome, real.CUresult):
            return outcome
        books = [self.book_of(device) for device in range(len(self.used))]
        return next((book for book in books if pid in dict(book.processes())), books[0]).step(name, pid)

    def do_cuCheckpointProcessLock(self, pid, arguments):
        assert arguments.timeoutMs > 0
        return self._step("lock", pid)

    def do_cuCheckpointProcessCheckpoint(self, pid, arguments):
        return self._step("checkpoint", pid)

    def do_cuCheckpointProcessRestore(self, pid, arguments):
        return self._step("restore", pid)

    def do_cuCheckpointProcessUnlock(self, pid, arguments):
        return self._step("unlock", pid)

    def do_cuCheckpointProcessGetState(self, pid):
        return (real.CUprocessState.CU_PROCESS_STATE_CHECKPOINTED,)

    def decode(self, block: int, target: int, layout: Layout, stream: int) -> None:
        """What the Triton kernel does, in a stream."""

        def work() -> None:
            stored = np.frombuffer(ctypes.string_at(block, layout.size_bytes), np.uint8)
            words = decode(stored, layout).tobytes()
            ctypes.memmove(target, words, len(words))

        with self.lock:
            self._enqueue(stream, "decode", work)

    def step(self) -> bool:
        """Run one operation of a random stream; False when none can run."""
        busy = [stream for stream, queue in self.streams.items() if queue]
        self.random.shuffle(busy)
        for stream in busy:
            name, run = self.streams[stream][0]
            if run():
                self.streams[stream].popleft()
                self.after(name)
                return True
        return False

    def lose_device(self, device: int) -> None:
        """Have a device fail for good: what was queued there never runs, and its context answers every call so."""
        with self.lock:
            self.lost.add(device)
            for stream in [stream for stream, home in self.homes.items() if home == device and stream in self.streams]:
                self.streams[stream].clear()

    def left(self) -> dict[str, object]:
        """What has not been given back, and could be."""
        found = {
            "handles": self.handles,
            "memories": self.memories,
            "reserved": self.reserved,
            "mapped": self.mapped,
            "plain": {at: size for at, size in self.plain.items() if self.homes.get(at) not in self.lost},
            "registered": [at for at in self.registered if self.registrars.get(at) not in self.lost],
            "used": self.used_bytes,
        }
        return {name: value for name, value in found.items() if value}


def install(patch: pytest.MonkeyPatch, driver: EmulatedDriver) -> None:
    """Make it the driver of this process, and the decoder of packed images."""
    patch.setattr(cuda_driver, "_loaded", [driver])
    patch.setattr(cuda, "TritonDecoder", lambda _context: driver.decode)
