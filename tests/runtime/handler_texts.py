"""Handlers of the tests, as people write them, and what they are asked."""

HEAD = """
import sys, os, time
from typing import Annotated
from collections.abc import Iterator
import numpy as np
import torch
from omnimodel.runtime.sdk import Model, Tensor, Audio, RequestError
Array = Annotated[np.ndarray, Tensor("FP32", (-1, 3))]
"""
GOOD = (
    HEAD
    + """
class Handler(Model):
    def build(self):
        return torch.nn.Linear(3, 2)
    def predict(self, x: Array) -> dict:
        return {"y": self.module(torch.from_numpy(x)).numpy()}
"""
)


def ask(values=(1, 2, 3), name="x", datatype="FP32", shape=(1, 3)):
    return {"inputs": [{"name": name, "datatype": datatype, "shape": list(shape), "data": list(values)}]}


def methods(**bodies):
    """GOOD with some methods replaced."""
    text = HEAD + "class Handler(Model):\n"
    parts = {
        "build": "def build(self):\n        return torch.nn.Linear(3, 2)",
        "predict": 'def predict(self, x: Array) -> dict:\n        return {"y": self.module(torch.from_numpy(x)).numpy()}',
        **bodies,
    }
    return text + "".join(f"    {part}\n" for part in parts.values())
