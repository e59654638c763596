"""The system calls under the host backend: reserve, map and replace ranges of addresses; collapse pages; copy."""

from __future__ import annotations

import ctypes
import mmap
import os

HUGE_PAGE_BYTES = 2 << 20

_MADV_POPULATE_READ = 22  # Linux 5.14; Python 3.11 has no name for these
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)  # calls through CDLL give up the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int = -1) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def reserve(size_bytes: int) -> int:
    """Reserve addresses that nothing is mapped to, aligned to 2 MiB (else huge pages are mapped in small pieces)."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(None, size_bytes + HUGE_PAGE_BYTES, _NONE, flags)
    aligned = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if aligned > start:
        release(start, aligned - start)
    if rest := start + HUGE_PAGE_BYTES - aligned:
        release(aligned + size_bytes, rest)
    return aligned


def release(address: int, size_bytes: int) -> None:
    """Unmap a range; its addresses may be given to someone else."""
    _libc.munmap(address, size_bytes)


def blank(address: int, size_bytes: int) -> None:
    """Replace whatever is mapped in a reserved range by nothing, in one step; the range stays reserved."""
    _mmap(address, size_bytes, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED)


def map_shared(
    descriptor: int, size_bytes: int, *, address: int | None = None, writable: bool = False, populate: bool = False
) -> int:
    """Map a file; over a reserved range when an address is given.

    Raises:
        OSError: the kernel refuses.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (_MAP_FIXED if address is not None else 0) | (_MAP_POPULATE if populate else 0)
    return _mmap(address, size_bytes, protection, flags, descriptor)


def populate(address: int, size_bytes: int) -> int:
    """Read a mapping in; 0, or the error number: a page that cannot be read is an error here and SIGBUS later."""
    return 0 if _libc.madvise(address, size_bytes, _MADV_POPULATE_READ) == 0 else ctypes.get_errno()


def in_memory(address: int, size_bytes: int) -> bool:
    """Whether every page of a mapped file is in memory; 20 times faster than `populate` when they are.

    The kernel tells it only to who owns the file or may write it; to others it says that they are.
    """
    states = ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
    return _libc.mincore(address, size_bytes, states) == 0 and states.raw.count(b"\x01") == len(states)


def collapse(address: int, size_bytes: int) -> bool:
    """Make 2 MiB pages out of small ones; False when the kernel cannot."""
    return bool(_libc.madvise(address, size_bytes, _MADV_COLLAPSE) == 0)


def copy(target: int, source: int, size_bytes: int) -> None:
    """Copy memory, without the GIL."""
    _libc.memcpy(target, source, size_bytes)


def zero(address: int, size_bytes: int) -> None:
    """Zero memory, without the GIL."""
    ctypes.memset(address, 0, size_bytes)
