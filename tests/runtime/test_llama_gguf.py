"""Llama models in GGUF files: our reader gives the library's model, to the bit, and leaves to it what it does not know."""

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from omnimodel.errors import ImageError
from omnimodel.runtime.engines import llama_gguf
from omnimodel.runtime.engines.llama_gguf import configuration, renamed

HIDDEN, HEADS, KEPT_HEADS, WIDE, WORDS, LAYERS = 64, 4, 2, 96, 40, 2
HEAD = HIDDEN // HEADS


def write(path, *, tied=True, architecture="llama", leave_out=(), more=None):
    """A tiny model with random weights."""
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEPT_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(WORDS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (more or {}).items():
        writer.add_string(key, value)
    rng = np.random.default_rng(3)
    shapes = {"token_embd.weight": (WORDS, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (WORDS, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KEPT_HEADS * HEAD, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KEPT_HEADS * HEAD, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (WIDE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (WIDE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, WIDE),
        }
    for name, shape in shapes.items():
        if name not in leave_out:
            writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False], ids=["tied output weights", "output weights of its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_the_one_that_the_library_loads(tmp_path, tied, dtype):
    path = write(tmp_path / "tiny.gguf", tied=tied)
    ours = llama_gguf.load("source tiny", path, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    expected = {name: value.to(dtype) for name, value in theirs.state_dict().items()}
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    said = theirs.config.to_dict()
    assert {**ours.config.to_dict(), "dtype": None} == {
        **{name: value for name, value in said.items() if name not in ("_model_name_or_path", "quantization_config")},
        "_name_or_path": ours.config.to_dict()["_name_or_path"],
        "dtype": None,
    }
    ids = torch.tensor([[1, 5, 7, 9]])
    if dtype is torch.float32:
        with torch.inference_mode():
            assert torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits)


@pytest.mark.parametrize(
    "how",
    [{"architecture": "qwen2"}, {"more": {"llama.rope.scaling.type": "yarn"}}],
    ids=["another architecture", "a setting a plain Llama has not"],
)
def test_what_is_no_plain_llama_is_left_to_the_library(tmp_path, how):
    assert llama_gguf.load("source tiny", write(tmp_path / "tiny.gguf", **how), torch.float32) is None


def test_a_file_without_a_tensor_that_the_model_needs_is_refused_by_its_name(tmp_path):
    path = write(tmp_path / "tiny.gguf", leave_out={"blk.1.ffn_up.weight"})
    with pytest.raises(ImageError, match=r"no values for model\.layers\.1\.mlp\.up_proj\.weight"):
        llama_gguf.load("source tiny", path, torch.float32)


def test_a_number_that_is_none_leaves_the_file_to_the_library():
    assert configuration({"general.architecture": "llama", "llama.block_count": "many"}, tied=True) is None


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.x.attn_q.weight", "rope_freqs.weight", "blk"])
def test_a_tensor_that_a_plain_llama_has_not_has_no_name(name):
    assert renamed(name) is None
