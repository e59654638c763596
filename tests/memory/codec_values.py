"""Bit patterns that a codec of bf16 must bring back: ordinary weights, and everything that is hostile."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

INFINITIES = [0x7F80, 0xFF80]
NANS = [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC1, 0xFFFF]  # signalling and quiet, with payloads
ZEROS = [0x0000, 0x8000]
DENORMALS = [0x0001, 0x007F, 0x8001, 0x807F]
LIMITS = [0x0080, 0x7F7F, 0xFF7F]
HOSTILE = [*INFINITIES, *NANS, *ZEROS, *DENORMALS, *LIMITS]


def normal(count: int, scale: float = 0.02, seed: int = 0) -> np.ndarray:
    """Weights as a trained matrix has them."""
    values = np.random.default_rng(seed).normal(0, scale, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def every() -> np.ndarray:
    """Each of the 65,536 patterns once."""
    return np.arange(1 << 16, dtype=np.uint16)


@st.composite
def words(draw: st.DrawFn, most: int = 5000) -> np.ndarray:
    """Any words: a mixture of weights, hostile patterns, one value over and over, and noise."""
    count = draw(st.integers(1, most))
    seed = draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["weights", "noise", "constant", "hostile", "mixed", "runs"]))
    if kind == "constant":
        return np.full(count, draw(st.integers(0, 0xFFFF)), np.uint16)
    if kind == "noise":
        return rng.integers(0, 1 << 16, count).astype(np.uint16)
    if kind == "hostile":
        return rng.choice(np.array(HOSTILE, np.uint16), count)
    values = normal(count, seed=seed)
    if kind == "mixed":
        places = rng.random(count) < draw(st.floats(0, 1))
        values[places] = rng.choice(np.array(HOSTILE, np.uint16), int(places.sum()))
    if kind == "runs":  # whole tiles with many escapes beside tiles without any
        values[: count // 2] = 0x3C00
        values[count // 2 :] = rng.integers(0, 1 << 16, count - count // 2).astype(np.uint16)
    return values
