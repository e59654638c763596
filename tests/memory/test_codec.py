"""The lossless codec against every bit pattern, and what it is worth on weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from memory.codec_values import HOSTILE, HOSTILE_FP8, every, every_fp8, normal, normal_fp8, words
from omnimodel.errors import ImageError
from omnimodel.memory.codec import TILE, Layout, decode, encode, estimate


@settings(max_examples=200, deadline=None)
@given(values=words())
def test_every_word_comes_back(values):
    block, layout = encode(values)
    found = decode(block, layout)
    assert layout.size_bytes == block.size
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(every(), id="each pattern once"),
        pytest.param(HOSTILE, id="infinities, NaN payloads, zeros, denormals, limits"),
        pytest.param(np.array([0x7FC1], np.uint16), id="one NaN"),
        pytest.param(np.zeros(3 * TILE + 1, np.uint16), id="all zero"),
        pytest.param(np.full(TILE, 0xFFFF, np.uint16), id="all the same NaN"),
        pytest.param(normal(TILE - 1), id="one less than a tile"),
        pytest.param(normal(TILE + 1), id="one more than a tile"),
        pytest.param(every_fp8(), id="fp8: each pattern once"),
        pytest.param(every_fp8()[::-1], id="fp8: each pattern once, the NaN first"),
        pytest.param(HOSTILE_FP8, id="fp8: NaN, zeros, denormals, limits"),
        pytest.param(np.array([0x7F], np.uint8), id="fp8: one NaN"),
        pytest.param(np.zeros(3 * TILE + 1, np.uint8), id="fp8: all zero"),
        pytest.param(np.full(TILE, 0xFF, np.uint8), id="fp8: all the same NaN"),
        pytest.param(normal_fp8(TILE - 1), id="fp8: one less than a tile"),
        pytest.param(normal_fp8(TILE + 1), id="fp8: one more than a tile"),
    ],
)
def test_hostile_blocks_come_back(values):
    block, layout = encode(values)
    assert np.array_equal(decode(block, layout), values)


@pytest.mark.parametrize("scale", [1e-4, 0.02, 0.0312, 1.0, 30.0])
def test_normal_weights_take_eleven_bits(scale):
    values = normal(1 << 19, scale)
    block, _ = encode(values)
    assert 10.5 < 8 * block.size / values.size < 11.2


@pytest.mark.parametrize("columns", [384, 1024, 14336])
def test_normal_weights_of_fp8_take_seven_bits(columns):
    values = normal_fp8(1 << 19, columns=columns)
    block, _ = encode(values)
    assert 6.5 < 8 * block.size / values.size < 7


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(normal(1 << 18), id="w"),
        pytest.param(every(), id="all"),
        pytest.param(np.zeros(1 << 16, np.uint16), id="zero"),
        pytest.param(normal_fp8(1 << 18), id="fp8: w"),
        pytest.param(np.repeat(every_fp8(), 256), id="fp8: all"),
        pytest.param(np.zeros(1 << 16, np.uint8), id="fp8: zero"),
    ],
)
def test_the_estimate_is_what_coding_reaches(values):
    block, _ = encode(values)
    assert estimate(values) == pytest.approx(block.size / values.nbytes, rel=0.01)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint8])
def test_noise_is_estimated_not_to_be_worth_it(dtype):
    assert estimate(np.frombuffer(np.random.default_rng(1).bytes(1 << 19), dtype)) > 0.95


@pytest.mark.parametrize("weights", [normal, normal_fp8])
@pytest.mark.parametrize("change", [{"second": 1}, {"third": 1}, {"count": 4096}], ids=str)
def test_a_layout_that_is_another_blocks_is_refused(change, weights):
    block, layout = encode(weights(1000))
    wrong = dataclasses.replace(layout, **change)
    with pytest.raises(ImageError):
        decode(block[: wrong.size_bytes], wrong)


@pytest.mark.parametrize("weights", [normal, normal_fp8])
def test_a_block_cut_short_is_refused(weights):
    block, layout = encode(weights(5000))
    with pytest.raises(ImageError, match="bytes"):
        decode(block[:-1], layout)


@pytest.mark.parametrize(("item_bytes", "low"), [(2, 70_001), (1, 35_001)])
def test_parts_of_a_block_do_not_overlap(item_bytes, low):
    layout = Layout(count=70_001, second=20_003, third=77, item_bytes=item_bytes)
    edges = [layout.low_at, layout.first_at, layout.tiles_at, layout.second_at, layout.third_at, layout.size_bytes]
    least = [low, -(-70_001 // 4), 8 * 35, -(-3 * 20_003 // 8) + 1, 77]
    assert all(end - start >= size for start, end, size in zip(edges, edges[1:], least, strict=False))
    assert all(edge % 256 == 0 for edge in edges)
