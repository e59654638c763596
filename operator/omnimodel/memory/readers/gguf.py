"""GGUF files: header, metadata and bounds are read here by the letter; the `gguf` package does the arithmetic.

The package's own reader allocates and loops for numbers that the file merely claims, so it is not used.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from omnimodel.memory.readers.mapped import Cursor, LazyTensors, MappedFile, reading, size_bytes

_WHAT = "GGUF file"
_VERSIONS = (2, 3)
_ALIGNMENT_BYTES = 32
_NESTING = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}  # types of metadata, as numpy writes them
_WHOLE = {
    GGMLQuantizationType.I8: "int8",
    GGMLQuantizationType.I16: "int16",
    GGMLQuantizationType.I32: "int32",
    GGMLQuantizationType.I64: "int64",
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F64: "float64",
}


class GgufTensors(LazyTensors):
    """Tensors of a GGUF file under its own names, quantized ones as float32; `metadata` has its key-value pairs.

    Arrays of numbers in `metadata` are numpy arrays, arrays of strings are lists.
    """

    def __init__(self, path: Path, loaders: dict[str, Callable[[], torch.Tensor]], metadata: dict[str, Any]) -> None:
        super().__init__(path, _WHAT, loaders)
        self.metadata = metadata


def read(path: Path | str) -> GgufTensors:
    """Tensors and metadata of a file; tensors are dequantized when they are asked for.

    Raises:
        ImageError: it is damaged or hostile.
    """
    file = MappedFile(path, _WHAT)
    with reading(file.path, _WHAT):
        cursor = _Cursor(file)
        if file.bytes(0, 4) != b"GGUF":
            raise file.fail("it does not begin with GGUF")
        cursor.offset = 4
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise file.fail(f"version {version}, known are 2 and 3 (little-endian)")
        tensor_count, pair_count = cursor.number("Q"), cursor.number("Q")
        cursor.check_count(tensor_count, 24)
        cursor.check_count(pair_count, 12)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            if key in metadata:
                raise file.fail(f"the key {key!r:.100} comes twice")
            metadata[key] = cursor.value(cursor.number("I"), _NESTING)
        return GgufTensors(file.path, _loaders(cursor, tensor_count, metadata), metadata)


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order that GGUF has for q and k of Llama models (pairs side by side instead of halves).

    Args:
        tensor: weight or bias of the projection, first dimension heads x head size.
        heads: of the projection: all for q, key-value heads for k.
    """
    rows = tensor.shape[0]
    halves = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _loaders(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    file = cursor.file
    alignment = metadata.get("general.alignment", _ALIGNMENT_BYTES)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise file.fail(f"an alignment of {alignment!r:.100}")
    found: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.string()
        dimensions = cursor.number("I")
        if not 0 <= dimensions <= 8:
            raise file.fail(f"tensor {name!r:.100} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
        kind = cursor.number("I")
        if kind not in iter(GGMLQuantizationType) or GGMLQuantizationType(kind) not in GGML_QUANT_SIZES:
            raise file.fail(f"tensor {name!r:.100} has the unknown type {kind}")
        if name in found:
            raise file.fail(f"tensor {name!r:.100} comes twice")
        found[name] = (GGMLQuantizationType(kind), shape, cursor.number("Q"))
    begin = -(-cursor.offset // alignment) * alignment
    loaders: dict[str, Callable[[], torch.Tensor]] = {}
    spans = []
    for name, (kind, shape, offset) in found.items():
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = size_bytes(shape, 1)
        if (shape[-1] if shape else 1) % block:
            raise file.fail(f"tensor {name!r:.100} has rows that are no multiple of {block}")
        if offset % alignment:
            raise file.fail(f"tensor {name!r:.100} lies at {offset}, no multiple of {alignment}")
        bytes_there = elements // block * block_bytes
        if begin + offset + bytes_there > file.size_bytes:
            raise file.fail(f"tensor {name!r:.100} ends behind the file's {file.size_bytes} bytes")
        spans.append((offset, offset + bytes_there, name))
        if kind in _WHOLE:
            loaders[name] = functools.partial(file.tensor, begin + offset, _WHOLE[kind], shape)
        else:
            loaders[name] = functools.partial(_dequantized, file, begin + offset, bytes_there, kind, shape)
    spans.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise file.fail(f"tensors {first!r:.100} and {second!r:.100} overlap")
    return loaders


def _dequantized(
    file: MappedFile, offset: int, size: int, kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> torch.Tensor:
    if size == 0:
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    rows = math.prod(shape[:-1])
    stored = file.tensor(offset, "uint8", (rows, size // rows)).numpy()
    with np.errstate(all="ignore"):
        values = dequantize(stored, kind)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(shape)


class _Cursor(Cursor):
    """Reads metadata."""

    def string(self) -> str:
        length = self.number("Q")
        text = self.file.bytes(self.offset, length)
        self.offset += length
        return text.decode()

    def value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(nesting)
        if kind not in _NUMBERS:
            raise self.file.fail(f"a value of the unknown type {kind}")
        value = self._numbers(kind, 1)[0].item()
        return bool(value) if kind == _BOOL else value

    def _array(self, nesting: int) -> Any:
        if nesting == 0:
            raise self.file.fail(f"arrays nested more than {_NESTING} deep")
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            return self._numbers(kind, count)
        if kind not in {_STRING, _ARRAY}:
            raise self.file.fail(f"an array of the unknown type {kind}")
        self.check_count(count, 8 if kind == _STRING else 12)
        return [self.value(kind, nesting - 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        stored = self.file.bytes(self.offset, count * dtype.itemsize)
        self.offset += len(stored)
        return np.frombuffer(stored, dtype=dtype)
