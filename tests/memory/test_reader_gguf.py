"""GGUF files: metadata and every quantization, hostile ones are refused by name."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from memory.weight_files import (
    GOOD,
    floats,
)
from omnimodel.errors import ImageError
from omnimodel.memory.readers import gguf


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_file(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    content: bytes = bytes(64),
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs))))
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + content


def gguf_pair(key: bytes, kind: int, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + value


def gguf_tensor(name: bytes = b"a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return gguf_string(name) + dimensions + struct.pack("<IQ", kind, offset)


def nested_array(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 1) + bytes(4)


HOSTILE_GGUF = {
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 1": gguf_file(version=1),
    "version 4": gguf_file(version=4),
    "2^64 - 1 tensors": gguf_file(counts=((1 << 64) - 1, 0)),
    "2^63 pairs": gguf_file(counts=(0, 1 << 63)),
    "a million tensors in 100 bytes": gguf_file(counts=(1_000_000, 0)),
    "key of 2^60 bytes": gguf_file(pairs=[struct.pack("<Q", 1 << 60)]),
    "key is no UTF-8": gguf_file(pairs=[gguf_pair(b"\xff", 4, bytes(4))]),
    "key twice": gguf_file(pairs=[gguf_pair(b"k", 4, bytes(4))] * 2),
    "unknown type": gguf_file(pairs=[gguf_pair(b"k", 99, bytes(4))]),
    "text behind the end": gguf_file(pairs=[gguf_pair(b"k", 8, struct.pack("<Q", 1 << 40))]),
    "array of 2^61 numbers": gguf_file(pairs=[gguf_pair(b"k", 9, struct.pack("<IQ", 10, 1 << 61))]),
    "array of 2^62 texts": gguf_file(pairs=[gguf_pair(b"k", 9, struct.pack("<IQ", 8, 1 << 62))]),
    "array of unknown type": gguf_file(pairs=[gguf_pair(b"k", 9, struct.pack("<IQ", 77, 1) + bytes(8))]),
    "array nested a thousand deep": gguf_file(pairs=[gguf_pair(b"k", 9, nested_array(1000))]),
    "alignment 0": gguf_file(pairs=[gguf_pair(b"general.alignment", 4, struct.pack("<I", 0))]),
    "alignment 33": gguf_file(pairs=[gguf_pair(b"general.alignment", 4, struct.pack("<I", 33))]),
    "alignment is text": gguf_file(pairs=[gguf_pair(b"general.alignment", 8, gguf_string(b"32"))]),
    "tensor twice": gguf_file(tensors=[gguf_tensor(), gguf_tensor(offset=32)]),
    "unknown quantization": gguf_file(tensors=[gguf_tensor(kind=4)]),
    "quantization 2^31": gguf_file(tensors=[gguf_tensor(kind=1 << 31)]),
    "row that is no whole block": gguf_file(tensors=[gguf_tensor(shape=(33,), kind=2)]),
    "behind the end": gguf_file(tensors=[gguf_tensor(offset=64)]),
    "across the end": gguf_file(tensors=[gguf_tensor(shape=(17,))]),
    "offset 2^63": gguf_file(tensors=[gguf_tensor(offset=1 << 63)]),
    "offset not aligned": gguf_file(tensors=[gguf_tensor(offset=4)]),
    "overlapping": gguf_file(tensors=[gguf_tensor(shape=(12,)), gguf_tensor(b"b", offset=32)]),
    "shape that overflows": gguf_file(tensors=[gguf_tensor(shape=(1 << 33, 1 << 33))]),
    "zero times 2^63": gguf_file(tensors=[gguf_tensor(shape=(0, 1 << 63))]),
    "a billion dimensions": gguf_file(tensors=[gguf_string(b"a") + struct.pack("<I", 1 << 30)]),
}


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_gguf(tmp_path, name):
    (tmp_path / "model.gguf").write_bytes(HOSTILE_GGUF[name])
    with pytest.raises(ImageError, match=r"model\.gguf"):
        gguf.read(tmp_path / "model.gguf")


def test_gguf_metadata(tmp_path):
    GOOD["gguf"](tmp_path / "model.gguf")
    metadata = gguf.read(tmp_path / "model.gguf").metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "hello", "wörld"]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.5, 1.5, 2.5]
    assert metadata["good"] is True


def test_gguf_agrees_with_the_package_on_every_quantization(tmp_path):
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize

    kinds = [GGMLQuantizationType[name] for name in ["BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0"]]
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(str(path), "llama")
    for kind in kinds:
        writer.add_tensor(kind.name, quantize(floats(2, 3, 256), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = gguf.read(path)
    for tensor in GGUFReader(path).tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours[tensor.name].numpy(), expected.reshape(2, 3, 256))


def test_unpermute_undoes_what_the_converter_did():
    heads, size = 4, 6
    original = torch.arange(heads * size * 5).view(heads * size, 5)
    # Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py
    permuted = original.reshape(heads, 2, size // 2, 5).swapaxes(1, 2).reshape(original.shape)
    assert not torch.equal(permuted, original)
    assert torch.equal(gguf.unpermute(permuted, heads), original)
    assert torch.equal(gguf.unpermute(permuted[:, 0], heads), original[:, 0])
