"""Reads the log of a model: its last lines, then what comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from omnimodel.agent.output import rotated

_POLL_SECONDS = 0.25
_CHUNK_BYTES = 256 << 10
_TAIL_BYTES = 4 << 20


async def follow_log(path: Path, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
    """The last `tail` lines, then, with `follow`, what is appended, across rotations of the file."""
    content, offset, inode = await asyncio.to_thread(_last_lines, path, tail)
    if content:
        yield content
    while follow:
        content, offset, inode = await asyncio.to_thread(_more, path, offset, inode)
        if content:
            yield content
        else:
            await asyncio.sleep(_POLL_SECONDS)


def _last_lines(path: Path, lines: int) -> tuple[bytes, int, int]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - _TAIL_BYTES))
            content = file.read()
            end = file.tell()
    except OSError:
        return b"", 0, 0
    kept = content.splitlines(keepends=True)[-lines:] if lines > 0 else []
    return b"".join(kept), end, status.st_ino


def _more(path: Path, offset: int, inode: int) -> tuple[bytes, int, int]:
    """What comes after `offset` of the file `inode`, which may have become the older one meanwhile: that one first."""
    for place in (path, rotated(path)):
        content, found, size_bytes = _read(place, offset, inode)
        if found == inode and content:
            return content, offset + len(content), inode
        if found == inode and place == path:
            return b"", min(offset, size_bytes), inode  # nothing new, or cut off
    content, found, _ = _read(path, 0, None)
    return content, len(content), found


def _read(path: Path, offset: int, inode: int | None) -> tuple[bytes, int, int]:
    """A chunk of a file if it is the one, its inode and its size; 0 for a file that is not there."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if inode is not None and status.st_ino != inode:
                return b"", status.st_ino, status.st_size
            file.seek(offset)
            return file.read(_CHUNK_BYTES), status.st_ino, status.st_size
    except OSError:
        return b"", 0, 0
