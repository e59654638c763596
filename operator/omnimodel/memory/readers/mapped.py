"""What all readers share: a file in memory whose bounds are checked, and tensors that are loaded when asked for."""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from omnimodel.errors import ImageError
from omnimodel.memory.image import ITEM_BYTES

CURE = "fetch the source again, or correct it"
DIMENSIONS = 16
_ELEMENTS = 1 << 48


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a parser trips over into an ImageError that names the file.

    Args:
        path: the file.
        what: its format, for the message.
    """
    try:
        yield
    except ImageError:
        raise
    except OSError as error:
        raise ImageError(str(path), f"cannot be read: {error.strerror or error}", CURE) from error
    except (
        ValueError,
        LookupError,
        ArithmeticError,
        TypeError,
        AttributeError,
        RuntimeError,
        EOFError,
        MemoryError,
        AssertionError,
        NotImplementedError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        text = str(error).splitlines()
        reason = text[0][:200] if text else type(error).__name__
        raise ImageError(str(path), f"is no valid {what}: {reason}", CURE) from error


class MappedFile:
    """A file mapped copy-on-write (so that torch takes it for writable), with every access checked.

    Raises:
        ImageError: it cannot be opened, or is empty.
    """

    def __init__(self, path: Path | str, what: str) -> None:
        self.path = Path(path)
        self.what = what
        with reading(self.path, what), open(self.path, "rb") as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            if self.size_bytes == 0:
                raise self.fail("it is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def fail(self, problem: str) -> ImageError:
        """The error that says what is wrong with the file."""
        return ImageError(str(self.path), f"is no valid {self.what}: {problem}", CURE)

    def bytes(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`."""
        self._check(offset, size)
        return self._map[offset : offset + size]

    def number(self, offset: int, form: str) -> int:
        """One little-endian number; `form` as in `struct`."""
        size = struct.calcsize(f"<{form}")
        self._check(offset, size)
        (value,) = struct.unpack_from(f"<{form}", self._map, offset)
        return int(value)

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over the file's own bytes; `dtype` is torch's name."""
        size = size_bytes(shape, ITEM_BYTES[dtype])
        self._check(offset, size)
        if size == 0:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)
        if offset % ITEM_BYTES[dtype]:
            flat = flat.clone()
        if dtype == "bool":
            return (flat != 0).view(shape)
        return flat.view(getattr(torch, dtype)).view(shape)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise self.fail(f"bytes {offset} to {offset + size} are outside its {self.size_bytes}")


class Cursor:
    """A place in a file that moves on with every value read."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.offset = 0

    def number(self, form: str) -> int:
        """The next number; `form` as in `struct`."""
        value = self.file.number(self.offset, form)
        self.offset += struct.calcsize(f"<{form}")
        return value

    def check_count(self, count: int, least_bytes: int) -> None:
        """Refuse to loop for more items than the rest of the file could hold."""
        if count * least_bytes > self.file.size_bytes - self.offset:
            raise self.file.fail(f"{count} items are more than its {self.file.size_bytes} bytes can hold")


def size_bytes(shape: tuple[int, ...], item_bytes: int) -> int:
    """Bytes of a dense tensor.

    Raises:
        ValueError: it has too many dimensions or elements to be true.
    """
    if len(shape) > DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    elements = 1
    for size in shape:
        if size < 0:
            raise ValueError(f"a tensor of shape {list(shape)}")
        elements *= size
    if elements > _ELEMENTS or max(shape, default=0) > _ELEMENTS:
        raise ValueError("a tensor of more elements than any file holds")
    return elements * item_bytes


class LazyTensors(Mapping[str, torch.Tensor]):
    """Names and tensors; a tensor is loaded each time it is asked for, and nothing is kept.

    Args:
        path: the file, for messages.
        what: its format, for messages.
        loaders: what loads each tensor.
    """

    def __init__(self, path: Path, what: str, loaders: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self.path = path
        self._what = what
        self._loaders = dict(loaders)

    def __getitem__(self, name: str) -> torch.Tensor:
        loader = self._loaders[name]
        with reading(self.path, self._what):
            return loader()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)
