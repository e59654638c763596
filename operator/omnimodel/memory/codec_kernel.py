"""Decoding of coded blocks on the device: the Triton twin of `codec.decode`.

Importing this imports torch and Triton; only the cuda backend does, when the first coded image is staged. With
TRITON_INTERPRET=1 set before the import it runs on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from omnimodel.memory.codec import TILE, Layout

WARPS = 4


@triton.jit(do_not_specialize=["count", "first_at", "tiles_at", "second_at", "third_at", "second_count", "third_count"])  # type: ignore[untyped-decorator]
def unpack_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    block,  # noqa: ANN001  # uint8: the coded block
    out,  # noqa: ANN001  # int16 or int8: the decoded values
    count,  # noqa: ANN001
    low_at: tl.constexpr,
    first_at,  # noqa: ANN001
    tiles_at,  # noqa: ANN001
    second_at,  # noqa: ANN001
    third_at,  # noqa: ANN001
    second_count,  # noqa: ANN001
    third_count,  # noqa: ANN001
    half: tl.constexpr,
    width: tl.constexpr,
):
    """Decode one tile.

    Positions that a tile's two starting points lead to are held against the counts, so that a damaged block gives
    wrong weights and never a fault of the whole context.
    """
    tile = tl.program_id(0)
    place = tile * width + tl.arange(0, width)
    live = place < count
    if half == 8:
        low = tl.load(block + low_at + place, mask=live, other=0).to(tl.int32)
    else:
        low = tl.load(block + low_at + (place >> 1), mask=live, other=0).to(tl.int32) >> ((place & 1) * 4)
    quad = tl.load(block + first_at + (place >> 2), mask=live, other=0).to(tl.int32)
    first = (quad >> ((place & 3) * 2)) & 3
    escaped = live & (first == 3)
    starts = (block + tiles_at).to(tl.pointer_type(tl.int32)) + tile * 2

    rank = tl.load(starts) + tl.cumsum(escaped.to(tl.int32), 0) - 1
    held = escaped & (rank >= 0) & (rank < second_count)
    bit = rank * 3
    pair = block + second_at + (bit >> 3)
    packed = tl.load(pair, mask=held, other=0).to(tl.int32) | (tl.load(pair + 1, mask=held, other=0).to(tl.int32) << 8)
    second = (packed >> (bit & 7)) & 7
    rest = held & (second == 7)

    rank = tl.load(starts + 1) + tl.cumsum(rest.to(tl.int32), 0) - 1
    plain = tl.load(block + third_at + rank, mask=rest & (rank >= 0) & (rank < third_count), other=0).to(tl.int32)
    entry = tl.where(escaped, 3 + second, first)
    exponent = tl.load(block + entry, mask=live & (entry < 10), other=0).to(tl.int32)
    exponent = tl.where(rest, plain, exponent)
    sign: tl.constexpr = 1 << (half - 1)
    word = ((low & sign) << half) | (exponent << (half - 1)) | (low & (sign - 1))
    tl.store(out + place, word.to(out.dtype.element_ty), mask=live)


class Address:
    """Device memory by its address, as Triton takes an argument.

    Args:
        address: of the first element.
        dtype: of the elements.
    """

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def unpack(block: Any, out: Any, layout: Layout) -> None:
    """Decode a block in torch's current stream.

    Args:
        block: the coded block: a uint8 tensor or `Address`, 16-byte aligned.
        out: where `layout.count` values go: a tensor or `Address`, of int16 for bf16 and int8 for float8_e4m3fn.
        layout: of the block.
    """
    unpack_kernel[(triton.cdiv(layout.count, TILE),)](
        block,
        out,
        layout.count,
        layout.low_at,
        layout.first_at,
        layout.tiles_at,
        layout.second_at,
        layout.third_at,
        layout.second,
        layout.third,
        half=layout.half_bits,
        width=TILE,
        num_warps=WARPS,
    )
