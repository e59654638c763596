"""The smallest model that is real: a linear layer with weights in a file, served by the SDK in a process of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

MANIFEST = """\
apiVersion: omnimodel.io/v1alpha1
kind: OmniModel
metadata:
  name: {name}
spec:
  source:
    path: {weights}
  runtime:
    engine: python
    task: infer
    dtype: float32
    handler:
      entry: linear:Linear
      files:
        linear.py: |
          import time
          from typing import Annotated
          import numpy as np
          import torch
          from omnimodel.runtime.sdk import Model, Tensor

          class Linear(Model):
              def build(self):
                  return torch.nn.Linear(4, 2)

              def predict(self, x: Annotated[np.ndarray, Tensor("FP32", (-1, 4))]) -> dict[str, torch.Tensor]:
                  print("asked", flush=True)
                  time.sleep({sleep_seconds})
                  return {{"y": self.module(torch.from_numpy(np.array(x))) + {shift}}}
  probe:
    path: /v2/models/{name}/infer
    json:
      inputs: [{{name: x, datatype: FP32, shape: [1, 4], data: [1, 1, 1, 1]}}]
    expect:
      - {{at: /outputs/0/data, near: {expected}, within: 0.001}}
"""
POOL = """\
apiVersion: omnimodel.io/v1alpha1
kind: OmniPool
metadata: {name: default}
spec:
  device: {type: cpu, memory: 512Mi}
"""
WEIGHT = np.arange(8, dtype=np.float32).reshape(2, 4)
QUESTION = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}


def write_weights(path: Path) -> None:
    """Its weights: the answer to [1, 1, 1, 1] is [6, 22]."""
    save_file({"weight": WEIGHT, "bias": np.zeros(2, dtype=np.float32)}, str(path))
    path.chmod(0o644)  # a model has a user of its own


def write_linear(
    folder: Path, name: str, weights: Path, *, shift: float = 0.0, sleep_seconds: float = 0.0, probe: bool = True
) -> Path:
    """The manifest of one such model; one that is slow need not be asked before it counts as ready."""
    path = folder / f"{name}.yaml"
    expected = [float(value + shift) for value in WEIGHT.sum(axis=1)]
    text = MANIFEST.format(name=name, weights=weights, shift=shift, expected=expected, sleep_seconds=sleep_seconds)
    part = path.with_suffix(".part")
    part.write_text(text if probe else text.partition("  probe:")[0])
    part.replace(path)
    return path
