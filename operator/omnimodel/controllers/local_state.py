"""The state directory of one machine: who may use it, where its system answers, and the identity of its objects."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

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


@dataclass(frozen=True)
class Identity:
    """What an API server would have given an object.

    Args:
        uid: stays while the object exists; a re-created one has another.
        generation: grows by one with each change of its spec.
        created_seconds: Unix time; the oldest object keeps a name that two of them want.
        spec_hash: of the spec this generation stands for.
    """

    uid: str
    generation: int
    created_seconds: float
    spec_hash: str


class Identities:
    """Uids and generations of the objects of a folder, kept over restarts.

    Args:
        path: the file they are kept in; a damaged one is begun anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Identity] = {}
        try:
            self._known = {key: Identity(**value) for key, value in json.loads(path.read_text("utf-8")).items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            self._known = {}

    def identify(self, key: str, spec: object, now_seconds: float) -> Identity:
        """The identity of an object as it stands now.

        Args:
            key: `OmniModel default/smollm2`.
            spec: its spec as JSON values; a difference makes a new generation.
            now_seconds: Unix time.
        """
        text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
        spec_hash = hashlib.sha256(text.encode()).hexdigest()
        known = self._known.get(key)
        if known is None:
            known = Identity(str(uuid.uuid4()), 1, now_seconds, spec_hash)
        elif known.spec_hash != spec_hash:
            known = Identity(known.uid, known.generation + 1, known.created_seconds, spec_hash)
        self._known[key] = known
        return known

    def keep_only(self, keys: Collection[str]) -> None:
        """Forget the objects that are gone, and write the rest down."""
        before = dict(self._known)
        self._known = {key: value for key, value in before.items() if key in keys}
        text = json.dumps({key: asdict(value) for key, value in self._known.items()}, indent=1)
        try:
            if self._path.read_text("utf-8") == text:
                return
        except (FileNotFoundError, ValueError):
            pass
        write_atomically(self._path, text)
