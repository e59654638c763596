"""Keeps the C library from holding memory that a model no longer uses: its working memory is granted and limited."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # Source: glibc's malloc.h
_MMAP_BYTES = 8 << 20
_TRIM_BYTES = 16 << 20


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
