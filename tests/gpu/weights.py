"""Weights to pack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Tensor:
    """What packing needs to know."""

    dtype: str
    offset: int
    bytes: int


def weights(size_bytes: int, seed: int) -> bytes:
    """Normally distributed bf16."""
    values = np.random.default_rng(seed).normal(0, 0.02, size_bytes // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
