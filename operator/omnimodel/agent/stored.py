"""What an agent keeps on its disk, one thing at a time: an image, a source, an environment."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stored:
    """One thing on the disk.

    Args:
        kind: `image`, `source` or `environment`.
        name: digest or key; unique with `kind`.
        what: what it is, for a person.
        size_bytes: that it takes.
        used_seconds: when it was used last, Unix time.
    """

    kind: str
    name: str
    what: str
    size_bytes: int
    used_seconds: float


def tree_bytes(path: Path) -> int:
    """What a file, or the files below a folder, take on the disk."""
    if path.is_file():
        return path.stat().st_blocks * 512
    size_bytes = 0
    for place, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                size_bytes += os.lstat(os.path.join(place, name)).st_blocks * 512
    return size_bytes


def tree_digest(folder: Path) -> str:
    """SHA-256 over the paths and bytes of all files below a folder.

    Raises:
        ValueError: there is something that is neither file nor folder.
        OSError: it cannot be read.
    """
    found = hashlib.sha256()
    waiting = [folder]
    files = []
    while waiting:
        place = waiting.pop()
        if not stat.S_ISDIR(os.lstat(place).st_mode):
            raise ValueError(f"{place} is no folder")
        for path in place.iterdir():
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                waiting.append(path)
            elif stat.S_ISREG(mode):
                files.append(path)
            else:
                raise ValueError(f"{path} is neither file nor folder")
    for path in sorted(files):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        found.update(json.dumps([path.relative_to(folder).as_posix(), content]).encode())
    return found.hexdigest()


def touch(marker: Path) -> None:
    """Note that what a marker stands for is used now."""
    with suppress(OSError):
        os.utime(marker)


def used_seconds(marker: Path, folder: Path) -> float:
    """When something was used last; what has no marker is a remnant, as old as its folder."""
    for path in (marker, folder):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0
