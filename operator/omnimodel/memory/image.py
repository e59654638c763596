"""The image of a model's weights: one packed file, a strict index, and the small files that go with them.

A folder with `image` (every tensor once, at aligned offsets, in the order the module uses them), `index.json` (what
lies where, and a SHA-256 per frame) and `assets/` (tokenizers, configurations). It never changes once it is
published. The reader trusts nothing: an index comes out of a model's process.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from omnimodel.errors import ImageError
from omnimodel.memory.disk import disk_errors

if TYPE_CHECKING:
    from typing_extensions import Buffer

FORMAT = 1
TENSOR_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load
IMAGE_ALIGNMENT_BYTES = 4096  # a page, so that the file can be mapped and read with O_DIRECT
IMAGE_FILE = "image"
INDEX_FILE = "index.json"
ASSETS_FOLDER = "assets"

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}  # torch's names

_INDEX_BYTES = 64 << 20
_TENSORS = 1 << 20
_DIMENSIONS = 16
_IMAGE_BYTES = 1 << 44
_NAME_CHARACTERS = 1024
_FRAME_BYTES = range(IMAGE_ALIGNMENT_BYTES, (1 << 34) + 1, IMAGE_ALIGNMENT_BYTES)
_HASH_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of an image.

    Args:
        names: every name it has in the module; more than one when weights are tied.
        dtype: torch's name, such as `bfloat16`.
        offset, bytes: where it lies in the image, in bytes.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Asset:
    """One file under `assets/`, by its path with `/` between folders."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """What an image holds.

    Args:
        digest: SHA-256 over everything else here, and so over every byte of image and assets.
        bytes: length of the image, a multiple of 4096; 0 for a model without weights.
        frame_bytes: how many bytes each digest of `frames` covers (the last one: what is left).
        dtype: what the publisher was asked for.
        metadata: free; the engine's and the task's.
    """

    digest: str
    bytes: int
    frame_bytes: int
    dtype: str
    tensors: tuple[TensorEntry, ...]
    frames: tuple[str, ...]
    assets: tuple[Asset, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The index as it stands in index.json."""
        return {
            "format": FORMAT,
            "digest": self.digest,
            "bytes": self.bytes,
            "frameBytes": self.frame_bytes,
            "dtype": self.dtype,
            "tensors": [
                {
                    "names": list(tensor.names),
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "offset": tensor.offset,
                    "bytes": tensor.bytes,
                }
                for tensor in self.tensors
            ],
            "frames": list(self.frames),
            "assets": [{"path": asset.path, "bytes": asset.bytes, "sha256": asset.sha256} for asset in self.assets],
            "metadata": self.metadata,
        }

    @property
    def weights_bytes(self) -> int:
        """Bytes of the tensors alone, without padding."""
        return sum(tensor.bytes for tensor in self.tensors)


