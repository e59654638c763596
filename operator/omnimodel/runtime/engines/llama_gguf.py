"""Llama models out of a GGUF file, read with our own reader: the transformers library takes ten times as long.

Source: the names and the order of rows are those of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnimodel.runtime import publishing

if TYPE_CHECKING:
    from omnimodel.memory.readers.gguf import GgufTensors

_NUMBERS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_NEEDED = frozenset(_NUMBERS) - {"rope.dimension_count", "rope.freq_base", "vocab_size"}
_TOKENS = ("bos", "eos", "unknown", "padding")
_TOKEN_NAMES = {"unknown": "unk", "padding": "pad"}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def load(subject: str, path: Path, dtype: torch.dtype) -> torch.nn.Module | None:
    """The model with its weights, on the CPU.

    Args:
        subject: the source, for messages.
        path: of the file.
        dtype: of the weights.

    Returns:
        None when it is another architecture, or has something that a plain Llama has not; the library reads those.

    Raises:
        ImageError: the file is damaged, or its tensors do not fit what it says of itself.
    """
    from omnimodel.memory.readers import gguf

    tensors = gguf.read(path)
    settings = configuration(tensors.metadata, tied="output.weight" not in tensors)
    names = {name: renamed(name) for name in tensors}
    if settings is None or None in names.values():
        return None
    from transformers import LlamaConfig, LlamaForCausalLM

    with publishing.without_values():
        module: torch.nn.Module = LlamaForCausalLM._from_config(  # noqa: SLF001 the library's way, without weights
            LlamaConfig(**settings), dtype=dtype, attn_implementation="sdpa"
        )
    publishing.assign(subject, module, _weights(tensors, names, settings, dtype))
    return module


def configuration(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any] | None:
    """What the library calls the model's sizes; None when it is no plain Llama.

    Args:
        metadata: of the file.
        tied: whether the file has no output weights of its own.
    """
    if metadata.get("general.architecture") != "llama" or "mistral" in str(metadata.get("general.name", "")).lower():
        return None
    said = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    numbers = (int, float)
    if not said.keys() >= _NEEDED or not all(key in _NUMBERS and type(said[key]) in numbers for key in said):
        return None
    settings = {_NUMBERS[key]: value for key, value in said.items()}
    if "vocab_size" not in settings:
        settings["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens", ()))
    for token in _TOKENS:
        value = metadata.get(f"tokenizer.ggml.{token}_token_id")
        if isinstance(value, int):
            settings[f"{_TOKEN_NAMES.get(token, token)}_token_id"] = value
    return {**settings, "tie_word_embeddings": tied}


def renamed(name: str) -> str | None:
    """The library's name of a tensor; None when a plain Llama has no such tensor."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    block, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or leaf not in _IN_LAYER:
        return None
    return f"model.layers.{layer}.{_IN_LAYER[leaf]}"


def _weights(
    tensors: GgufTensors, names: Mapping[str, str | None], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    from omnimodel.memory.readers.gguf import unpermute

    heads = {
        ".attn_q.weight": settings["num_attention_heads"],
        ".attn_k.weight": settings["num_key_value_heads"],
    }
    found: dict[str, torch.Tensor] = {}
    for name, new in names.items():
        assert new is not None
        values = tensors[name]
        for ending, count in heads.items():
            if name.endswith(ending):
                values = unpermute(values, count)
        found[new] = values.to(dtype).contiguous()
    return found
