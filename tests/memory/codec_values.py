"""Bit patterns that a codec must bring back: ordinary weights, and everything that is hostile; of bf16 and of fp8."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

INFINITIES = [0x7F80, 0xFF80]
NANS = [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC1, 0xFFFF]  # signalling and quiet, with payloads
ZEROS = [0x0000, 0x8000]
DENORMALS = [0x0001, 0x007F, 0x8001, 0x807F]
LIMITS = [0x0080, 0x7F7F, 0xFF7F]
HOSTILE = np.array([*INFINITIES, *NANS, *ZEROS, *DENORMALS, *LIMITS], np.uint16)
# of float8_e4m3fn: its two NaNs (it has no infinity), zeros, denormals, the least normal value and the greatest ones
HOSTILE_FP8 = np.array([0x7F, 0xFF, 0x00, 0x80, 0x01, 0x07, 0x81, 0x87, 0x08, 0x7E, 0xFE], np.uint8)


def normal(count: int, scale: float = 0.02, seed: int = 0) -> np.ndarray:
    """Weights as a trained matrix has them."""
    values = np.random.default_rng(seed).normal(0, scale, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def normal_fp8(count: int, seed: int = 0, columns: int = 1024) -> np.ndarray:
    """The same in float8_e4m3fn: each row by itself scaled to the greatest value that it can have."""
    values = np.random.default_rng(seed).normal(0, 1, (-(-count // columns), columns)).astype(np.float32)
    scaled = torch.from_numpy(values * (448 / np.abs(values).max(axis=1, keepdims=True)))
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(-1)[:count]


def every() -> np.ndarray:
    """Each of the 65,536 patterns once."""
    return np.arange(1 << 16, dtype=np.uint16)


def every_fp8() -> np.ndarray:
    """Each of the 256 patterns once."""
    return np.arange(1 << 8, dtype=np.uint8)


@st.composite
def words(draw: st.DrawFn, most: int = 5000) -> np.ndarray:
    """Any words, of bf16 or fp8: a mixture of weights, hostile patterns, one value over and over, and noise."""
    hostile, weights = draw(st.sampled_from([(HOSTILE, normal), (HOSTILE_FP8, normal_fp8)]))
    patterns = 1 << 8 * hostile.itemsize
    count = draw(st.integers(1, most))
    seed = draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["weights", "noise", "constant", "hostile", "mixed", "runs"]))
    if kind == "constant":
        return np.full(count, draw(st.integers(0, patterns - 1)), hostile.dtype)
    if kind == "noise":
        return rng.integers(0, patterns, count).astype(hostile.dtype)
    if kind == "hostile":
        return rng.choice(hostile, count)
    values = weights(count, seed=seed)
    if kind == "mixed":
        places = rng.random(count) < draw(st.floats(0, 1))
        values[places] = rng.choice(hostile, int(places.sum()))
    if kind == "runs":  # whole tiles with many escapes beside tiles without any
        values[: count // 2] = patterns // 4
        values[count // 2 :] = rng.integers(0, patterns, count - count // 2).astype(hostile.dtype)
    return values
