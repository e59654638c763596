"""The SDK's engine, with a tiny real model: published, started, woken, evicted, woken elsewhere."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.children import handler, spec

TINY = """
from typing import Annotated
import numpy as np
import torch
from omnimodel.runtime.sdk import Model, Tensor

class Handler(Model):
    def build(self):
        module = torch.nn.Module()
        module.layer = torch.nn.Linear(3, 2)
        module.register_buffer("scale", torch.arange(2.0) + 1, persistent=False)
        return module


    def predict(self, x: Annotated[np.ndarray, Tensor("FP32", (-1, 3))]) -> dict[str, np.ndarray]:
        y = self.module.layer(torch.from_numpy(x)) * self.module.scale
        return {"y": y.numpy()}
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    rng = np.random.default_rng(1)
    weights = {"layer.weight": rng.standard_normal((2, 3), np.float32), "layer.bias": np.float32([1, 2])}
    save_file(weights, folder / "model.safetensors")
    return folder


def ask(values, shape, datatype="FP32", name="x"):
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": values}]}


async def test_answers_with_its_published_weights_in_other_frames_after_each_wake(serving, source, frames):
    child = await serving(spec(handler=handler(TINY)), source)
    status, first = await child.post("/v2/models/tiny/infer", ask([1, 2, 3, 4, 5, 6], [2, 3]))
    assert status == 200, first
    assert first["outputs"][0]["shape"] == [2, 2]
    for _ in range(3):
        await frames.evict(child, child.frames)
        status, refused = await child.post("/v2/models/tiny/infer", ask([1, 2, 3], [1, 3]))
        assert (status, refused["code"]) == (503, "not_resident")
        child.frames = await frames.wake(child)
        assert (await child.post("/v2/models/tiny/infer", ask([1, 2, 3, 4, 5, 6], [2, 3])))[1] == first
