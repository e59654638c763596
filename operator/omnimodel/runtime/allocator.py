"""Keeps a process of a model small: it holds no memory it no longer uses, and shares with its siblings what it can."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # Source: glibc's malloc.h
_MMAP_BYTES = 8 << 20
_TRIM_BYTES = 16 << 20
_LARGE_HOLES = tuple(1024 << step for step in range(6, -1, -1))  # bytes; larger blocks have pages of their own
_SMALL_HOLES = range(1032, 0, -16)  # one of each size that the C library keeps a list for


def bound_retention() -> None:
    """Give large blocks back to the system when they are freed.

    By default the threshold above which a block has pages of its own grows with the blocks that are freed, so that a
    model with activations of 16 MiB came to hold 128 MiB. Fixing it costs page faults for each large block, and none
    for the small ones.

    All threads share one arena: only of the first one does malloc_trim give back the end, and the thread that computes
    kept up to 12 MiB there after an evict. Threads rarely allocate at the same time, since the interpreter has a lock.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, which has rules of its own
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    mallopt(_M_ARENA_MAX, 1)


def bound_device(limit_bytes: int) -> None:
    """Have torch refuse more memory of the process's GPU than that.

    What is too much is then an error of one request. The agent, which asks the driver, would end the process for it.

    Args:
        limit_bytes: of what torch allocates, frames left out; 0 for no other limit than there was.
    """
    torch = sys.modules.get("torch")
    if limit_bytes and torch is not None and torch.cuda.is_initialized():
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), 0)


class _Statistics(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def fill_holes() -> None:
    """Take what is free between the blocks of the heap, for good, so that forks allocate at its end.

    A page that a fork writes to becomes its own. With holes between what it shares with its siblings, a small block in
    each cost it 5 MiB more, of 20 MiB that an idle process holds.
    """
    try:
        library = ctypes.CDLL(None)
        statistics, malloc, sbrk = library.mallinfo2, library.malloc, library.sbrk
    except (OSError, AttributeError):  # another C library, which has rules of its own
        return
    statistics.restype, malloc.restype, sbrk.restype = _Statistics, ctypes.c_void_p, ctypes.c_void_p
    malloc.argtypes, sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t]
    end = (sbrk(0) or 0) - statistics().keepcost  # where the last free block begins
    for size_bytes in (*_LARGE_HOLES, *_SMALL_HOLES):
        while 0 < (malloc(size_bytes) or 0) < end:
            pass
