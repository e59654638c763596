"""Stores that others filled, on volumes that are only read: images are looked up there, and nothing is changed.

Who wrote such a folder is not trusted: what is looked up is plain files, with nothing that its index does not list.
Whether every byte is as listed, `verify` says, as for images of one's own.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from omnimodel.errors import ImageError
from omnimodel.memory.image import ASSETS_FOLDER, INDEX_FILE, Index, read_index
from omnimodel.memory.store import ImageRef

_KEY_BYTES = 64 << 10
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class PublishedImages:
    """The images under one root, laid out as `store.Store` does. Calls block on the disk.

    Args:
        name: of the store, for people.
        root: need not be there.
    """

    name: str
    root: Path

    def lookup(self, key: str) -> ImageRef | None:
        """The image that a key leads to, not verified yet; None when there is none.

        Raises:
            ImageError: what is there is damaged, hostile, or closed to the users that models are.
        """
        file = self.root / "keys" / f"{key}.json"
        try:
            digest = json.loads(read_plain(file, _KEY_BYTES))["digest"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ImageError(str(file), "is no key of a store", "publish the model there again") from error
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ImageError(str(file), "leads to no digest", "publish the model there again")
        folder = self.root / "images" / digest
        index = read_index(folder)
        if index.digest != digest:
            raise ImageError(str(folder), f"holds the image {index.digest}", "publish the model there again")
        try:
            _check_plain(folder, index)
        except OSError as error:
            raise ImageError(
                str(folder), f"cannot be read: {error.strerror}", "publish the model there again"
            ) from error
        return ImageRef(folder, digest, index.bytes, index, self.name)


def read_plain(path: Path, limit_bytes: int) -> bytes:
    """Read a small file that a stranger may have put there: no link, no pipe, no device.

    Raises:
        OSError: it is not there.
        ValueError: it is no plain file, or longer than that.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no plain file")
        text = file.read(limit_bytes + 1)
    if len(text) > limit_bytes:
        raise ValueError(f"more than {limit_bytes} bytes")
    return text


def _check_plain(folder: Path, index: Index) -> None:
    """Raise unless a folder holds what its index lists, in plain files and folders that everybody may read."""
    wanted: dict[str, int | None] = {index.stored_file: index.stored_bytes, INDEX_FILE: None}
    wanted |= {f"{ASSETS_FOLDER}/{asset.path}": asset.bytes for asset in index.assets}
    folders = {"", ASSETS_FOLDER, *(str(parent) for name in wanted for parent in Path(name).parents)} - {"."}
    waiting = [""]
    while waiting:
        place = waiting.pop()
        status = os.lstat(folder / place)
        if not stat.S_ISDIR(status.st_mode):
            raise ImageError(str(folder / place), "is no folder", "publish the model there again")
        _check_open(folder / place, status.st_mode, 0o005)
        with os.scandir(folder / place) as entries:
            for entry in entries:
                name = f"{place}/{entry.name}".lstrip("/")
                if name in folders:
                    waiting.append(name)
                    continue
                status = entry.stat(follow_symlinks=False)
                if name not in wanted or not stat.S_ISREG(status.st_mode):
                    raise ImageError(
                        str(folder / name), "is none of the image's files", "publish the model there again"
                    )
                if wanted[name] not in {None, status.st_size}:
                    raise ImageError(
                        str(folder / name),
                        f"has {status.st_size} bytes, its index says {wanted[name]}",
                        "publish the model there again",
                    )
                _check_open(folder / name, status.st_mode, 0o004)


def _check_open(path: Path, mode: int, wanted: int) -> None:
    if mode & wanted != wanted:
        raise ImageError(
            str(path), "cannot be read by the model, whose process has a user of its own", "run chmod -R o+rX there"
        )
