"""Packed images: what is coded, what comes back, and files that lie."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from memory.codec_values import every, every_fp8, normal, normal_fp8
from omnimodel.errors import ImageError
from omnimodel.memory.codec_file import MAGIC, PackedIndex, pack, read_index, unpack

FRAME = 1 << 20


@dataclass
class Tensor:
    dtype: str
    offset: int
    bytes: int


def image(folder: Path, *parts: tuple[str, np.ndarray]) -> tuple[Path, list[Tensor], bytes]:
    """An image file of these tensors, each at an offset of 64."""
    body, tensors = b"", []
    for dtype, values in parts:
        tensors.append(Tensor(dtype, len(body), values.nbytes))
        body += values.tobytes()
        body += bytes(-len(body) % 64)
    body += bytes(-len(body) % 4096)
    path = folder / "image"
    path.write_bytes(body)
    return path, tensors, body


def packed(folder: Path, *parts: tuple[str, np.ndarray], threads: int = 2) -> tuple[Path, PackedIndex, bytes]:
    path, tensors, body = image(folder, *parts)
    output = folder / "image.packed"
    return output, pack(str(path), tensors, FRAME, str(output), threads), body


def whole(path: Path, size_bytes: int) -> bytes:
    found = bytearray(b"\xee" * size_bytes)
    for offset, part in unpack(str(path)):
        found[offset : offset + part.size] = part.tobytes()
    return bytes(found)


WEIGHTS = ("bfloat16", normal(900_000))
NOISE = ("bfloat16", np.random.default_rng(5).integers(0, 1 << 16, 700_000).astype(np.uint16))
FLOATS = ("float32", np.random.default_rng(6).normal(0, 1, 100_000).astype(np.float32))
SMALL = ("bfloat16", normal(64))
FP8 = ("float8_e4m3fn", normal_fp8(1_800_001))
FP8_NOISE = ("float8_e4m3fn", np.random.default_rng(7).integers(0, 1 << 8, 1_400_001).astype(np.uint8))
EMPTY = ("float8_e4m3fn", normal_fp8(0))
BF16_FILE = "e49677f2cc3494c65d0e4933763be3246e6d7a895396bad3d0850898192df661"  # before there was fp8


@pytest.mark.parametrize(
    ("parts", "ratio"),
    [
        pytest.param([WEIGHTS], (0.65, 0.72), id="one tensor across frames"),
        pytest.param([WEIGHTS, SMALL, WEIGHTS, SMALL, WEIGHTS], (0.65, 0.72), id="norms between matrices"),
        pytest.param([NOISE], (1.0, 1.001), id="noise is kept as it is"),
        pytest.param([FLOATS, SMALL], (1.0, 1.01), id="other types are kept as they are"),
        pytest.param([FLOATS, WEIGHTS, NOISE, WEIGHTS, SMALL], (0.7, 0.9), id="a mixture"),
        pytest.param([("bfloat16", every())], (1.0, 1.1), id="each pattern once"),
        pytest.param([("bfloat16", normal(FRAME // 2))], (0.65, 0.72), id="exactly one frame"),
        pytest.param([FP8], (0.83, 0.87), id="fp8 across frames, an odd number"),
        pytest.param([("float8_e4m3fn", normal_fp8(FRAME))], (0.83, 0.87), id="fp8, exactly one frame"),
        pytest.param([FP8_NOISE], (1.0, 1.001), id="noise of fp8 is kept as it is"),
        pytest.param([("float8_e4m3fn", np.repeat(every_fp8(), 300))], (1.0, 1.1), id="each pattern of fp8 as often"),
        pytest.param([("float8_e4m3fn", np.full(1 << 20, 0x7F, np.uint8))], (0.7, 0.8), id="fp8, all NaN"),
        pytest.param([EMPTY, FP8, EMPTY, SMALL, FLOATS, FP8_NOISE, WEIGHTS, FP8], (0.8, 0.95), id="fp8 and others"),
        pytest.param([("float8_e5m2", normal_fp8(1 << 20))], (1.0, 1.001), id="the other fp8 is kept as it is"),
        pytest.param([("uint8", normal_fp8(1 << 20))], (1.0, 1.001), id="bytes are kept as they are"),
    ],
)
def test_an_image_comes_back_and_takes_what_it_should(tmp_path, parts, ratio):
    path, index, body = packed(tmp_path, *parts)
    assert read_index(str(path)) == index
    assert whole(path, len(body)) == body
    assert ratio[0] <= index.ratio <= ratio[1]
    assert index.body_bytes % 4096 == 0


def test_a_file_of_bf16_is_the_one_that_was_always_written(tmp_path):
    places = np.arange(300_000, dtype=np.uint32)
    values = (0x3C00 + 128 * (places * places % 11) + places % 128).astype(np.uint16)
    values[::97] = places[::97].astype(np.uint16)  # exponents of the third level
    path, index, body = packed(tmp_path, ("bfloat16", values))
    assert 0.75 < index.ratio < 0.85
    assert hashlib.sha256(path.read_bytes()).hexdigest() == BF16_FILE
    assert whole(path, len(body)) == body


def test_a_file_is_the_same_however_many_threads_pack_it(tmp_path):
    files = []
    for threads in (1, 3):
        folder = tmp_path / str(threads)
        folder.mkdir()
        files.append(packed(folder, WEIGHTS, FLOATS, WEIGHTS, threads=threads)[0].read_bytes())
    assert files[0] == files[1]


def test_no_block_crosses_a_frame(tmp_path):
    _, index, _ = packed(tmp_path, SMALL, WEIGHTS, FLOATS, NOISE, WEIGHTS, FP8, FP8_NOISE)
    for low, high, blocks in index.frames():
        assert len({b.offset // FRAME for b in blocks} | {(b.offset + b.size_bytes - 1) // FRAME for b in blocks}) == 1
        assert high - low <= FRAME + (1 << 20)


def test_a_block_of_fp8_has_no_more_values_than_one_of_bf16(tmp_path):
    _, index, _ = packed(tmp_path, WEIGHTS, FP8)
    coded = [block.layout for block in index.blocks if block.layout]
    assert {layout.item_bytes for layout in coded} == {1, 2}
    assert max(layout.count for layout in coded) == FRAME // 2


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    packed(tmp_path, SMALL)
    with pytest.raises(FileExistsError):
        packed(tmp_path, SMALL)


def rewritten(path: Path, change) -> None:
    """The file with another index."""
    content = path.read_bytes()
    size = int.from_bytes(content[-16:-8], "little")
    index = json.loads(content[-16 - size : -16])
    text = change(index)
    text = text if isinstance(text, bytes) else json.dumps(index).encode()
    path.write_bytes(content[: -16 - size] + text + len(text).to_bytes(8, "little") + MAGIC)


def setting(key, value):
    return lambda index: index.__setitem__(key, value)


def block(number, place, value):
    return lambda index: index["blocks"][number].__setitem__(place, value)


def as_the_other_type(index):
    """As many values of fp8 as bytes become half as many of bf16, and the other way round."""
    _, size_bytes, _, _, count, *_ = index["blocks"][0]
    index["blocks"][0][4] = size_bytes // 2 if count == size_bytes else size_bytes


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(setting("format", 2), id="another format"),
        pytest.param(setting("imageBytes", 4096), id="another image"),
        pytest.param(setting("imageBytes", -1), id="negative image"),
        pytest.param(setting("imageBytes", 1.5), id="fractional image"),
        pytest.param(setting("imageBytes", True), id="boolean image"),
        pytest.param(setting("bodyBytes", 1 << 43), id="body longer than the file"),
        pytest.param(setting("frameBytes", 0), id="no frame"),
        pytest.param(setting("frameBytes", 3 << 16), id="frame no power of two"),
        pytest.param(setting("frameBytes", 1 << 16), id="blocks cross the frame"),
        pytest.param(setting("blocks", []), id="no blocks"),
        pytest.param(setting("blocks", {}), id="blocks of another kind"),
        pytest.param(setting("blocks", None), id="blocks missing"),
        pytest.param(lambda index: index["blocks"].pop(), id="one block less"),
        pytest.param(lambda index: index["blocks"].reverse(), id="another order"),
        pytest.param(block(0, 0, 64), id="a gap"),
        pytest.param(block(0, 1, 0), id="an empty block"),
        pytest.param(block(0, 2, 256), id="a gap in the body"),
        pytest.param(block(0, 3, 512), id="stored bytes too few"),
        pytest.param(block(0, 4, 7), id="count of another size"),
        pytest.param(block(0, 4, 0), id="no count"),
        pytest.param(as_the_other_type, id="count of the other type"),
        pytest.param(block(0, 5, 1 << 40), id="more escapes than values"),
        pytest.param(block(0, 6, 1 << 20), id="more third than second"),
        pytest.param(lambda index: index["blocks"][0].append(1), id="a block with too much"),
        pytest.param(lambda _: b"[" * 100_000, id="deep nesting"),
        pytest.param(lambda _: b"\xff\xfe", id="no text"),
        pytest.param(lambda _: b"[]", id="a list"),
        pytest.param(lambda _: b"null", id="nothing"),
    ],
)
@pytest.mark.parametrize("weights", [WEIGHTS, FP8], ids=["bf16", "fp8"])
def test_an_index_that_lies_is_refused(tmp_path, weights, change):
    path, _, _ = packed(tmp_path, weights, FLOATS)
    rewritten(path, change)
    with pytest.raises(ImageError, match=r"image\.packed"):
        read_index(str(path))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(MAGIC, id="only the mark"),
        pytest.param(bytes(4096), id="zeros"),
        pytest.param(b"{}" + (1 << 60).to_bytes(8, "little") + MAGIC, id="an index longer than any file"),
        pytest.param(b"{}" + (2).to_bytes(8, "little") + MAGIC, id="an empty index"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content):
    path = tmp_path / "image.packed"
    path.write_bytes(content)
    with pytest.raises(ImageError):
        read_index(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ImageError, match="nothing-here"):
        read_index(str(tmp_path / "nothing-here"))


def test_a_body_cut_short_is_refused(tmp_path):
    path, _, _ = packed(tmp_path, WEIGHTS)
    path.write_bytes(path.read_bytes()[4096:])
    with pytest.raises(ImageError, match="shorter"):
        read_index(str(path))
