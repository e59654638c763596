"""The index of an image: what lies where in it. The parser trusts nothing: an index comes out of a model's process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from omnimodel.errors import ImageError

FORMAT = 1
TENSOR_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load
IMAGE_ALIGNMENT_BYTES = 4096  # a page, so that the file can be mapped and read with O_DIRECT
ASSETS_FOLDER = "assets"
IMAGE_FILE = "image"
PACKED_FILE = "image.packed"

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

_TENSORS = 1 << 20
_DIMENSIONS = 16
_IMAGE_BYTES = 1 << 44
_NAME_CHARACTERS = 1024
FRAME_BYTES = range(IMAGE_ALIGNMENT_BYTES, (1 << 34) + 1, IMAGE_ALIGNMENT_BYTES)


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
class Packed:
    """An image that is stored in fewer bytes than it has, see `codec_file`; its file is all there is of it.

    Args:
        bytes: length of that file.
        frame_bytes: of the devices that it is for.
        frames: a digest for each `Index.frame_bytes` of the file.
    """

    bytes: int
    frame_bytes: int
    frames: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """What an image holds.

    Args:
        digest: SHA-256 over everything else here, and so over every byte of image and assets.
        bytes: length of the image, a multiple of 4096; 0 for a model without weights.
        frame_bytes: how many bytes each digest of `frames` covers (the last one: what is left).
        dtype: what the publisher was asked for.
        metadata: free; the engine's and the task's.
        packed: how it is stored, when that is not as it is.
    """

    digest: str
    bytes: int
    frame_bytes: int
    dtype: str
    tensors: tuple[TensorEntry, ...]
    frames: tuple[str, ...]
    assets: tuple[Asset, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    packed: Packed | None = None

    def to_json(self) -> dict[str, Any]:
        """The index as it stands in index.json."""
        body: dict[str, Any] = {
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
        if self.packed is not None:
            body["packed"] = {
                "bytes": self.packed.bytes,
                "frameBytes": self.packed.frame_bytes,
                "frames": list(self.packed.frames),
            }
        return body

    @property
    def stored_file(self) -> str:
        """Name of the file that the image is stored in."""
        return PACKED_FILE if self.packed else IMAGE_FILE

    @property
    def stored_bytes(self) -> int:
        """Length of that file."""
        return self.packed.bytes if self.packed else self.bytes

    @property
    def stored_frames(self) -> tuple[str, ...]:
        """Digests of that file, one for each `frame_bytes` of it."""
        return self.packed.frames if self.packed else self.frames

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
        packed = isinstance(body, dict) and "packed" in body
        body = self.fields(body, "the index", names | {"packed"} if packed else names)
        if body["format"] != FORMAT or type(body["format"]) is not int:
            raise self.fail(f"format is {body['format']!r}, this version reads {FORMAT}")
        if not isinstance(body["metadata"], dict):
            raise self.fail("metadata is no object")
        index = Index(
            digest=self.sha256(body["digest"], "digest"),
            bytes=self.integer(body["bytes"], "bytes", _IMAGE_BYTES),
            frame_bytes=self.integer(body["frameBytes"], "frameBytes", FRAME_BYTES[-1]),
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
            packed=self.packed(body["packed"]) if packed else None,
        )
        self.layout(index)
        return index

    def packed(self, body: Any) -> Packed:
        body = self.fields(body, "packed", {"bytes", "frameBytes", "frames"})
        return Packed(
            bytes=self.integer(body["bytes"], "packed.bytes", _IMAGE_BYTES),
            frame_bytes=self.integer(body["frameBytes"], "packed.frameBytes", FRAME_BYTES[-1]),
            frames=tuple(
                self.sha256(frame, f"packed.frames[{number}]")
                for number, frame in enumerate(self.items(body["frames"], "packed.frames", _TENSORS))
            ),
        )

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
        check_tensor(self.subject, entry)
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
        if index.frame_bytes not in FRAME_BYTES:
            raise self.fail(f"frameBytes is {index.frame_bytes}, which is no whole number of pages")
        if index.bytes % IMAGE_ALIGNMENT_BYTES:
            raise self.fail(f"bytes is {index.bytes}, which is no multiple of {IMAGE_ALIGNMENT_BYTES}")
        if len(index.frames) != -(-index.bytes // index.frame_bytes):
            raise self.fail(f"{len(index.frames)} frames do not cover {index.bytes} bytes")
        if len(index.stored_frames) != -(-index.stored_bytes // index.frame_bytes):
            raise self.fail(f"{len(index.stored_frames)} frames do not cover the {index.stored_bytes} bytes stored")
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


def check_tensor(subject: str, entry: TensorEntry) -> None:
    """Refuse a tensor that cannot be: name, dtype, shape, bytes and alignment.

    Raises:
        ImageError: naming what is wrong.
    """
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
