"""The packed form of an image: the same bytes in fewer, as a list of blocks that are coded or kept as they are.

A file with the blocks in the image's order, so that one sequential copy brings the first layers first, and at its end
a strict index: what lies where. No block crosses a frame, so that each frame decodes by itself. Which tensors are
coded is decided by the ratio they are measured to reach.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from omnimodel.errors import ImageError
from omnimodel.memory.codec import ALIGN_BYTES, Bytes, Layout, Values, decode, encode, estimate

MAGIC = b"OMNIPACK"
FORMAT = 1
BLOCK_BYTES = 4096  # the body is a multiple long, so that it can be read with O_DIRECT
WORTH_RATIO = 0.95  # a tensor that stays larger than this is kept as it is
SMALL_BYTES = 64 << 10
CODED = {"bfloat16": 2, "float8_e4m3fn": 1}  # torch's names, and the bytes of a value
_INDEX_BYTES = 64 << 20
_TRAILER_BYTES = 16
_IMAGE_BYTES = 1 << 44


class Tensor(Protocol):
    """What packing needs to know about a tensor; `image.TensorEntry` is one."""

    @property
    def dtype(self) -> str:
        """Torch's name."""

    @property
    def offset(self) -> int:
        """Where it lies in the image."""

    @property
    def bytes(self) -> int:
        """Its size."""


@dataclass(frozen=True)
class Block:
    """A part of the image that lies within one frame.

    Args:
        offset, size_bytes: the part.
        stored_at, stored_bytes: where it lies in the body of the packed file.
        layout: how it is coded; None when it is kept as it is.
    """

    offset: int
    size_bytes: int
    stored_at: int
    stored_bytes: int
    layout: Layout | None


