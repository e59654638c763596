"""What a disk can say no to, said in one sentence; and the steps that make a file survive a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from omnimodel.errors import OmniError, Reason

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def disk_errors(subject: str) -> Iterator[None]:
    """Turn a full disk into an OmniError with reason DiskFull; other errors pass.

    Args:
        subject: the file or folder that was being written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        limit = {errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "the file would be larger than allowed"}
        raise OmniError(
            subject,
            limit.get(error.errno or 0, "the disk is full"),
            "free space there, or put the state directory on a larger disk",
            reason=Reason.DISK_FULL,
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make a folder and everything under it survive a power cut; links are not followed."""
    for place, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        sync_folder(Path(place))


def write_part(path: Path, content: bytes) -> Path:
    """Write what a file will hold beside it, and onto the disk; renaming the part to `path` then takes no space.

    Raises:
        OmniError: the disk is full; then nothing is left.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with disk_errors(str(path)), open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either there whole or not at all.

    Raises:
        OmniError: the disk is full; then nothing is left.
    """
    part = write_part(path, content)
    try:
        with disk_errors(str(path)):
            os.replace(part, path)
            sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)
