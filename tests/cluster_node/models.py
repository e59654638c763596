"""Models of these tests, whose weights are in the pool's volume: one that computes, one that tries what it must not."""

from __future__ import annotations

import json
from typing import Any

import yaml

from cli.linear import MANIFEST, QUESTION

ANSWER = [6.0, 22.0]

# Each question is a piece of Python; the answer is what it leaves in `answer`, or the error it dies of.
PROBER = """\
import json
from typing import Annotated
import numpy as np
import torch
from omnimodel.runtime.sdk import Model

HELD = []

class Prober(Model):
    def build(self):
        return torch.nn.Linear(4, 2)

    def predict(self, code: str) -> str:
        names = {"answer": None, "HELD": HELD}
        try:
            exec(code, names)
        except Exception as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"})
        return json.dumps({"answer": names["answer"]})
"""


def linear(name: str, pool: str = "default", *, shift: float = 0.0, sleep_seconds: float = 0.0, **spec: Any) -> Any:
    """A linear layer: the answer to [1, 1, 1, 1] is [6, 22], both plus the shift."""
    text = MANIFEST.format(
        name=name, weights="X", shift=shift, expected=[value + shift for value in ANSWER], sleep_seconds=sleep_seconds
    )
    manifest = yaml.safe_load(text)
    manifest["spec"] |= {"pool": pool, "source": {"volume": {"name": "weights", "subPath": "linear.safetensors"}}}
    manifest["spec"] |= spec
    return manifest


def prober(name: str, pool: str = "default", **spec: Any) -> Any:
    """A model that executes what it is asked, to see from within what its sandbox allows."""
    manifest = linear(name, pool)
    del manifest["spec"]["probe"]
    runtime = manifest["spec"]["runtime"]
    runtime["handler"] = {"entry": "prober:Prober", "files": {"prober.py": PROBER}}
    manifest["spec"] |= {**spec, "runtime": {**runtime, **spec.get("runtime", {})}}
    return manifest


def code(text: str) -> dict[str, Any]:
    """A question to a prober."""
    return {"inputs": [{"name": "code", "datatype": "BYTES", "shape": [1], "data": [text]}]}


def said(values: Any) -> Any:
    """What a prober answered; an error as its text."""
    body = json.loads(values[0])
    return body.get("answer", body.get("error"))


__all__ = ["ANSWER", "QUESTION", "code", "linear", "prober", "said"]
