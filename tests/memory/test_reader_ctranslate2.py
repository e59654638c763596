"""CTranslate2 models: Whisper under the names of transformers, hostile ones are refused by name."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from memory.weight_files import (
    F32,
    ct2_bytes,
    floats,
)
from omnimodel.errors import ImageError
from omnimodel.memory.readers import ctranslate2


def ct2_variable(kind: int = 0, shape: list[int] | None = None, stored: bytes = F32) -> dict:
    return {"a": (kind, [4] if shape is None else shape, stored)}


HOSTILE_CT2 = {
    "version 4": ct2_bytes(ct2_variable(), {}, version=4),
    "unknown type": ct2_bytes(ct2_variable(kind=9), {}),
    "shape larger than its bytes": ct2_bytes(ct2_variable(shape=[5]), {}),
    "shape that overflows": ct2_bytes(ct2_variable(shape=[(1 << 32) - 1] * 8), {}),
    "two hundred dimensions": ct2_bytes(ct2_variable(shape=[1] * 200), {}),
    "alias to nothing": ct2_bytes(ct2_variable(), {"b": "c"}),
    "alias of a variable's name": ct2_bytes(ct2_variable(), {"a": "a"}),
    "bytes left over": ct2_bytes(ct2_variable(), {}) + b"x",
    "a billion variables": struct.pack("<I", 6) + b"\2\0a\0" + struct.pack("<II", 3, 1 << 30) + bytes(50),
    "name without an end": struct.pack("<I", 6) + b"\2\0ab" + struct.pack("<II", 3, 0) + bytes(4),
    "name behind the end": struct.pack("<I", 6) + b"\xff\xff" + bytes(20),
}


@pytest.mark.parametrize("name", HOSTILE_CT2)
def test_hostile_ctranslate2(tmp_path, name):
    (tmp_path / "model.bin").write_bytes(HOSTILE_CT2[name])
    with pytest.raises(ImageError, match=r"model\.bin"):
        ctranslate2.read(tmp_path / "model.bin")


def test_whisper_weights_get_the_names_of_transformers(tmp_path):
    width = 2
    square = floats(width, width)
    fused, bias = floats(3 * width, width, seed=3), floats(3 * width, seed=4)
    variables = {
        "encoder/layer_0/self_attention/linear_0/weight": (0, [6, 2], fused.tobytes()),
        "encoder/layer_0/self_attention/linear_0/bias": (0, [6], bias.tobytes()),
        "decoder/layer_1/attention/linear_1/weight": (0, [4, 2], fused[:4].tobytes()),
        "decoder/layer_1/attention/layer_norm/gamma": (0, [2], bias[:2].tobytes()),
        "decoder/layer_1/ffn/linear_0/weight": (0, [2, 2], square.tobytes()),
        "encoder/position_encodings/encodings": (0, [2, 2], square.tobytes()),
        "decoder/embeddings/weight": (0, [2, 2], square.tobytes()),
        "decoder/num_heads": (2, [], b"\6\0"),
    }
    path = tmp_path / "model.bin"
    path.write_bytes(ct2_bytes(variables, {"decoder/projection/weight": "decoder/embeddings/weight"}))
    found = ctranslate2.whisper(ctranslate2.read(path))
    assert set(found) == {
        "model.encoder.layers.0.self_attn.q_proj.weight",
        "model.encoder.layers.0.self_attn.k_proj.weight",
        "model.encoder.layers.0.self_attn.v_proj.weight",
        "model.encoder.layers.0.self_attn.q_proj.bias",
        "model.encoder.layers.0.self_attn.v_proj.bias",
        "model.decoder.layers.1.encoder_attn.k_proj.weight",
        "model.decoder.layers.1.encoder_attn.v_proj.weight",
        "model.decoder.layers.1.encoder_attn_layer_norm.weight",
        "model.decoder.layers.1.fc1.weight",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_tokens.weight",
        "proj_out.weight",
    }
    np.testing.assert_array_equal(found["model.encoder.layers.0.self_attn.v_proj.bias"].numpy(), bias[4:])
    np.testing.assert_array_equal(found["model.decoder.layers.1.encoder_attn.k_proj.weight"].numpy(), fused[:2])
    path.write_bytes(ct2_bytes(ct2_variable(), {}, spec="TransformerSpec"))
    with pytest.raises(ImageError, match="no Whisper"):
        ctranslate2.whisper(ctranslate2.read(path))
