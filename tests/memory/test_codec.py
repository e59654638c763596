"""The lossless codec against every bit pattern, and what it is worth on weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from memory.codec_values import HOSTILE, every, normal, words
from omnimodel.errors import ImageError
from omnimodel.memory.codec import TILE, Layout, decode, encode, estimate


@settings(max_examples=200, deadline=None)
@given(values=words())
def test_every_word_comes_back(values):
    block, layout = encode(values)
    assert layout.size_bytes == block.size
    assert np.array_equal(decode(block, layout), values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(every(), id="each pattern once"),
        pytest.param(np.array(HOSTILE, np.uint16), id="infinities, NaN payloads, zeros, denormals, limits"),
        pytest.param(np.array([0x7FC1], np.uint16), id="one NaN"),
        pytest.param(np.zeros(3 * TILE + 1, np.uint16), id="all zero"),
        pytest.param(np.full(TILE, 0xFFFF, np.uint16), id="all the same NaN"),
        pytest.param(normal(TILE - 1), id="one less than a tile"),
        pytest.param(normal(TILE + 1), id="one more than a tile"),
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


@pytest.mark.parametrize("values", [normal(1 << 18), every(), np.zeros(1 << 16, np.uint16)], ids=["w", "all", "zero"])
def test_the_estimate_is_what_coding_reaches(values):
    block, _ = encode(values)
    assert estimate(values) == pytest.approx(block.size / (2 * values.size), rel=0.01)


def test_noise_is_estimated_not_to_be_worth_it():
    assert estimate(np.random.default_rng(1).integers(0, 1 << 16, 1 << 18).astype(np.uint16)) > 0.95


@pytest.mark.parametrize("change", [{"second": 1}, {"third": 1}, {"count": 4096}], ids=str)
def test_a_layout_that_is_another_blocks_is_refused(change):
    block, layout = encode(normal(1000))
    wrong = dataclasses.replace(layout, **change)
    with pytest.raises(ImageError):
        decode(block[: wrong.size_bytes], wrong)


def test_a_block_cut_short_is_refused():
    block, layout = encode(normal(5000))
    with pytest.raises(ImageError, match="bytes"):
        decode(block[:-1], layout)


def test_parts_of_a_block_do_not_overlap():
    layout = Layout(count=70_001, second=20_003, third=77)
    edges = [layout.low_at, layout.first_at, layout.tiles_at, layout.second_at, layout.third_at, layout.size_bytes]
    least = [70_001, -(-70_001 // 4), 8 * 35, -(-3 * 20_003 // 8) + 1, 77]
    assert all(end - start >= size for start, end, size in zip(edges, edges[1:], least, strict=False))
    assert all(edge % 256 == 0 for edge in edges)
