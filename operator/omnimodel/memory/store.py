"""The store of images on disk: content-addressed, each image once, found by the key of what it was published from.

    images/<digest>/    image or image.packed, index.json, assets/; never changes
    keys/<key>.json     which image a key (what was published, and its dtype) leads to
    staging/<id>/       being written; <id>.lock is held by the publisher while it lives

Any number of processes may publish into one store at the same time. What is under `images` is whole: it gets there by
one rename, after everything in it was checked and written to the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from omnimodel.errors import ImageError, OmniError, Reason
from omnimodel.memory.disk import disk_errors, sync_folder, sync_tree, write_part
from omnimodel.memory.image import INDEX_FILE, Index, hash_assets, read_index
from omnimodel.memory.index import ASSETS_FOLDER, IMAGE_FILE, PACKED_FILE

log = logging.getLogger(__name__)

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_VERIFY_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class ImageRef:
    """A published image.

    Args:
        path: its folder.
        digest: of image, index and assets together.
        bytes: length of the image, however it is stored.
        store: that it is in, when that is not the agent's own (see `published`).
    """

    path: Path
    digest: str
    bytes: int
    index: Index
    store: str = ""

    @property
    def image(self) -> Path:
        """The file that it is stored in."""
        return self.path / self.index.stored_file

    @property
    def stored_bytes(self) -> int:
        """Length of that file, which is less than the image's when it is packed."""
        return self.index.stored_bytes

    @property
    def assets(self) -> Path:
        """The folder of small files."""
        return self.path / ASSETS_FOLDER


@dataclass(frozen=True)
class StoredImage:
    """An image as a thing on the disk.

    Args:
        digest: that it is stored under.
        keys: that lead to it.
        what: whose it was first, for a person.
        size_bytes: that it takes.
        used_seconds: when it was looked up last, Unix time.
    """

    digest: str
    keys: frozenset[str]
    what: str
    size_bytes: int
    used_seconds: float


class Staging:
    """A folder that an image is being written into; gone when the context is left, unless it was committed.

    Args:
        path: the folder.
        lock: descriptor whose file lock says that the publisher lives.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def packed(self) -> bool:
        """Whether what was written is the packed form of an image."""
        return os.path.lexists(self.path / PACKED_FILE)

    def close(self) -> None:
        """Remove what is left of it."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_file(self.path).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock_file(staging: Path) -> Path:
    return staging.with_name(f"{staging.name}.lock")


class Store:
    """Images under one root. Calls block on the disk; they may come from any thread or process.

    Opening a store removes what killed publishers left.

    Args:
        root: made when it is not there.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._images = self.root / "images"
        self._keys = self.root / "keys"
        self._stagings = self.root / "staging"
        with disk_errors(str(self.root)):
            for folder in (self._images, self._keys, self._stagings):
                folder.mkdir(parents=True, exist_ok=True)
        self.sweep()

    def lookup(self, key: str) -> ImageRef | None:
        """The image that a key leads to, or None when it must be published.

        An image whose index or length is wrong is thrown away and counts as not there.
        """
        path = self._key_file(key)
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was used last
        try:
            digest = json.loads(path.read_bytes())["digest"]
            if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError("no digest")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            log.warning("key_discarded key=%s reason=damaged", key)
            path.unlink(missing_ok=True)
            return None
        return self.image(digest)

    def image(self, digest: str) -> ImageRef | None:
        """The image with a digest, or None."""
        folder = self._images / digest
        if not folder.is_dir():
            return None
        try:
            index = read_index(folder)
            if index.digest != digest:
                raise ImageError(str(folder), f"holds the image {index.digest}")
        except ImageError as error:
            log.warning("image_discarded digest=%s reason=%s", digest, error)
            self.discard(digest)
            return None
        return ImageRef(folder, digest, index.bytes, index)

    def images(self) -> list[ImageRef]:
        """Every whole image."""
        found = (self.image(folder.name) for folder in sorted(self._images.iterdir()))
        return [ref for ref in found if ref is not None]

    def staging(self) -> Staging:
        """A fresh folder to write an image into, on the store's own file system.

        Raises:
            OmniError: the disk is full.
        """
        with disk_errors(str(self._stagings)), self._locked(fcntl.LOCK_SH):
            path = self._stagings / secrets.token_hex(8)
            lock = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            path.mkdir(mode=0o700)
            return Staging(path, lock)

    def commit(self, staging: Staging, key: str, what: str = "") -> ImageRef:
        """Check what was written, make it permanent, and let a key lead to it. The writer must have ended.

        Args:
            staging: from `staging`; it is used up.
            key: of what was published.
            what: it is, for a person.

        Raises:
            ImageError: it is not what its index says; nothing of it stays.
            OmniError: the disk is full; nothing of it stays.
        """
        with staging:
            _take_over(staging.path)
            index = read_index(staging.path)
            verify(ImageRef(staging.path, index.digest, index.bytes, index))
            with disk_errors(str(self.root)), self._locked(fcntl.LOCK_SH):
                sync_tree(staging.path)
                part = write_part(self._key_file(key), json.dumps({"digest": index.digest, "what": what}).encode())
                try:
                    self._install(staging.path, index.digest)
                    os.replace(part, self._key_file(key))
                finally:
                    part.unlink(missing_ok=True)
                sync_folder(self._keys)
        folder = self._images / index.digest
        log.info("image_committed key=%s digest=%s bytes=%d", key, index.digest, index.bytes)
        return ImageRef(folder, index.digest, index.bytes, index)

    def _install(self, staged: Path, digest: str) -> None:
        while True:
            try:
                os.rename(staged, self._images / digest)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                if self.image(digest) is not None:  # another publisher was first, with the same bytes
                    return
            else:
                sync_folder(self._images)
                return

    def discard(self, digest: str) -> None:
        """Throw an image away, at once for everyone who looks it up."""
        grave = self._stagings / f"{secrets.token_hex(8)}.gone"
        try:
            os.rename(self._images / digest, grave)
        except FileNotFoundError:
            return
        shutil.rmtree(grave, ignore_errors=True)

    def stored(self) -> list[StoredImage]:
        """Every image with what leads to it, for whoever decides what goes."""
        leads: dict[str, list[Path]] = {}
        for file in self._keys.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                leads.setdefault(str(json.loads(file.read_bytes())["digest"]), []).append(file)
        return [_stored(folder, leads.get(folder.name, [])) for folder in sorted(self._images.iterdir())]

    def remove(self, digest: str, *, kept_keys: Collection[str] = ()) -> int:
        """Remove an image and the keys that lead to it, unless one of these keys does by now.

        Returns:
            Bytes that came free.
        """
        with self._locked(fcntl.LOCK_EX):
            for image in self.stored():
                if image.digest != digest or image.keys & set(kept_keys):
                    continue
                for key in image.keys:
                    self._key_file(key).unlink(missing_ok=True)
                self.discard(digest)
                return image.size_bytes
        return 0

    def sweep(self) -> None:
        """Remove staging folders whose publisher does not live any more, and parts of files."""
        with self._locked(fcntl.LOCK_EX):
            for lock_file in self._stagings.glob("*.lock"):
                try:
                    descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
                except FileNotFoundError:  # its publisher has just ended
                    continue
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                else:
                    shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                    lock_file.unlink(missing_ok=True)
                finally:
                    os.close(descriptor)
            for left in self._stagings.iterdir():
                if left.is_dir() and not _lock_file(left).exists():
                    shutil.rmtree(left, ignore_errors=True)
            for part in self._keys.glob(".*.part"):
                part.unlink(missing_ok=True)

    def _key_file(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise OmniError("image store", f"{key!r} is no key", reason=Reason.INTERNAL)
        return self._keys / f"{key}.json"

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Hold the lock of the whole store: shared while something new comes in, alone while things are removed."""
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)


