"""The folder of what an agent keeps for the next one: images, environments, sources, footprints.

It is the state directory, or a volume of the pool that outlives pods. One agent has it at a time: its housekeeping
knows what its own models need, and nobody else's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omnimodel.api import OmniPool
from omnimodel.errors import OmniError, Reason
from omnimodel.memory.disk import disk_errors

FOLDER_VARIABLE = "OMNI_STORE_DIR"  # of a pod whose pool has a volume for it
LOCK_FILE = "owner"


def kept_folder(pool: OmniPool, root: Path) -> Path:
    """Where an agent keeps what is worth keeping.

    Args:
        pool: that it serves.
        root: its state directory.
    """
    told = os.environ.get(FOLDER_VARIABLE)
    if told:
        return Path(told)
    store = pool.spec.store
    return Path(store.path) if store is not None and store.path else root


def published_folders(pool: OmniPool) -> dict[str, Path]:
    """Stores that the pool only reads, by name, in the order in which they are looked into."""
    store = pool.spec.store
    return {item.name: Path(item.folder) for item in store.published} if store is not None else {}


@dataclass(frozen=True)
class Room:
    """How full the volume of a folder is."""

    capacity_bytes: int = 0
    free_bytes: int = 0

    @classmethod
    def of(cls, folder: Path) -> Room:
        """Ask the file system; it may take its time."""
        with suppress(OSError):
            usage = shutil.disk_usage(folder)
            return cls(usage.total, usage.free)
        return cls()


class KeptLock:
    """The right to write a folder; the kernel gives it back when the process ends, however it ends.

    Args:
        subject: whose folder it is, for messages.
        folder: made when it is missing.

    Raises:
        OmniError: someone else writes it (`StoreInUse`), or it cannot be written (`StoreUnavailable`, `DiskFull`).
    """

    def __init__(self, subject: str, folder: Path) -> None:
        self.folder = folder
        try:
            with disk_errors(str(folder)):
                folder.mkdir(parents=True, exist_ok=True, mode=0o755)
                self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unavailable(subject, folder, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with disk_errors(str(folder)), tempfile.TemporaryFile(dir=folder):
                pass  # a lock may be had where nothing new can be written
            with suppress(PermissionError):
                folder.chmod(folder.stat().st_mode | 0o111)  # users of models pass through to their images
        except BlockingIOError:
            self.close()
            raise OmniError(
                subject,
                f"its store {folder} is written by another system",
                "give each a folder of its own, or name this one in spec.store.published, which only reads",
                reason=Reason.STORE_IN_USE,
            ) from None
        except OSError as error:
            self.close()
            raise _unavailable(subject, folder, error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give it back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _unavailable(subject: str, folder: Path, error: OSError) -> OmniError:
    return OmniError(
        subject,
        f"its store {folder} cannot be written ({error.strerror})",
        "give it a volume that this agent may write to; one that is only to be read belongs in spec.store.published",
        reason=Reason.STORE_UNAVAILABLE,
    )
