"""numpy archives (.npz): arrays without pickles, sizes checked before anything is unpacked."""

from __future__ import annotations

import functools
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from omnimodel.errors import ImageError
from omnimodel.memory.readers.mapped import CURE, LazyTensors, reading, size_bytes

_WHAT = "npz archive"
_ENTRIES = 1 << 16
_EXPANSION = 100  # a bomb of zeroes reaches 1000; weights hardly compress
_SMALL_BYTES = 16 << 20  # below this any expansion is harmless


def read(path: Path | str) -> Mapping[str, torch.Tensor]:
    """Arrays of an archive by their names.

    Raises:
        ImageError: it is damaged or hostile, holds pickled objects, or unpacks to far more bytes than it has.
    """
    path = Path(path)
    with reading(path, _WHAT), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        limit_bytes = max(_SMALL_BYTES, _EXPANSION * path.stat().st_size)
        if len(entries) > _ENTRIES or sum(entry.file_size for entry in entries) > limit_bytes:
            raise ImageError(str(path), f"unpacks to more than {limit_bytes} bytes or {_ENTRIES} arrays", CURE)
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        if len(set(names)) != len(names):
            raise ImageError(str(path), "has two arrays of one name", CURE)
        for entry in entries:
            with archive.open(entry) as file:
                _header(path, entry, cast("BinaryIO", file))
        return LazyTensors(
            path,
            _WHAT,
            {name: functools.partial(_load, path, entry) for name, entry in zip(names, entries, strict=True)},
        )


def _header(path: Path, entry: zipfile.ZipInfo, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ImageError(str(path), f"array {entry.filename!r:.100} has the unknown version {version}", CURE)
    shape, column_order, dtype = readers[version](file)
    if dtype.hasobject or dtype.kind not in "biufc" or not dtype.isnative:
        raise ImageError(str(path), f"array {entry.filename!r:.100} has the dtype {str(dtype)!r:.100}", CURE)
    if size_bytes(shape, dtype.itemsize) != entry.file_size - file.tell():
        raise ImageError(str(path), f"array {entry.filename!r:.100} has other bytes than its shape {shape} needs", CURE)
    return shape, column_order, dtype


def _load(path: Path, entry: zipfile.ZipInfo) -> torch.Tensor:
    with zipfile.ZipFile(path) as archive, archive.open(entry) as opened:
        file = cast("BinaryIO", opened)
        shape, column_order, dtype = _header(path, entry, file)
        content = bytearray(math.prod(shape) * dtype.itemsize)
        view, filled = memoryview(content), 0
        while filled < len(content):
            part = file.read(min(1 << 20, len(content) - filled))
            if not part:
                raise EOFError(f"array {entry.filename!r:.100} ends early")
            view[filled : filled + len(part)] = part
            filled += len(part)
        file.read(1)  # at the end the archive's checksum is compared
        array = np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if column_order else "C")
        return torch.from_numpy(np.ascontiguousarray(array))