def _stored(folder: Path, keys: Sequence[Path]) -> StoredImage:
    what, used_seconds, size_bytes = "", 0.0, 0
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        used_seconds = max((path.stat().st_mtime for path in keys), default=folder.stat().st_mtime)
        for path in sorted(keys):
            what = what or str(json.loads(path.read_bytes()).get("what", ""))
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            size_bytes += path.lstat().st_blocks * 512 if path.is_file() else 0
    return StoredImage(folder.name, frozenset(path.stem for path in keys), what, size_bytes, used_seconds)


def verify(ref: ImageRef, *, stop: threading.Event | None = None) -> None:
    """Read every byte of an image and its assets, and compare with the digests of its index.

    Args:
        ref: the image.
        stop: end early, without a verdict, when it is set (verification in the background).

    Raises:
        ImageError: naming the frame or the asset that differs.
    """
    buffer = memoryview(bytearray(_VERIFY_CHUNK_BYTES))
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # nobody waits at a pipe
    with open(os.open(ref.image, flags), "rb", buffering=0) as file:
        for number, expected in enumerate(ref.index.stored_frames):
            left_bytes = min(ref.index.frame_bytes, ref.index.stored_bytes - number * ref.index.frame_bytes)
            digest = hashlib.sha256()
            while left_bytes and not (stop and stop.is_set()):
                read_bytes = file.readinto(buffer[: min(left_bytes, len(buffer))])
                if not read_bytes:
                    raise ImageError(str(ref.image), "is shorter than its index says", "publish the model again")
                digest.update(buffer[:read_bytes])
                left_bytes -= read_bytes
            if stop and stop.is_set():
                return
            if digest.hexdigest() != expected:
                raise ImageError(
                    str(ref.image),
                    f"frame {number} has the digest {digest.hexdigest()}, its index says {expected}",
                    "publish the model again",
                    reason=Reason.DIGEST_MISMATCH,
                )
    actual = {asset.path: asset for asset in hash_assets(ref.assets)}
    listed = {asset.path: asset for asset in ref.index.assets}
    for path in sorted(actual.keys() | listed.keys()):
        if actual.get(path) != listed.get(path):
            raise ImageError(
                str(ref.assets / path),
                "is not what its index says",
                "write assets before the image is closed",
                reason=Reason.DIGEST_MISMATCH,
            )


def _take_over(folder: Path) -> None:
    """Make a folder that a sandboxed publisher wrote the agent's own: plain files, one name each, read-only."""
    image = PACKED_FILE if os.path.lexists(folder / PACKED_FILE) else IMAGE_FILE
    expected = {image, INDEX_FILE, ASSETS_FOLDER}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if place == str(folder) and name not in expected:
                raise ImageError(
                    os.path.join(place, name), f"an image folder holds {', '.join(sorted(expected))} and nothing else"
                )
            _own(os.path.join(place, name))
    _own(str(folder))


def _own(path: str) -> None:
    """By a descriptor, so that nobody can put a link in its place between the look and the change."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO}:
            raise
        raise ImageError(path, "an image holds plain files only, with one name each") from error
    try:
        status = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(status.st_mode)
        if not (is_folder or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)):
            raise ImageError(path, "an image holds plain files only, with one name each")
        if os.geteuid() == 0 and (status.st_uid, status.st_gid) != (0, os.getegid()):
            os.fchown(descriptor, 0, os.getegid())
        os.fchmod(descriptor, 0o755 if is_folder else 0o444)  # weights are no secret of the machine
    finally:
        os.close(descriptor)
