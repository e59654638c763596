"""Behind a copy, no part of a model reads a byte that has not arrived."""

from __future__ import annotations

import pytest
import torch
import transformers

from omnimodel.memory.image import ImageWriter, read_index
from omnimodel.runtime import publishing
from omnimodel.runtime.binding import bind
from omnimodel.runtime.generation.batching import Batching
from omnimodel.runtime.generation.sampling import Sampling
from omnimodel.runtime.pipelining import LAYERED, wait_before_use

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
SIZES = SMALL | {"head_dim": 16, "pad_token_id": 0}
EXPERTS = SIZES | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
OTHERS = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "BertModel": SMALL,
    "GPTNeoXForCausalLM": SMALL,
}


class ArrivingWindow:
    """A window into which an image arrives when it is waited for; until then it is full of NaN."""

    def __init__(self, image: bytes) -> None:
        self.image = torch.frombuffer(bytearray(image), dtype=torch.uint8)
        self.memory = torch.full((len(image),), 0xFF, dtype=torch.uint8)
        self.waits: list[int] = []

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        return self.memory[offset : offset + size]

    def wait(self, end_offset: int) -> None:
        self.waits.append(end_offset)
        self.memory[:end_offset] = self.image[:end_offset]

    def settle(self) -> None:
        self.wait(len(self.image))


def build(name: str, **options):
    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(**options), attn_implementation="sdpa").eval()


def arriving(tmp_path, name: str, **options):
    """A model in memory, and one whose image arrives as it is waited for, with its window."""
    torch.manual_seed(3)
    ordinary = build(name, **options)
    with ImageWriter(tmp_path, 4096) as writer:
        publishing._pack("model", ordinary, writer, None, "", lambda *_: None)
    index = read_index(tmp_path)
    window = ArrivingWindow((tmp_path / "image").read_bytes())
    with torch.device("meta"):
        module = build(name, **options)
    bind("model", module, index, window)
    wait_before_use(module, index, window)
    return ordinary, module, window


def behind_a_copy(tmp_path, name: str, **options):
    """The outputs of both, and the window."""
    ordinary, module, window = arriving(tmp_path, name, **options)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        return ordinary(tokens)[0], module(tokens)[0], window


TIED = {"CohereForCausalLM", "GemmaForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"}


@pytest.mark.parametrize(
    ("name", "tied"),
    [*((name, False) for name in sorted(LAYERED)), *((name, True) for name in sorted(TIED))],
)
def test_a_layer_waits_for_its_own_bytes_only(tmp_path, name, tied):
    sizes = EXPERTS if "Mo" in name or name in {"MixtralForCausalLM", "OlmoeForCausalLM"} else SIZES
    expected, found, window = behind_a_copy(tmp_path, name, tie_word_embeddings=tied, **sizes)
    assert torch.equal(found, expected)
    layers = [end for end in window.waits if end > window.waits[1]]
    assert layers == sorted(layers)
    whole = len(window.image)
    assert [end for end in window.waits[:4] if end > whole / 2] == []
    assert max(window.waits) > 0.9 * whole


def test_a_handler_s_own_class_of_a_known_name_is_not_that_architecture():
    class LlamaForCausalLM(torch.nn.Linear):
        pass

    window = ArrivingWindow(bytes(8))
    module = LlamaForCausalLM(1, 1)
    wait_before_use(module, None, window)
    module(torch.ones(1))
    assert window.waits == [8]


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_model_whose_code_was_not_read_for_it_waits_for_the_whole_image(tmp_path, name):
    expected, found, window = behind_a_copy(tmp_path, name, **OTHERS[name])
    assert torch.equal(found, expected)
    assert window.waits[0] == len(window.image)


async def generated(module) -> list[int]:
    batching = Batching("model", module, 64, 2)
    batching.resume()
    try:
        steps = [step async for step in batching.generate([1, 2, 3, 4], 8, [], Sampling(temperature=0))]
    finally:
        batching.stop()
    return [token for step in steps for token in step.tokens][-8:]


@pytest.mark.parametrize(
    ("name", "options"), [("LlamaForCausalLM", SMALL), ("Qwen3MoeForCausalLM", EXPERTS), ("ApertusForCausalLM", SIZES)]
)
async def test_the_batch_of_text_generation_waits_as_well(tmp_path, name, options):
    ordinary, module, window = arriving(tmp_path, name, **options)
    assert await generated(module) == await generated(ordinary)
    assert (window.waits[0] == len(window.image)) == (name not in LAYERED)