@dataclass(frozen=True)
class PackedIndex:
    """What a packed file holds.

    Args:
        image_bytes: of the image that comes out.
        frame_bytes: no block crosses a multiple of it.
        body_bytes: length of the body, with which the file starts; a multiple of 4096.
        blocks: the whole image, in order.
    """

    image_bytes: int
    frame_bytes: int
    body_bytes: int
    blocks: tuple[Block, ...]

    @property
    def ratio(self) -> float:
        """Packed over unpacked bytes."""
        return self.body_bytes / self.image_bytes if self.image_bytes else 1.0

    @property
    def frame_stored_bytes(self) -> int:
        """The most that one frame's blocks take in the body."""
        return max((high - low for low, high, _ in self.frames()), default=0)

    def frames(self) -> list[tuple[int, int, list[Block]]]:
        """Per frame: the range of the body that holds it, and its blocks."""
        grouped: list[list[Block]] = [[] for _ in range(-(-self.image_bytes // self.frame_bytes))]
        for block in self.blocks:
            grouped[block.offset // self.frame_bytes].append(block)
        return [(b[0].stored_at, b[-1].stored_at + b[-1].stored_bytes, b) for b in grouped]


def expected_ratio(image: str, tensors: Sequence[Tensor]) -> float:
    """The ratio that packing an image reaches, by a sample of each tensor; 1 when no tensor is worth coding."""
    source = np.memmap(image, dtype=np.uint8, mode="r")
    saved = sum((1 - ratio) * tensor.bytes for tensor, ratio in _worthy(source, tensors))
    return 1 - saved / source.size


def _worthy(source: Bytes, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, float]]:
    """The tensors that are coded, each because of the ratio that is measured of it."""
    for tensor in tensors:
        item_bytes = CODED.get(tensor.dtype)
        if item_bytes is None or tensor.bytes < SMALL_BYTES or tensor.offset % item_bytes:
            continue
        ratio = estimate(_values(source[tensor.offset : tensor.offset + tensor.bytes], item_bytes))
        if ratio <= WORTH_RATIO:
            yield tensor, ratio


def pack(
    image: str,
    tensors: Sequence[Tensor],
    frame_bytes: int,
    output: str,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> PackedIndex:
    """Write the packed form of an image.

    Args:
        image: path of the image.
        tensors: of the image, in order of their offsets.
        frame_bytes: of the devices that will hold it; a power of two, at least 64 KiB.
        output: path of the file to write; it must not exist.
        threads: how many blocks are coded at once; each takes about six times a frame of memory.
        progress: called with how many bytes of the image are done, of how many.

    Raises:
        OSError: no space.
    """
    source = np.memmap(image, dtype=np.uint8, mode="r")
    cuts = _cuts(source, tensors, frame_bytes)
    blocks: list[Block] = []
    at = 0
    with open(output, "xb") as stream, ThreadPoolExecutor(threads, "pack") as workers:
        for start in range(0, len(cuts), 2 * threads):  # a bounded number of coded blocks waits to be written
            batch = cuts[start : start + 2 * threads]
            coded = workers.map(lambda cut: _coded(source, *cut), batch)
            for (offset, size, _), (stored, layout) in zip(batch, coded, strict=True):
                padded = -(-stored.size // ALIGN_BYTES) * ALIGN_BYTES
                stream.write(stored.data)
                stream.write(bytes(padded - stored.size))
                blocks.append(Block(offset, size, at, padded, layout))
                at += padded
            progress(blocks[-1].offset + blocks[-1].size_bytes, source.size)
        stream.write(bytes(-at % BLOCK_BYTES))
        index = PackedIndex(source.size, frame_bytes, at + -at % BLOCK_BYTES, tuple(blocks))
        stream.write(_trailer(index))
        stream.flush()
        os.fsync(stream.fileno())
    return index


def _cuts(source: Bytes, tensors: Sequence[Tensor], frame_bytes: int) -> list[tuple[int, int, int]]:
    """The image as (offset, bytes, item bytes): each tensor worth it by itself, all between with 0, cut at frames."""
    spans: list[tuple[int, int, int]] = []
    done = 0
    for tensor, _ in _worthy(source, tensors):
        if tensor.offset > done:
            spans.append((done, tensor.offset - done, 0))
        spans.append((tensor.offset, tensor.bytes, CODED[tensor.dtype]))
        done = tensor.offset + tensor.bytes
    if done < source.size:
        spans.append((done, source.size - done, 0))
    return [
        (low, min(offset + size, low - low % step + step) - low, item_bytes)
        for offset, size, item_bytes in spans
        # no more values of fp8 in a block than of bf16: coding takes memory by their number
        for step in [frame_bytes // 2 if item_bytes == 1 else frame_bytes]
        for low in [offset, *range(offset - offset % step + step, offset + size, step)]
    ]


def _coded(source: Bytes, offset: int, size: int, item_bytes: int) -> tuple[Bytes, Layout | None]:
    part = source[offset : offset + size]
    if item_bytes and size >= SMALL_BYTES:
        block, layout = encode(_values(part, item_bytes))
        if block.size < size:
            return block, layout
    return part, None


def _values(part: Bytes, item_bytes: int) -> Values:
    return part.view(np.uint16) if item_bytes == 2 else part


def _trailer(index: PackedIndex) -> bytes:
    body = {
        "format": FORMAT,
        "imageBytes": index.image_bytes,
        "frameBytes": index.frame_bytes,
        "bodyBytes": index.body_bytes,
        "blocks": [
            [b.offset, b.size_bytes, b.stored_at, b.stored_bytes]
            + ([b.layout.count, b.layout.second, b.layout.third] if b.layout else [])
            for b in index.blocks
        ],
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    return text + len(text).to_bytes(8, "little") + MAGIC


def read_index(path: str) -> PackedIndex:
    """Read and check the index of a packed file.

    Raises:
        ImageError: it is no packed file, or its index contradicts itself or the file.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a stranger may have put it there
        with open(os.open(path, flags), "rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, file_bytes - _TRAILER_BYTES))
            tail = stream.read(_TRAILER_BYTES)
            size = int.from_bytes(tail[:8], "little")
            if tail[8:] != MAGIC or size > min(_INDEX_BYTES, file_bytes - _TRAILER_BYTES):
                raise ImageError(path, "is no packed image", "publish the model again")
            stream.seek(file_bytes - _TRAILER_BYTES - size)
            text = stream.read(size)
    except OSError as error:
        raise ImageError(path, f"cannot be read: {error.strerror}") from error
    try:
        index = _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ImageError(path, f"has a damaged index: {error}", "publish the model again") from error
    if file_bytes != index.body_bytes + size + _TRAILER_BYTES:
        raise ImageError(path, "is shorter than its index says", "publish the model again")
    return index


def _parse(body: dict[str, Any]) -> PackedIndex:
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']!r}")
    image_bytes, frame_bytes, body_bytes = (body[key] for key in ("imageBytes", "frameBytes", "bodyBytes"))
    for number in (image_bytes, frame_bytes, body_bytes):
        if type(number) is not int or not 0 <= number <= _IMAGE_BYTES:
            raise ValueError(f"size {number!r}")
    if frame_bytes < SMALL_BYTES or frame_bytes & (frame_bytes - 1):
        raise ValueError(f"frameBytes {frame_bytes}")
    blocks = []
    offset = stored = 0
    for entry in body["blocks"]:
        if len(entry) not in (4, 7) or any(type(n) is not int or not 0 <= n <= _IMAGE_BYTES for n in entry):
            raise ValueError(f"block {entry!r:.80}")
        layout = _layout(entry[1], *entry[4:]) if len(entry) == 7 else None
        block = Block(entry[0], entry[1], entry[2], entry[3], layout)
        if block.offset != offset or block.stored_at != stored or not block.size_bytes:
            raise ValueError(f"block at {block.offset} does not follow the one before it")
        if block.offset // frame_bytes != (block.offset + block.size_bytes - 1) // frame_bytes:
            raise ValueError(f"block at {block.offset} crosses a frame")
        wanted = _stored_bytes(block)
        if wanted != block.stored_bytes:
            raise ValueError(f"block at {block.offset} takes {wanted} bytes, not {block.stored_bytes}")
        offset += block.size_bytes
        stored += block.stored_bytes
        blocks.append(block)
    if offset != image_bytes or not stored <= body_bytes < stored + BLOCK_BYTES:
        raise ValueError("the blocks are not the image")
    index = PackedIndex(image_bytes, frame_bytes, body_bytes, tuple(blocks))
    if index.frame_stored_bytes > frame_bytes + (1 << 20):  # the device's staging buffers are that large
        raise ValueError("a frame takes more bytes than it would unpacked")
    return index


def _layout(size_bytes: int, count: int, second: int, third: int) -> Layout:
    """What a block's counts say: as many values as bytes are float8_e4m3fn, anything else has to be bf16."""
    return Layout(count, second, third, 1 if count == size_bytes else 2)


def _stored_bytes(block: Block) -> int:
    if block.layout is None:
        return -(-block.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    layout = block.layout
    if layout.item_bytes * layout.count != block.size_bytes or not layout.third <= layout.second <= layout.count:
        raise ValueError(f"block at {block.offset} has impossible counts")
    return layout.size_bytes


def unpack(path: str) -> Iterator[tuple[int, Bytes]]:
    """The image of a packed file, block by block, decoded on the CPU: (offset, bytes).

    Raises:
        ImageError: the file is damaged.
    """
    index = read_index(path)
    body = np.memmap(path, dtype=np.uint8, mode="r", shape=(index.body_bytes,))
    for block in index.blocks:
        stored = body[block.stored_at : block.stored_at + block.stored_bytes]
        if block.layout is None:
            yield block.offset, stored[: block.size_bytes]
        else:
            yield block.offset, decode(stored, block.layout).view(np.uint8)