def padded_bytes(size_bytes: int, alignment_bytes: int) -> int:
    """`size_bytes` rounded up to a multiple of `alignment_bytes`."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def digest_of(index: Index) -> str:
    """SHA-256 over the index without its own digest, as compact JSON with sorted keys."""
    body = index.to_json()
    del body["digest"]
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
        if frame_bytes not in _FRAME_BYTES:
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
        _check_tensor(str(self.folder), entry)
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
            with open(self.folder / INDEX_FILE, "x", encoding="utf-8") as file:
                json.dump(index.to_json(), file, separators=(",", ":"), allow_nan=False)
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
    """Read and check the index of an image folder, and that the image has the length it says.

    Raises:
        ImageError: the index is damaged or hostile, or image and index do not fit together.
    """
    path = Path(folder) / INDEX_FILE
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            text = file.read(_INDEX_BYTES + 1)
        image = os.lstat(path.parent / IMAGE_FILE)
    except OSError as error:
        raise ImageError(str(path), f"cannot be read: {error.strerror}") from error
    if len(text) > _INDEX_BYTES:
        raise ImageError(str(path), f"an index has at most {_INDEX_BYTES} bytes")
    index = parse_index(text, str(path))
    if not stat.S_ISREG(image.st_mode) or image.st_size != index.bytes:
        raise ImageError(str(path.parent / IMAGE_FILE), f"has {image.st_size} bytes, its index says {index.bytes}")
    return index


def parse_index(text: bytes, subject: str) -> Index:
    """Read and check an index.

    Args:
        text: what index.json holds.
        subject: the file's name, for messages.

    Raises:
        ImageError: naming the first thing that is wrong.
    """
    try:
        body = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ImageError(subject, "is nested too deeply") from error
    except ValueError as error:
        raise ImageError(subject, f"is not JSON: {error}") from error
    reader = _Reader(subject)
    index = reader.index(body)
    if digest_of(index) != index.digest:
        raise ImageError(subject, f"its digest is {digest_of(index)}, it says {index.digest}")
    return index


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return body


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _finite(word: str) -> float:
    number = float(word)
    if number in {float("inf"), float("-inf")}:
        raise ValueError(f"{word} is too large")
    return number


class _Reader:
    """Turns decoded JSON into an Index, or says where it is wrong."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def fail(self, problem: str) -> ImageError:
        return ImageError(self.subject, problem, "publish the model again")

    def fields(self, body: Any, where: str, names: set[str]) -> dict[str, Any]:
        if not isinstance(body, dict) or set(body) != names:
            raise self.fail(f"{where} is no object with exactly the fields {', '.join(sorted(names))}")
        return body

    def integer(self, value: Any, where: str, limit: int) -> int:
        if type(value) is not int or not 0 <= value <= limit:
            raise self.fail(f"{where} is no whole number between 0 and {limit}")
        return value

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > _NAME_CHARACTERS or not value.isprintable():
            raise self.fail(f"{where} is no printable text of at most {_NAME_CHARACTERS} characters")
        return value

    def items(self, value: Any, where: str, limit: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > limit:
            raise self.fail(f"{where} is no list of at most {limit}")
        return value

    def sha256(self, value: Any, where: str) -> str:
        text = self.text(value, where)
        if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
            raise self.fail(f"{where} is no SHA-256 in lower-case hexadecimal")
        return text

    def index(self, body: Any) -> Index:
        names = {"format", "digest", "bytes", "frameBytes", "dtype", "tensors", "frames", "assets", "metadata"}
        body = self.fields(body, "the index", names)
        if body["format"] != FORMAT or type(body["format"]) is not int:
            raise self.fail(f"format is {body['format']!r}, this version reads {FORMAT}")
        if not isinstance(body["metadata"], dict):
            raise self.fail("metadata is no object")
        index = Index(
            digest=self.sha256(body["digest"], "digest"),
            bytes=self.integer(body["bytes"], "bytes", _IMAGE_BYTES),
            frame_bytes=self.integer(body["frameBytes"], "frameBytes", _FRAME_BYTES[-1]),
            dtype=self.text(body["dtype"], "dtype"),
            tensors=tuple(
                self.tensor(tensor, f"tensors[{number}]")
                for number, tensor in enumerate(self.items(body["tensors"], "tensors", _TENSORS))
            ),
            frames=tuple(
                self.sha256(frame, f"frames[{number}]")
                for number, frame in enumerate(self.items(body["frames"], "frames", _TENSORS))
            ),
            assets=tuple(
                self.asset(asset, f"assets[{number}]")
                for number, asset in enumerate(self.items(body["assets"], "assets", _TENSORS))
            ),
            metadata=body["metadata"],
        )
        self.layout(index)
        return index

    def tensor(self, body: Any, where: str) -> TensorEntry:
        body = self.fields(body, where, {"names", "dtype", "shape", "offset", "bytes"})
        entry = TensorEntry(
            names=tuple(self.text(name, f"{where}.names") for name in self.items(body["names"], f"{where}.names", 256)),
            dtype=self.text(body["dtype"], f"{where}.dtype"),
            shape=tuple(
                self.integer(size, f"{where}.shape", _IMAGE_BYTES)
                for size in self.items(body["shape"], f"{where}.shape", _DIMENSIONS)
            ),
            offset=self.integer(body["offset"], f"{where}.offset", _IMAGE_BYTES),
            bytes=self.integer(body["bytes"], f"{where}.bytes", _IMAGE_BYTES),
        )
        _check_tensor(self.subject, entry)
        return entry

    def asset(self, body: Any, where: str) -> Asset:
        body = self.fields(body, where, {"path", "bytes", "sha256"})
        path = self.text(body["path"], f"{where}.path")
        if not path or path.startswith("/") or {"", ".", ".."} & set(path.split("/")):
            raise self.fail(f"{where}.path is {path!r}, which is no plain path inside {ASSETS_FOLDER}/")
        return Asset(
            path,
            self.integer(body["bytes"], f"{where}.bytes", _IMAGE_BYTES),
            self.sha256(body["sha256"], f"{where}.sha256"),
        )

    def layout(self, index: Index) -> None:
        if index.frame_bytes not in _FRAME_BYTES:
            raise self.fail(f"frameBytes is {index.frame_bytes}, which is no whole number of pages")
        if index.bytes % IMAGE_ALIGNMENT_BYTES:
            raise self.fail(f"bytes is {index.bytes}, which is no multiple of {IMAGE_ALIGNMENT_BYTES}")
        if len(index.frames) != -(-index.bytes // index.frame_bytes):
            raise self.fail(f"{len(index.frames)} frames do not cover {index.bytes} bytes")
        end_bytes = 0
        names: set[str] = set()
        for entry in index.tensors:
            if entry.offset < end_bytes:
                raise self.fail(f"tensor {entry.names[0]!r} overlaps the one before it")
            end_bytes = entry.offset + entry.bytes
            if end_bytes > index.bytes:
                raise self.fail(f"tensor {entry.names[0]!r} ends at {end_bytes}, behind the image's end")
            if taken := names.intersection(entry.names):
                raise self.fail(f"tensor {min(taken)!r} comes twice")
            names.update(entry.names)
        if len({asset.path for asset in index.assets}) != len(index.assets):
            raise self.fail("an asset comes twice")


def _check_tensor(subject: str, entry: TensorEntry) -> None:
    if not entry.names or not all(entry.names) or len(set(entry.names)) != len(entry.names):
        raise ImageError(subject, "a tensor without a name, or with one name twice")
    where = f"tensor {entry.names[0]!r}"
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise ImageError(subject, f"{where} has the unknown dtype {entry.dtype!r}", f"use {', '.join(ITEM_BYTES)}")
    needed_bytes = item_bytes
    for size in entry.shape:
        needed_bytes *= size
    if needed_bytes != entry.bytes:
        raise ImageError(
            subject, f"{where} of {entry.dtype}{list(entry.shape)} has {entry.bytes} bytes, not {needed_bytes}"
        )
    if entry.offset % TENSOR_ALIGNMENT_BYTES:
        raise ImageError(subject, f"{where} lies at {entry.offset}, no multiple of {TENSOR_ALIGNMENT_BYTES}")
