"""Packs a published image: its file is replaced by the packed form, where that is small enough to be worth it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from omnimodel.memory.codec_file import SMALL_BYTES, WORTH_RATIO, expected_ratio, pack
from omnimodel.memory.disk import disk_errors
from omnimodel.memory.image import INDEX_FILE, PACKED_FILE, digest_of, read_index, write_index
from omnimodel.memory.index import Index, Packed


def can_pack(frame_bytes: int) -> bool:
    """Whether images can be packed for frames of that size."""
    return frame_bytes >= SMALL_BYTES and not frame_bytes & (frame_bytes - 1)


def pack_folder(
    folder: Path,
    frame_bytes: int,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Index:
    """Pack the image of a folder that nobody has published yet, for devices with frames of that size.

    Whether it is worth it is decided by what a sample of each tensor says: an image that would hardly get smaller
    stays as it is, and so does each such tensor of one that is packed.

    Args:
        folder: with an image and its index.
        frame_bytes: see `can_pack`.
        threads: how many parts are coded at once; each takes about six frames of memory.
        progress: called with how many bytes of the image are done, of how many.

    Returns:
        The index of what is there now.

    Raises:
        OmniError: the disk is full; then the folder is of no use.
    """
    index = read_index(folder)
    raw, packed = folder / index.stored_file, folder / PACKED_FILE
    if not index.bytes or expected_ratio(str(raw), index.tensors) > WORTH_RATIO:
        return index
    with disk_errors(str(folder)):
        pack(str(raw), index.tensors, frame_bytes, str(packed), threads, progress)
        digests = _digests(packed, index.frame_bytes, lambda: progress(index.bytes, index.bytes))
        stored = Packed(packed.stat().st_size, frame_bytes, digests)
        index = replace(index, packed=stored)
        index = replace(index, digest=digest_of(index))
        os.unlink(folder / INDEX_FILE)
        write_index(folder / INDEX_FILE, index)
        os.unlink(raw)
    return index


def _digests(path: Path, frame_bytes: int, alive: Callable[[], None]) -> tuple[str, ...]:
    digests = []
    with open(path, "rb") as file:
        while part := file.read(frame_bytes):
            digests.append(hashlib.sha256(part).hexdigest())
            alive()
    return tuple(digests)
