"""The state directory of one machine: who may use it, where its system answers, and the identity of its objects."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from omnimodel.catalog import Identity, Key, identity_keys, read_identities
from omnimodel.errors import OmniError, Reason

LOCK_FILE = "lock"
ADDRESS_FILE = "address"
OBJECTS_FILE = "objects.json"


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader, or a crash, sees the old text or the new one and nothing between."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class StateLock:
    """The right to use a state directory; the kernel gives it back when the process ends, however it ends.

    Args:
        root: the directory; made when it is missing, readable by its owner only.

    Raises:
        OmniError: another system runs on it (`StateDirInUse`), or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o711)
            descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OmniError(
                f"state directory {self.root}",
                f"it cannot be used ({error.strerror})",
                "give one that you may write to with --state-dir or OMNI_STATE_DIR",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise OmniError(
                f"state directory {self.root}",
                f"another `omni up` (pid {owner}) runs on it",
                "stop that one, or give this one its own with --state-dir",
                reason=Reason.STATE_DIR_IN_USE,
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        (self.root / ADDRESS_FILE).unlink(missing_ok=True)  # of a system that was killed
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.root / ADDRESS_FILE).unlink(missing_ok=True)
        os.close(self._descriptor)

    def publish_address(self, address: str) -> None:
        """Let clients on this machine find the system."""
        write_atomically(self.root / ADDRESS_FILE, f"{address}\n")


class IdentityFile:
    """Uids and generations of a folder's objects, kept over restarts.

    Args:
        path: the file they are kept in; a damaged one is begun anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Mapping[Key, Identity] | None = None

    def read(self) -> dict[Key, Identity]:
        """What an earlier run knew."""
        try:
            return read_identities(json.loads(self._path.read_text("utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return {}

    def write(self, identities: Mapping[Key, Identity]) -> None:
        """Keep what this run knows."""
        if identities != self._written:
            write_atomically(self._path, json.dumps(identity_keys(identities), indent=1))
            self._written = dict(identities)
