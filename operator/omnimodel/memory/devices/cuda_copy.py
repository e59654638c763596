"""What a copy of an image into frames is made of, step by step: pure, so that the order can be tested without a GPU.

One step a frame, in the image's order. A step says which pieces of host memory go where, what is decoded, and what is
zeroed; when it is done the fence advances by one. Frames that still hold their part are steps without work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnimodel.errors import LedgerError
from omnimodel.memory.codec_file import Block, PackedIndex
from omnimodel.memory.devices.cuda_arena import BLOCK_BYTES, PAGE_BYTES, Extent, Piece, pieces

_SLACK_BYTES = 1 << 20  # by which a frame may be longer when it is packed; codec_file refuses more


@dataclass(frozen=True)
class Staged:
    """An image in the arena.

    Args:
        path: where it was read from.
        image_bytes: of the image as the model sees it.
        stored_bytes: what it takes here.
        extents: where it lies.
        packed: how it is coded; None when it is not.
        slot_bytes: size of the slots that its parts go through, when it is read while it is copied; 0: all of it is
            here.
    """

    path: str
    image_bytes: int
    stored_bytes: int
    extents: tuple[Extent, ...]
    packed: PackedIndex | None = None
    slot_bytes: int = 0

    @property
    def slots(self) -> int:
        """How many there are; 0 when all of it is here."""
        return self.stored_bytes // self.slot_bytes if self.slot_bytes else 0

    def slot(self, number: int) -> tuple[Extent, ...]:
        """Where a slot lies."""
        found = pieces(self.extents, number * self.slot_bytes, self.slot_bytes)
        return tuple(Extent(piece.address, piece.size_bytes) for piece in found)


@dataclass(frozen=True)
class Part:
    """What must be read before a step can be done.

    Args:
        offset, size_bytes: where it lies in the file; the offset is a multiple of 4096.
        extents: that it is read into.
        arrived: how many frames have arrived when these are free.
    """

    offset: int
    size_bytes: int
    extents: tuple[Extent, ...]
    arrived: int


@dataclass(frozen=True)
class Step:
    """What fills one frame.

    Args:
        frame: its place in the copy.
        pieces: host memory, one after another; copied to the frame's start, or to a staging buffer when there are
            blocks.
        blocks: parts of the frame to decode, or to move, out of the staging buffer; empty when none is coded.
        stored_at: where in the body the staging buffer's contents begin.
        zero_from: bytes of the frame from here on are zeroed.
        part: what the host memory is to hold; None when it does.
        slot: number of the slot that it is in.
    """

    frame: int
    pieces: tuple[Piece, ...]
    blocks: tuple[Block, ...]
    stored_at: int
    zero_from: int
    part: Part | None = None
    slot: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that go over the line."""
        return sum(piece.size_bytes for piece in self.pieces)


def slot_bytes(frame_bytes: int) -> int:
    """Size of a slot: what a frame takes at most, from a multiple of 4096 on, in whole pages."""
    return -(-(frame_bytes + _SLACK_BYTES + BLOCK_BYTES) // PAGE_BYTES) * PAGE_BYTES


def plan(staged: Staged, frame_bytes: int, frames: int, valid: Sequence[bool] = ()) -> list[Step]:
    """The steps of a copy, one for each frame.

    Args:
        staged: the image.
        frame_bytes: of the device.
        frames: how many there are; exactly as many as the image needs.
        valid: per frame, whether it holds its part already; empty: none does.

    Raises:
        LedgerError: there are more frames or fewer than the image needs.
    """
    needed = -(-staged.image_bytes // frame_bytes)
    if frames != needed or len(valid) not in (0, frames):
        raise LedgerError(staged.path, f"needs {needed} frames and was given {frames} (valid: {len(valid)})")
    groups = staged.packed.frames() if staged.packed else []
    steps: list[Step] = []
    read: list[int] = []  # frames that are not here yet
    for frame in range(frames):
        size = min(frame_bytes, staged.image_bytes - frame * frame_bytes)
        if valid and valid[frame]:
            steps.append(Step(frame, (), (), 0, frame_bytes))
            continue
        low, high, blocks = groups[frame] if groups else (frame * frame_bytes, frame * frame_bytes + size, [])
        extents, start, slot, part = staged.extents, 0, 0, None
        if staged.slots:
            slot, start = len(read) % staged.slots, low - low % BLOCK_BYTES
            extents = staged.slot(slot)
            before = read[-staged.slots] + 1 if len(read) >= staged.slots else 0
            part = Part(start, high - start, extents, before)
            read.append(frame)
        if all(block.layout is None for block in blocks):
            # kept as it is: packing only adds padding between blocks, so that each goes to its own place
            found = [p for b in blocks for p in pieces(extents, b.stored_at - start, b.size_bytes)]
            blocks = []
            found = found or pieces(extents, low - start, size)
        else:
            found = pieces(extents, low - start, high - low)
        steps.append(Step(frame, tuple(found), tuple(blocks), low, size, part, slot))
    return steps
