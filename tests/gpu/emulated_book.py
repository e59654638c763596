"""One emulated GPU for several processes: a page of memory that their drivers keep book in, and NVML (`nvml`) reads.

Each process writes what it holds of the device itself, so that a leak in one shows, and a full device is full for all.
Processes are told apart by user, start time and the pid in their own namespace, which the kernel tells inside a
sandbox and outside; NVML finds their pids as the kernel shows them to whoever asks, like the real one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import cuda.bindings.driver as real
import psutil

SLOTS = 4096
SAVE, RESTORE = signal.SIGUSR1, signal.SIGUSR2  # to programs without this driver
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
REFUSED = real.CUresult.CUDA_ERROR_ILLEGAL_STATE


class Slot(ctypes.Structure):
    """What one process has."""

    _fields_ = (
        ("uid", ctypes.c_uint64),
        ("ticks", ctypes.c_uint64),
        ("pid", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("saved", ctypes.c_uint64),  # of a checkpointed one
        ("imported", ctypes.c_uint64),  # of others, mapped here
        ("state", ctypes.c_uint64),
        ("doomed", ctypes.c_uint64),  # it was checkpointed with something mapped: its restore never returns
        ("told", ctypes.c_uint64),  # to go on, by a test
    )

    @property
    def identity(self) -> tuple[int, int, int]:
        """Whose it is."""
        return self.uid, self.ticks, self.pid


class Book:
    """The page, in a file.

    Args:
        path: of the file; the first who opens it makes it.
        capacity_bytes: of the device.
        context_bytes: that each process takes by its context.
        counts_imports: whether NVML counts what a process has imported from another as its own.
    """

    def __init__(self, path: Path, capacity_bytes: int, context_bytes: int, *, counts_imports: bool = False) -> None:
        self.capacity_bytes, self.context_bytes = capacity_bytes, context_bytes
        self.counts_imports = counts_imports
        size = SLOTS * ctypes.sizeof(Slot)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, size)
        self._page = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.slots = (Slot * SLOTS).from_buffer(self._page)
        self._own: tuple[int, Slot] | None = None
        self._saved: dict[int, int] = {}  # bytes of programs without this driver that are checkpointed, by pid

    def own(self) -> Slot:
        """Of this process, which a fork of it does not have."""
        if self._own is None or self._own[0] != os.getpid():
            self._own = os.getpid(), self.claim(_identity(Path("/proc/self")))
        return self._own[1]

    def claim(self, identity: tuple[int, int, int]) -> Slot:
        """A slot for a process, which no other has."""
        place = zlib.crc32(repr(identity).encode())
        slots = (self.slots[(place + step) % SLOTS] for step in range(SLOTS))
        slot = next(slot for slot in slots if not slot.ticks or slot.identity == identity)
        slot.uid, slot.pid, slot.ticks = identity[0], identity[2], identity[1]  # it counts once it has ticks
        return slot

    def record(self, held_bytes: int, imported_bytes: int) -> None:
        """Write what this process has."""
        own = self.own()
        own.bytes, own.imported = held_bytes, imported_bytes

    def used_bytes(self) -> int:
        """Of all processes."""
        return sum(slot.bytes for slot in self.slots if slot.ticks)

    def wait_until_running(self) -> None:
        """As a call of the driver does in a process that is locked or checkpointed."""
        own = self.own()
        while own.state != RUNNING:
            time.sleep(0.001)

    def processes(self) -> Iterator[tuple[int, Slot]]:
        """Pids with their slots; the slots of those that are gone are given back."""
        taken = {slot.identity: slot for slot in self.slots if slot.ticks}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if (slot := taken.pop(_identity(Path(f"/proc/{name}")), None)) is not None:
                    yield int(name), slot
        for slot in taken.values():
            ctypes.memset(ctypes.byref(slot), 0, ctypes.sizeof(Slot))

    def step(self, name: str, pid: int) -> object:
        """One step of a checkpoint or restore of another process, with the driver's own result."""
        slot = dict(self.processes()).get(pid)
        if slot is None:
            return self._step_of_program(name, pid)
        if name == "lock" and slot.state == RUNNING:
            slot.state = LOCKED
        elif name == "checkpoint" and slot.state == LOCKED:
            slot.saved, slot.bytes, slot.doomed = slot.bytes, 0, slot.imported > 0
            slot.state = CHECKPOINTED
        elif name == "restore" and slot.state == CHECKPOINTED:
            while slot.doomed and pid in dict(self.processes()):
                time.sleep(0.01)
            if self.used_bytes() + slot.saved > self.capacity_bytes:
                return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            slot.bytes, slot.saved, slot.state = slot.saved, 0, LOCKED
        elif name == "unlock" and slot.state == LOCKED:
            slot.state = RUNNING
        else:
            return REFUSED
        return ()

    def _step_of_program(self, name: str, pid: int) -> object:
        """The same of a program without this driver, which saves and restores its memory when it gets a signal."""
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            if name in {"lock", "unlock"}:
                return ()
            if name == "checkpoint" and (held_bytes := mapped_bytes(pid)):
                os.kill(pid, SAVE)
                self._saved[pid] = held_bytes
                return () if _until(lambda: not mapped_bytes(pid)) else REFUSED
            if name == "restore" and (saved_bytes := self._saved.get(pid)):
                if self.used_bytes() + sum(programs_bytes().values()) + saved_bytes > self.capacity_bytes:
                    return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
                os.kill(pid, RESTORE)
                del self._saved[pid]
                return () if _until(lambda: mapped_bytes(pid) == saved_bytes) else REFUSED
        return REFUSED


def programs_bytes(device: int = 0) -> dict[int, int]:
    """What programs without this driver have on a device, by pid: of those that this process has started.

    Others on this machine may have emulated devices of their own.
    """
    found = {child.pid: mapped_bytes(child.pid, device) for child in psutil.Process().children(recursive=True)}
    return {pid: size_bytes for pid, size_bytes in found.items() if size_bytes}


def _until(done: Callable[[], bool]) -> bool:
    """Whether something has become so within ten seconds."""
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)
    return done()


def _identity(process: Path) -> tuple[int, int, int]:
    """User, start time and innermost pid of a process that has not ended."""
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in b"ZX":
        raise ProcessLookupError(process)
    status = dict(row.split(":", 1) for row in (process / "status").read_text().splitlines())
    return int(status["Uid"].split()[0]), int(fields[19]), int(status["NSpid"].split()[-1])


def mapped_bytes(pid: int, device: int = 0) -> int:
    """What a program without this driver has on a device: it maps memfds named `device-NUMBER` for it."""
    try:
        rows = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it is gone
        return 0
    ranges = [row.split()[0].split("-") for row in rows if f"/memfd:device-{device} (deleted)" in row]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)
