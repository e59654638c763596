"""safetensors files: every dtype comes back, hostile headers are refused by name."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from memory.weight_files import (
    F32,
    safetensors_bytes,
)
from omnimodel.errors import ImageError
from omnimodel.memory.readers import safetensors


def header_only(body: object, content: bytes = F32) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(begin: int = 0, end: int = 16, dtype: object = "F32", shape: object = (4,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


HOSTILE_SAFETENSORS = {
    "header larger than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "header of 2^64 - 1 bytes": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "header is no JSON": header_only(b"{"),
    "header is a list": header_only([]),
    "header is nested": header_only(b"[" * 50_000),
    "name twice": header_only(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)),
    "entry is a number": header_only({"a": 1}),
    "more fields": header_only({"a": {**entry(), "more": 1}}),
    "unknown dtype": header_only({"a": entry(dtype="F4")}),
    "dtype is a list": header_only({"a": entry(dtype=["F32"])}),
    "shape larger than its bytes": header_only({"a": entry(shape=(5,))}),
    "shape smaller than its bytes": header_only({"a": entry(shape=(3,))}),
    "shape that overflows": header_only({"a": entry(shape=(1 << 62, 4, 1 << 62))}),
    "shape whose product wraps to 4": header_only({"a": entry(shape=((1 << 64) + 4,))}),
    "negative shape": header_only({"a": entry(shape=(-4, -1))}),
    "shape of floats": header_only({"a": entry(shape=(4.0,))}),
    "shape of true": header_only({"a": entry(shape=(True, 4))}),
    "shape is text": header_only({"a": entry(shape="4")}),
    "a hundred dimensions": header_only({"a": entry(shape=(1,) * 99 + (4,))}),
    "offsets before the start": header_only({"a": entry(-16, 0)}),
    "offsets turned round": header_only({"a": entry(16, 0)}),
    "offsets behind the end": header_only({"a": entry(0, 32, shape=(8,))}),
    "one offset": header_only({"a": {**entry(), "data_offsets": [0]}}),
    "overlapping": header_only({"a": entry(0, 16), "b": entry(8, 24)}, F32 * 2),
    "the same bytes twice": header_only({"a": entry(), "b": entry()}),
    "hole between tensors": header_only({"a": entry(0, 16), "b": entry(20, 36)}, F32 + b"...." + F32),
    "hole before the first": header_only({"a": entry(4, 20)}, b"...." + F32),
    "bytes behind the last": header_only({"a": entry()}, F32 + b"x"),
    "bytes of nobody": header_only({}),
}


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(HOSTILE_SAFETENSORS[name])
    with pytest.raises(ImageError, match=r"model\.safetensors"):
        safetensors.read(tmp_path / "model.safetensors")


def test_safetensors_of_every_dtype_and_at_odd_offsets(tmp_path):
    stored = {"odd": ("U8", [1], b"\7")}
    for name in ["BF16", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "U16", "U32", "U64", "F8_E4M3", "C64"]:
        stored[name] = (name, [2], bytes(2 * {"8": 1, "1": 2, "3": 4, "6": 8}[name.split("_")[0].lstrip("BFIUC")[0]]))
    stored["empty"] = ("F32", [0, 3], b"")
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(stored))
    found = safetensors.read(path)
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {n: s for n, (_, s, _) in stored.items()}
    assert found["BF16"].dtype == torch.bfloat16
    from safetensors import safe_open  # the format's own library agrees that the file is good

    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(stored)
