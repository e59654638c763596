"""Reads the log of a model: its last lines, then what comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

_POLL_SECONDS = 0.25
_CHUNK_BYTES = 64 << 10
_TAIL_BYTES = 4 << 20


async def follow_log(path: Path, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
    """The last `tail` lines, then, with `follow`, what is appended, across rotations of the file."""
    content, offset, inode = await asyncio.to_thread(_last_lines, path, tail)
    if content:
        yield content
    while follow:
        await asyncio.sleep(_POLL_SECONDS)
        content, offset, inode = await asyncio.to_thread(_more, path, offset, inode)
        if content:
            yield content


def _last_lines(path: Path, lines: int) -> tuple[bytes, int, int]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return b"", 0, 0
    kept = content.splitlines(keepends=True)[-lines:] if lines > 0 else []
    return b"".join(kept), status.st_size, status.st_ino


def _more(path: Path, offset: int, inode: int) -> tuple[bytes, int, int]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != inode or status.st_size < offset:  # rotated: the new file from its beginning
                offset = 0
            file.seek(offset)
            content = file.read(_CHUNK_BYTES)
    except OSError:
        return b"", offset, inode
    return content, offset + len(content), status.st_ino
