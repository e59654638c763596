"""What the processor of this machine computes in."""

from __future__ import annotations

from pathlib import Path


def computes_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions (avx512_bf16 or amx_bf16).

    Without them bfloat16 is 4 to 6 times slower than float32. Source: measured, docs/memory.md.
    """
    flags = _flags()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def multiplies_tiles() -> bool:
    """Whether the processor has the tiles of AMX."""
    return "amx_int8" in _flags()


def _flags() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
