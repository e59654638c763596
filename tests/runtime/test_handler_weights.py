"""How the weights of handlers are published and bound."""

import json

import numpy as np

from runtime.children import handler, spec
from runtime.handler_texts import GOOD, HEAD, ask, methods


async def test_tied_weights_and_recurrent_layers_are_bound(serving, tmp_path):
    """A recurrent layer keeps a list of its weights, and a tied weight is one tensor under two names."""
    folder = tmp_path / "rnn"
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = {
        "a.weight": rng.standard_normal((4, 4), np.float32),
        "rnn.weight_ih_l0": rng.standard_normal((12, 4), np.float32),
        "rnn.weight_hh_l0": rng.standard_normal((12, 4), np.float32),
        "rnn.bias_ih_l0": rng.standard_normal(12, np.float32),
        "rnn.bias_hh_l0": rng.standard_normal(12, np.float32),
    }
    np.savez(folder / "weights.npz", **arrays)
    text = HEAD + (
        "class Handler(Model):\n    def build(self):\n        m = torch.nn.Module()\n"
        "        m.a = torch.nn.Linear(4, 4, bias=False)\n        m.b = torch.nn.Linear(4, 4, bias=False)\n"
        "        m.b.weight = m.a.weight\n        m.rnn = torch.nn.GRU(4, 4, batch_first=True)\n        return m\n"
        "    def predict(self, x: Annotated[np.ndarray, Tensor('FP32', (1, 4))]) -> dict:\n"
        "        y = self.module.b(self.module.a(torch.from_numpy(x)))\n"
        "        return {'y': self.module.rnn(y[None])[1]}\n"
    )
    child = await serving(spec(handler=handler(text)), folder)
    index = json.loads((child.image / "index.json").read_text())
    assert ["a.weight", "b.weight"] in [tensor["names"] for tensor in index["tensors"]]
    _, answer = await child.post("/v2/models/tiny/infer", ask([1, 2, 3, 4], shape=(1, 4)))
    import torch

    torch.set_num_threads(1)
    gru = torch.nn.GRU(4, 4, batch_first=True)
    gru.load_state_dict({k[4:]: torch.from_numpy(v) for k, v in arrays.items() if k.startswith("rnn.")})
    weight = torch.from_numpy(arrays["a.weight"])
    with torch.inference_mode():
        expected = gru((torch.tensor([[1.0, 2, 3, 4]]) @ weight.T @ weight.T)[None])[1]
    np.testing.assert_allclose(answer["outputs"][0]["data"], expected.flatten(), rtol=1e-5)


async def test_an_explicit_dtype_casts_and_auto_keeps_what_build_makes(new_child, source, tmp_path):
    half = methods(build="def build(self):\n        return torch.nn.Linear(3, 2, dtype=torch.float16)")
    for dtype, text, expected in (("bfloat16", GOOD, "bfloat16"), ("auto", GOOD, "float32"), ("auto", half, "float16")):
        image = tmp_path / f"{dtype}-{expected}"
        await new_child().publish(spec(handler=handler(text), dtype=dtype), source, image, "bfloat16")
        index = json.loads((image / "index.json").read_text())
        assert {tensor["dtype"] for tensor in index["tensors"]} == {expected}
