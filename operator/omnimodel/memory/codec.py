"""Lossless coding of weights: fewer bytes over the line, on disk and in the arena; decoded on the device.

A trained tensor's exponents are far from uniform: three values make up three quarters of them. So each value is cut
in two halves: its sign and mantissa (kept as they are) and its exponent, which is coded in three levels: 2 bits for
the three most frequent exponents, 3 more bits for the next seven, and a plain byte for the rest. About 10.8 bits a
weight for normally distributed bf16 and 6.8 for float8_e4m3fn that is scaled row by row; every bit pattern comes
back, NaN payloads included.

A tile of `TILE` values starts at known positions in the second and third level, so that tiles decode independently.
This module is the format and its NumPy reference; `codec_kernel` decodes on the device and is tested against it.

Source: the idea of leaving the mantissa alone and coding the exponent is DFloat11's (arXiv:2504.11651), and ECF8's for
fp8 (arXiv:2510.02676); the levels of fixed width in place of their entropy codes are for decoding at the speed of the
line with a few percent of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnimodel.errors import ImageError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Values = Words | Bytes  # bf16 | float8_e4m3fn, by their bits

TILE = 2048
ALIGN_BYTES = 256
TABLE_ENTRIES = 10
SAMPLE = 1 << 20
FIRST_ENTRIES = 3
SECOND_ENTRIES = TABLE_ENTRIES - FIRST_ENTRIES
FIRST_ESCAPE = FIRST_ENTRIES
SECOND_ESCAPE = SECOND_ENTRIES


@dataclass(frozen=True)
class Layout:
    """Where the parts of one coded block lie, in bytes from its start; the table of exponents comes first.

    Args:
        count: values in the block.
        second: of them, how many have an entry in the second level.
        third: of those, how many have one in the third.
        item_bytes: of a value: 2 for bf16, 1 for float8_e4m3fn.
    """

    count: int
    second: int
    third: int
    item_bytes: int = 2

    @property
    def half_bits(self) -> int:
        """Bits of a value's sign and mantissa; its exponent has as many."""
        return 4 * self.item_bytes

    @property
    def low_at(self) -> int:
        """Sign and mantissa: one byte a value, or one for two values, the first one in its lower bits."""
        return ALIGN_BYTES

    @property
    def first_at(self) -> int:
        """First level, 2 bits a value."""
        return self.low_at + _aligned(-(-self.count * self.half_bits // 8))

    @property
    def tiles_at(self) -> int:
        """Two little-endian uint32 a tile: its first entry in the second level, and in the third."""
        return self.first_at + _aligned(-(-self.count // 4))

    @property
    def second_at(self) -> int:
        """Second level, 3 bits an entry; followed by a byte that a reader of pairs of bytes may touch."""
        return self.tiles_at + _aligned(8 * -(-self.count // TILE))

    @property
    def third_at(self) -> int:
        """Third level, the exponent itself."""
        return self.second_at + _aligned(3 * -(-self.second // 8) + 1)

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.third_at + _aligned(self.third)


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def exponents(values: Values) -> Bytes:
    """The exponent of each value."""
    found: Bytes = (values >> (4 * values.itemsize - 1)).astype(np.uint8)
    if values.itemsize == 1:
        found &= 0xF  # without the sign
    return found


def histogram(values: Values) -> npt.NDArray[np.int64]:
    """How often each of 256 exponents occurs, in a sample of about a million values at equal distances."""
    return np.bincount(exponents(values[:: 1 + values.size // SAMPLE]), minlength=256)


def estimate(values: Values) -> float:
    """The ratio that coding these values reaches, by their histogram."""
    ordered = np.sort(histogram(values))[::-1]
    count, second, third = (int(ordered[start:].sum()) for start in (0, FIRST_ENTRIES, TABLE_ENTRIES))
    return Layout(count, second, third, values.itemsize).size_bytes / (values.itemsize * count)


def encode(values: Values) -> tuple[Bytes, Layout]:
    """Code one block.

    Args:
        values: bf16 as 16-bit words or float8_e4m3fn as bytes, any of them, at least one.

    Returns:
        The coded block, and its layout, which decoding needs.
    """
    exponent = exponents(values)
    table = np.argsort(-histogram(values), kind="stable")[:TABLE_ENTRIES].astype(np.uint8)
    first = _codes(exponent, table[:FIRST_ENTRIES])
    escaped = first == FIRST_ESCAPE
    entries = exponent[escaped]
    second = _codes(entries, table[FIRST_ENTRIES:])
    rest = second == SECOND_ESCAPE
    third = entries[rest]
    layout = Layout(values.size, entries.size, third.size, values.itemsize)

    block = np.zeros(layout.size_bytes, np.uint8)
    block[:TABLE_ENTRIES] = table
    sign = 1 << (layout.half_bits - 1)
    low = (values >> layout.half_bits).astype(np.uint8)
    low &= sign
    low |= (values & (sign - 1)).astype(np.uint8)
    if layout.half_bits == 4:
        pairs = _grid(low, 2)
        low = pairs[:, 0] | pairs[:, 1] << np.uint8(4)
    block[layout.low_at : layout.low_at + low.size] = low
    quads = _grid(first, 4)
    block[layout.first_at : layout.first_at + len(quads)] = (
        quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    )
    # of each tile, how many entries come before it; the third level's count by the second level's positions
    escapes = np.count_nonzero(_grid(escaped, TILE), axis=1)
    starts = np.zeros((len(escapes), 2), np.uint32)
    starts[:, 0] = np.cumsum(escapes) - escapes
    before = np.concatenate([[0], np.cumsum(rest, dtype=np.int64)])
    starts[:, 1] = before[starts[:, 0]]
    block[layout.tiles_at : layout.tiles_at + starts.nbytes] = starts.reshape(-1).view(np.uint8)
    octets = _grid(second, 8).astype(np.uint32)
    packed = np.zeros(len(octets), np.uint32)
    for place in range(8):
        packed |= octets[:, place] << np.uint32(3 * place)
    triples = packed.view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)
    block[layout.second_at : layout.second_at + triples.size] = triples
    block[layout.third_at : layout.third_at + third.size] = third
    return block, layout


def decode(block: Bytes, layout: Layout) -> Values:
    """Decode one block: the reference that the device's kernel is held against.

    Raises:
        ImageError: the block is shorter than its layout says, or disagrees with itself.
    """
    if block.size < layout.size_bytes:
        raise ImageError("coded block", f"{block.size} bytes are there and {layout.size_bytes} are needed")
    table = block[:TABLE_ENTRIES]
    low = block[layout.low_at : layout.low_at + -(-layout.count * layout.half_bits // 8)]
    if layout.half_bits == 4:
        low = ((low[:, None] >> np.array([0, 4], np.uint8)) & np.uint8(0xF)).reshape(-1)[: layout.count]
    quads = block[layout.first_at : layout.first_at + -(-layout.count // 4)]
    first = ((quads[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3).reshape(-1)[: layout.count]
    escaped = first == FIRST_ESCAPE
    if int(np.count_nonzero(escaped)) != layout.second:
        raise ImageError("coded block", "its first level disagrees with its layout", "publish the model again")
    triples = block[layout.second_at : layout.second_at + 3 * -(-layout.second // 8)].reshape(-1, 3).astype(np.uint32)
    packed = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    places = np.arange(0, 24, 3, dtype=np.uint32)
    second = ((packed[:, None] >> places) & 7).astype(np.uint8).reshape(-1)[: layout.second]
    rest = second == SECOND_ESCAPE
    if int(np.count_nonzero(rest)) != layout.third:
        raise ImageError("coded block", "its second level disagrees with its layout", "publish the model again")
    entries = table[np.minimum(FIRST_ENTRIES + second, TABLE_ENTRIES - 1)]
    entries[rest] = block[layout.third_at : layout.third_at + layout.third]
    exponent = table[first]
    exponent[escaped] = entries
    sign, wide = 1 << (layout.half_bits - 1), low.astype(np.uint16)
    words: Words = (
        (wide & sign) << layout.half_bits | exponent.astype(np.uint16) << (layout.half_bits - 1) | wide & (sign - 1)
    )
    return words if layout.item_bytes == 2 else words.astype(np.uint8)


def _codes(exponent: Bytes, table: Bytes) -> Bytes:
    """Each exponent's place in the table, the table's length where it has none.

    Comparisons run in vector units; looking the codes up would widen every byte to an index of eight.
    """
    codes = np.full(exponent.size, table.size, np.uint8)
    for place, entry in enumerate(table):
        codes -= (exponent == entry).view(np.uint8) * np.uint8(table.size - place)
    return codes


def _grid(values: npt.NDArray[np.uint8] | npt.NDArray[np.bool_], width: int) -> npt.NDArray[np.uint8]:
    """The values as rows of so many, the last one filled with zeros."""
    rows = -(-values.size // width)
    if rows * width == values.size:
        return values.view(np.uint8).reshape(rows, width)
    grid = np.zeros(rows * width, np.uint8)
    grid[: values.size] = values
    return grid.reshape(rows, width)
