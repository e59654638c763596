"""The device's decoder in Triton's interpreter, against the NumPy reference; no GPU needed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings

from memory.codec_values import HOSTILE, every, normal, words
from memory.interpreted_kernel import InterpretedKernel
from omnimodel.memory.codec import TILE, encode

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernel():
    kernel = InterpretedKernel()
    yield kernel
    kernel.close()


def decoded(kernel, values: np.ndarray, block: np.ndarray | None = None) -> np.ndarray:
    coded, layout = encode(values)
    out = kernel.unpack(coded if block is None else block, layout)
    assert (out[values.size :] == 0xFFFF).all()  # nothing beyond the block is written
    return out[: values.size]


@settings(max_examples=40, deadline=None)
@given(values=words(most=2 * TILE + 100))
def test_every_word_comes_back(kernel, values):
    assert np.array_equal(decoded(kernel, values), values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(every(), id="each pattern once"),
        pytest.param(np.array(HOSTILE, np.uint16), id="infinities, NaN payloads, zeros, denormals, limits"),
        pytest.param(np.array([0x7FC1], np.uint16), id="one NaN"),
        pytest.param(np.full(TILE + 1, 0xFFFF, np.uint16), id="all the same NaN"),
        pytest.param(normal(4 * TILE), id="whole tiles"),
    ],
)
def test_hostile_blocks_come_back(kernel, values):
    assert np.array_equal(decoded(kernel, values), values)


def test_a_damaged_block_gives_wrong_words_and_touches_nothing_else(kernel):
    values = normal(2 * TILE)
    block, layout = encode(values)
    block[layout.tiles_at : layout.tiles_at + 16] = 0xFF  # starting points far outside
    assert decoded(kernel, values, block).size == values.size
