"""The device's decoder in Triton's interpreter, against the NumPy reference; no GPU needed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings

from memory.codec_values import HOSTILE, HOSTILE_FP8, every, every_fp8, normal, normal_fp8, words
from memory.interpreted_kernel import InterpretedKernel
from omnimodel.memory.codec import TABLE_ENTRIES, TILE, decode, encode

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernel():
    kernel = InterpretedKernel()
    yield kernel
    kernel.close()


def decoded(kernel, values: np.ndarray, block: np.ndarray | None = None) -> np.ndarray:
    coded, layout = encode(values)
    out = kernel.unpack(coded if block is None else block, layout)
    assert out.dtype == values.dtype
    assert (~out[values.size :] == 0).all()  # nothing beyond the block is written
    return out[: values.size]


@settings(max_examples=40, deadline=None)
@given(values=words(most=2 * TILE + 100))
def test_every_word_comes_back(kernel, values):
    assert np.array_equal(decoded(kernel, values), values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(every(), id="each pattern once"),
        pytest.param(HOSTILE, id="infinities, NaN payloads, zeros, denormals, limits"),
        pytest.param(np.array([0x7FC1], np.uint16), id="one NaN"),
        pytest.param(np.full(TILE + 1, 0xFFFF, np.uint16), id="all the same NaN"),
        pytest.param(normal(4 * TILE), id="whole tiles"),
        pytest.param(every_fp8(), id="fp8: each pattern once"),
        pytest.param(HOSTILE_FP8, id="fp8: NaN, zeros, denormals, limits"),
        pytest.param(np.array([0x7F], np.uint8), id="fp8: one NaN"),
        pytest.param(np.full(TILE + 1, 0xFF, np.uint8), id="fp8: all the same NaN"),
        pytest.param(normal_fp8(4 * TILE), id="fp8: whole tiles"),
    ],
)
def test_hostile_blocks_come_back(kernel, values):
    assert np.array_equal(decoded(kernel, values), values)


@pytest.mark.parametrize("weights", [normal, normal_fp8])
def test_a_damaged_block_gives_wrong_words_and_touches_nothing_else(kernel, weights):
    values = weights(2 * TILE)
    block, layout = encode(values)
    block[layout.tiles_at : layout.tiles_at + 16] = 0xFF  # starting points far outside
    assert decoded(kernel, values, block).size == values.size


@pytest.mark.parametrize("weights", [normal, normal_fp8])
def test_exponents_that_no_value_has_are_decoded_as_the_reference_does(kernel, weights):
    values = weights(2 * TILE)
    block, layout = encode(values)
    block[:TABLE_ENTRIES] = 0xFF
    assert np.array_equal(decoded(kernel, values, block), decode(block, layout))
