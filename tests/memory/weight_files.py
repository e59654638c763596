"""Small good weight files of every format, and ways to spoil them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from omnimodel.errors import ImageError
from omnimodel.memory.readers import checkpoint, ctranslate2, gguf, npz, safetensors

F32 = struct.pack("<4f", 1, 2, 3, 4)


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], bytes]], **metadata: str) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    content = b""
    for name, (dtype, shape, stored) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(stored)]}
        content += stored
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def good_safetensors(path: Path) -> dict[str, np.ndarray]:
    a, b = floats(3, 4), floats(5, seed=2)
    stored = {"a": ("F32", [3, 4], a.tobytes()), "b": ("F32", [5], b.tobytes()), "flag": ("BOOL", [3], b"\1\0\1")}
    path.write_bytes(safetensors_bytes(stored, format="pt"))
    return {"a": a, "b": b, "flag": np.array([True, False, True])}


def good_checkpoint(path: Path, *, legacy: bool = False) -> dict[str, np.ndarray]:
    arrays = {"a": floats(3, 4), "b": floats(5, seed=2)}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save({"state_dict": tensors, "epoch": 3}, path, _use_new_zipfile_serialization=not legacy)
    return arrays


def good_gguf(path: Path) -> dict[str, np.ndarray]:
    writer = GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "hello", "wörld"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    writer.add_bool("good", True)
    a, b = floats(4, 64), floats(5, seed=2)
    writer.add_tensor("a.weight", quantize(a, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("b", b)
    writer.add_tensor("half", floats(2, 3).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"a.weight": a, "b": b, "half": floats(2, 3)}


def good_npz(path: Path, *, compressed: bool = False) -> dict[str, np.ndarray]:
    arrays = {"a": floats(3, 4), "b": np.arange(5), "column": np.asfortranarray(floats(3, 2))}
    with open(path, "wb") as file:
        (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return arrays


def ct2_string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def ct2_bytes(
    variables: dict[str, tuple[int, list[int], bytes]],
    aliases: dict[str, str],
    spec: str = "WhisperSpec",
    version: int = 6,
) -> bytes:
    content = struct.pack("<I", version) + ct2_string(spec) + struct.pack("<II", 3, len(variables))
    for name, (kind, shape, stored) in variables.items():
        content += ct2_string(name) + struct.pack("<B", len(shape)) + struct.pack(f"<{len(shape)}I", *shape)
        content += struct.pack("<BI", kind, len(stored)) + stored
    content += struct.pack("<I", len(aliases))
    return content + b"".join(ct2_string(alias) + ct2_string(name) for alias, name in aliases.items())


def good_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    a = floats(6, 4)
    variables = {"encoder/conv1/bias": (0, [6, 4], a.tobytes()), "decoder/num_heads": (2, [], b"\6\0")}
    path.write_bytes(ct2_bytes(variables, {"tied": "encoder/conv1/bias"}))
    return {"encoder/conv1/bias": a, "tied": a, "decoder/num_heads": np.array(6, dtype=np.int16)}


GOOD = {
    "safetensors": good_safetensors,
    "gguf": good_gguf,
    "npz": good_npz,
    "ctranslate2": good_ctranslate2,
    "checkpoint": good_checkpoint,
}
READ = {
    "safetensors": safetensors.read,
    "gguf": gguf.read,
    "npz": npz.read,
    "ctranslate2": ctranslate2.read,
    "checkpoint": checkpoint.tensors,
}


def read_all(kind: str, path: Path) -> int | None:
    """Read every tensor; their bytes, or None when the file was refused with an error that names it."""
    try:
        return sum(tensor.numel() * tensor.element_size() for tensor in READ[kind](path).values())
    except ImageError as error:
        assert path.name in str(error)  # noqa: PT017 (it may also be read)
        return None
