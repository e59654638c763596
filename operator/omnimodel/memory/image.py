"""The image of a model's weights: one packed file, a strict index, and the small files that go with them.

A folder with `image` (every tensor once, at aligned offsets, in the order the module uses them), `index.json` (what
lies where, and a SHA-256 per frame) and `assets/` (tokenizers, configurations). It never changes once it is
published. In place of `image` there may be `image.packed`: the same bytes in fewer (`packing`).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from omnimodel.errors import ImageError
from omnimodel.memory.disk import disk_errors
from omnimodel.memory.index import (
    ASSETS_FOLDER,
    FRAME_BYTES,
    IMAGE_ALIGNMENT_BYTES,
    IMAGE_FILE,
    ITEM_BYTES,
    PACKED_FILE,
    TENSOR_ALIGNMENT_BYTES,
    Asset,
    Index,
    TensorEntry,
    check_tensor,
    digest_of,
    padded_bytes,
    parse_index,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ASSETS_FOLDER",
    "IMAGE_FILE",
    "INDEX_FILE",
    "ITEM_BYTES",
    "PACKED_FILE",
    "Asset",
    "ImageWriter",
    "Index",
    "TensorEntry",
    "digest_of",
    "hash_assets",
    "parse_index",
    "read_index",
    "write_index",
]

INDEX_FILE = "index.json"

_INDEX_BYTES = 64 << 20
_HASH_CHUNK_BYTES = 4 << 20


class ImageWriter:
    """Writes an image, tensor by tensor, into an empty folder; hashes on the way.

    Small files go into `assets` (made here) before `close`. Leaving the context without an error closes.

    Args:
        folder: where `image`, `index.json` and `assets/` are made.
        frame_bytes: bytes that one digest covers.
        dtype: recorded in the index.
        metadata: recorded in the index; JSON.
    """

    def __init__(
        self, folder: Path | str, frame_bytes: int, *, dtype: str = "", metadata: dict[str, Any] | None = None
    ) -> None:
        if frame_bytes not in FRAME_BYTES:
            raise ImageError(str(folder), f"frames of {frame_bytes} bytes are no whole number of pages")
        self.folder = Path(folder)
        self.assets = self.folder / ASSETS_FOLDER
        self.frame_bytes = frame_bytes
        self.dtype = dtype
        self.metadata = dict(metadata or {})
        self._tensors: list[TensorEntry] = []
        self._names: set[str] = set()
        self._position_bytes = 0
        self._frames: list[str] = []
        self._hash = hashlib.sha256()
        self._in_frame_bytes = 0
        with disk_errors(str(self.folder)):
            self.assets.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.folder / IMAGE_FILE, "xb", buffering=0)  # noqa: SIM115

    def add(self, names: Sequence[str] | str, dtype: str, shape: Sequence[int], buffer: Buffer) -> None:
        """Append a tensor.

        Args:
            names: every name that the module has for it.
            dtype: torch's name.
            shape: sizes of its dimensions.
            buffer: its bytes, contiguous, row-major.

        Raises:
            ImageError: the buffer does not fit dtype and shape, or a name comes twice.
            OmniError: the disk is full.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        view = memoryview(buffer)
        content = view.cast("B") if view.nbytes else memoryview(b"")
        offset_bytes = padded_bytes(self._position_bytes, TENSOR_ALIGNMENT_BYTES)
        entry = TensorEntry(names, dtype, tuple(shape), offset_bytes, len(content))
        check_tensor(str(self.folder), entry)
        if taken := self._names.intersection(names):
            raise ImageError(str(self.folder), f"tensor {min(taken)!r} was added twice")
        self._write(bytes(offset_bytes - self._position_bytes))
        self._write(content)
        self._names.update(names)
        self._tensors.append(entry)

    def close(self) -> Index:
        """Pad the image, hash the assets, and write the index.

        Raises:
            OmniError: the disk is full.
        """
        self._write(bytes(padded_bytes(self._position_bytes, IMAGE_ALIGNMENT_BYTES) - self._position_bytes))
        if self._in_frame_bytes:
            self._end_frame()
        with disk_errors(str(self.folder)):
            os.fsync(self._file.fileno())
            self._file.close()
            index = Index(
                digest="",
                bytes=self._position_bytes,
                frame_bytes=self.frame_bytes,
                dtype=self.dtype,
                tensors=tuple(self._tensors),
                frames=tuple(self._frames),
                assets=hash_assets(self.assets),
                metadata=self.metadata,
            )
            index = Index(**{**vars(index), "digest": digest_of(index)})
            write_index(self.folder / INDEX_FILE, index)
        return index

    def abort(self) -> None:
        """Close the file without an index: what is there is no image."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file.closed:
            return
        if kind is None:
            self.close()
        else:
            self.abort()

    def _write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            part = left[: min(len(left), self.frame_bytes - self._in_frame_bytes, _HASH_CHUNK_BYTES)]
            with disk_errors(str(self.folder)):
                written = self._file.write(part)
            self._hash.update(part[:written])
            self._position_bytes += written
            self._in_frame_bytes += written
            if self._in_frame_bytes == self.frame_bytes:
                self._end_frame()
            left = left[written:]

    def _end_frame(self) -> None:
        self._frames.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()
        self._in_frame_bytes = 0


def write_index(path: Path, index: Index) -> None:
    """Write an index to a file that is not there yet."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(index.to_json(), file, separators=(",", ":"), allow_nan=False)


def hash_assets(folder: Path) -> tuple[Asset, ...]:
    """Every file under `folder`, hashed, in the order of their paths.

    Raises:
        ImageError: there is something that is neither file nor folder (a link would lead out of the image).
    """
    assets = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ImageError(str(path), "assets hold plain files only", "copy the file instead of linking it")
        if path.is_file():
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            assets.append(Asset(path.relative_to(folder).as_posix(), path.stat().st_size, sha256))
    return tuple(assets)


def read_index(folder: Path | str) -> Index:
    """Read and check the index of an image folder, and that the image is stored as it says.

    Raises:
        ImageError: the index is damaged or hostile, or image and index do not fit together.
    """
    path = Path(folder) / INDEX_FILE
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            text = file.read(_INDEX_BYTES + 1)
    except OSError as error:
        raise ImageError(str(path), f"cannot be read: {error.strerror}") from error
    if len(text) > _INDEX_BYTES:
        raise ImageError(str(path), f"an index has at most {_INDEX_BYTES} bytes")
    index = parse_index(text, str(path))
    stored = path.parent / index.stored_file
    try:
        found = os.lstat(stored)
    except OSError as error:
        raise ImageError(str(stored), f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != index.stored_bytes:
        raise ImageError(str(stored), f"has {found.st_size} bytes, its index says {index.stored_bytes}")
    if index.packed is not None:
        from omnimodel.memory.codec_file import read_index as read_blocks  # NumPy, which a raw image does not need

        blocks = read_blocks(str(stored))
        if (blocks.image_bytes, blocks.frame_bytes) != (index.bytes, index.packed.frame_bytes):
            raise ImageError(str(stored), "holds another image than its index says", "publish the model again")
    return index
