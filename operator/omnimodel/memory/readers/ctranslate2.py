"""CTranslate2 models (model.bin), and Whisper's weights in them under the names that transformers has.

Source: `_serialize` in https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/model_spec.py
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from omnimodel.errors import ImageError
from omnimodel.memory.image import ITEM_BYTES
from omnimodel.memory.readers.mapped import DIMENSIONS, Cursor, LazyTensors, MappedFile, reading, size_bytes

_WHAT = "CTranslate2 model"
_VERSIONS = (5, 6)
_DTYPES = {0: "float32", 1: "int8", 2: "int16", 3: "int32", 4: "float16", 5: "bfloat16"}


class Ctranslate2Tensors(LazyTensors):
    """Variables of a model under CTranslate2's names, aliases included; `spec` is its kind, such as WhisperSpec."""

    def __init__(self, path: Path, loaders: dict[str, Callable[[], torch.Tensor]], spec: str) -> None:
        super().__init__(path, _WHAT, loaders)
        self.spec = spec


def read(path: Path | str) -> Ctranslate2Tensors:
    """Variables of a model, mapped.

    Raises:
        ImageError: it is damaged or hostile.
    """
    file = MappedFile(path, _WHAT)
    with reading(file.path, _WHAT):
        cursor = _Cursor(file)
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise file.fail(f"version {version}, known are {_VERSIONS[0]} and {_VERSIONS[1]}")
        spec = cursor.string()
        cursor.number("I")  # the spec's revision
        loaders: dict[str, Callable[[], torch.Tensor]] = {}
        for _ in range(cursor.count(8)):
            name = cursor.string()
            if name in loaders:
                raise file.fail(f"variable {name!r:.100} comes twice")
            loaders[name] = cursor.variable(name)
        aliases = {}
        for _ in range(cursor.count(6)):
            alias, name = cursor.string(), cursor.string()
            if name not in loaders or alias in loaders or alias in aliases:
                raise file.fail(f"alias {alias!r:.100} of {name!r:.100} leads nowhere")
            aliases[alias] = loaders[name]
        if cursor.offset != file.size_bytes:
            raise file.fail(f"{file.size_bytes - cursor.offset} bytes are left over")
        return Ctranslate2Tensors(file.path, loaders | aliases, spec)


class _Cursor(Cursor):
    """Reads names and variables."""

    def count(self, least_bytes: int) -> int:
        count = self.number("I")
        self.check_count(count, least_bytes)
        return count

    def string(self) -> str:
        length = self.number("H")
        text = self.file.bytes(self.offset, length)
        if not text.endswith(b"\0"):
            raise self.file.fail("a name without an end")
        self.offset += length
        return text[:-1].decode()

    def variable(self, name: str) -> functools.partial[torch.Tensor]:
        rank = self.number("B")
        if rank > DIMENSIONS:
            raise self.file.fail(f"variable {name!r:.100} has {rank} dimensions")
        shape = tuple(self.number("I") for _ in range(rank))
        kind, stored_bytes = self.number("B"), self.number("I")
        if kind not in _DTYPES:
            raise self.file.fail(f"variable {name!r:.100} has the unknown type {kind}")
        if size_bytes(shape, ITEM_BYTES[_DTYPES[kind]]) != stored_bytes:
            raise self.file.fail(f"variable {name!r:.100} of shape {list(shape)} has {stored_bytes} bytes")
        self.file.bytes(self.offset + stored_bytes, 0)
        loader = functools.partial(self.file.tensor, self.offset, _DTYPES[kind], shape)
        self.offset += stored_bytes
        return loader


_BLOCKS = [
    (r"(\w+)/layer_(\d+)/self_attention/layer_norm/", r"\1.layers.\2.self_attn_layer_norm."),
    (r"(\w+)/layer_(\d+)/attention/layer_norm/", r"\1.layers.\2.encoder_attn_layer_norm."),
    (r"(\w+)/layer_(\d+)/ffn/layer_norm/", r"\1.layers.\2.final_layer_norm."),
    (r"(\w+)/layer_(\d+)/ffn/linear_0/", r"\1.layers.\2.fc1."),
    (r"(\w+)/layer_(\d+)/ffn/linear_1/", r"\1.layers.\2.fc2."),
    (r"(\w+)/layer_(\d+)/self_attention/linear_1/", r"\1.layers.\2.self_attn.out_proj."),
    (r"(\w+)/layer_(\d+)/attention/linear_0/", r"\1.layers.\2.encoder_attn.q_proj."),
    (r"(\w+)/layer_(\d+)/attention/linear_2/", r"\1.layers.\2.encoder_attn.out_proj."),
    (r"encoder/conv(\d)/", r"encoder.conv\1."),
    (r"(\w+)/layer_norm/", r"\1.layer_norm."),
    (r"(\w+)/position_encodings/", r"\1.embed_positions."),
    (r"decoder/embeddings/", r"decoder.embed_tokens."),
]
_LEAVES = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias", "encodings": "weight"}
_FUSED = {
    "self_attention/linear_0": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "attention/linear_1": ("encoder_attn", ("k_proj", "v_proj")),
}


def whisper(tensors: Ctranslate2Tensors) -> Mapping[str, torch.Tensor]:
    """A Whisper model's weights under the names of transformers' WhisperForConditionalGeneration.

    CTranslate2 fuses q, k and v; k has no bias in Whisper, so that its part of the fused bias is dropped.

    Raises:
        ImageError: it is no Whisper model, or its weights are quantized.
    """
    if tensors.spec != "WhisperSpec":
        raise ImageError(str(tensors.path), f"is a {tensors.spec!r:.100} and no Whisper model")
    loaders: dict[str, Callable[[], torch.Tensor]] = {}
    for name in tensors:
        block, _, leaf = name.rpartition("/")
        if leaf == "weight_scale":
            raise ImageError(str(tensors.path), "has quantized weights", "use one with float16 weights")
        if leaf not in _LEAVES or name == "decoder/projection/weight":
            continue
        fused = re.fullmatch(r"(\w+)/layer_(\d+)/(.+)", block)
        if fused and fused[3] in _FUSED:
            attention, parts = _FUSED[fused[3]]
            for number, part in enumerate(parts):
                if (part, leaf) != ("k_proj", "bias"):
                    target = f"model.{fused[1]}.layers.{fused[2]}.{attention}.{part}.{leaf}"
                    loaders[target] = functools.partial(_part, tensors, name, number, len(parts))
            continue
        for pattern, replacement in _BLOCKS:
            if match := re.fullmatch(pattern, f"{block}/"):
                loaders[f"model.{match.expand(replacement)}{_LEAVES[leaf]}"] = functools.partial(
                    tensors.__getitem__, name
                )
                break
    loaders["proj_out.weight"] = functools.partial(tensors.__getitem__, "decoder/embeddings/weight")
    return LazyTensors(tensors.path, _WHAT, loaders)


def _part(tensors: Ctranslate2Tensors, name: str, number: int, parts: int) -> torch.Tensor:
    whole = tensors[name]
    rows = whole.shape[0] // parts
    return whole[number * rows : (number + 1) * rows]
