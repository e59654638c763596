"""safetensors files, read by the letter of the format.

Source: https://huggingface.co/docs/safetensors (the format: eight bytes of header length, a JSON header, the tensors
one after another without holes).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omnimodel.memory.image import ITEM_BYTES
from omnimodel.memory.readers.mapped import LazyTensors, MappedFile, reading, size_bytes

_WHAT = "safetensors file"
_HEADER_BYTES = 100_000_000  # Source: MAX_HEADER_SIZE of the format's own library
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def read(path: Path | str) -> Mapping[str, torch.Tensor]:
    """Tensors of a file, mapped.

    Raises:
        ImageError: it is damaged or hostile.
    """
    file = MappedFile(path, _WHAT)
    with reading(file.path, _WHAT):
        header_bytes = file.number(0, "Q")
        if header_bytes > min(_HEADER_BYTES, file.size_bytes - 8):
            raise file.fail(f"a header of {header_bytes} bytes in a file of {file.size_bytes}")
        header = json.loads(file.bytes(8, header_bytes), object_pairs_hook=functools.partial(_object, file))
        if not isinstance(header, dict):
            raise file.fail("its header is no object")
        header.pop("__metadata__", None)
        return LazyTensors(file.path, _WHAT, _loaders(file, header, 8 + header_bytes))


def _loaders(file: MappedFile, header: dict[str, Any], begin: int) -> dict[str, functools.partial[torch.Tensor]]:
    loaders, spans = {}, []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise file.fail(f"tensor {name!r} has other fields than dtype, shape and data_offsets")
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise file.fail(f"tensor {name!r} has the dtype {entry['dtype']!r}, which is not supported")
        shape, offsets = _whole(file, name, entry["shape"]), _whole(file, name, entry["data_offsets"])
        if len(offsets) != 2 or offsets[1] - offsets[0] != size_bytes(shape, ITEM_BYTES[dtype]):
            raise file.fail(f"tensor {name!r} of {dtype}{list(shape)} does not fit its offsets {list(offsets)}")
        spans.append((offsets[0], offsets[1], name))
        loaders[name] = functools.partial(file.tensor, begin + offsets[0], dtype, shape)
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            raise file.fail(f"tensor {name!r} begins at {first}, the one before it ends at {end}")
        end = last
    if begin + end != file.size_bytes:
        raise file.fail(f"its tensors end at {begin + end}, the file at {file.size_bytes}")
    return loaders


def _object(file: MappedFile, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise file.fail("a name comes twice")
    return body


def _whole(file: MappedFile, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise file.fail(f"tensor {name!r} has {value!r:.100} where whole numbers belong")
    return tuple(value)
