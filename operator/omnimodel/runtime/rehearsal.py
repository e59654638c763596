"""What every model's process does at its start, done once for nobody: the pages that it touches are its own from then.

A spare does it before it is told whose it will be (see `spare`). Nothing stays of it but memory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import tempfile
import threading
from typing import Any

import torch
from aiohttp import web

from omnimodel.runtime import signature, tasks
from omnimodel.runtime.application import Traffic, application
from omnimodel.runtime.engines.own import make_model, trim_heap
from omnimodel.runtime.generation.serving import TextGeneration  # noqa: F401 - loaded late otherwise

_MODULE = "omnimodel_rehearsed"
_HANDLER = """
import torch
from torch import nn
from omnimodel.runtime.sdk import Model

class Handler(Model):
    def build(self):
        return nn.Sequential(
            nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.LayerNorm(2),
            nn.Embedding(2, 2), nn.LSTM(2, 2), nn.ReLU(), nn.Dropout(), nn.ModuleList([nn.GELU()]),
        )

    def predict(self, text: str, number: float = 0.5) -> dict:
        return {}
"""


def rehearse() -> None:
    """Make a handler and its module, and serve it to nobody for a moment."""
    path, finders = list(sys.path), list(sys.meta_path)
    try:
        _build()
        asyncio.run(_serve())
        gc.collect()
        trim_heap()
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        sys.modules.pop(_MODULE, None)


def _build() -> None:
    handler = {"entry": f"{_MODULE}:Handler", "files": {f"{_MODULE}.py": _HANDLER}}
    spec = {"engine": "python", "task": "infer", "model": {"namespace": "default", "name": "none"}, "handler": handler}
    model = make_model(spec, "auto", "host")
    with torch.device("meta"), torch.no_grad():
        module = model.build()
    assert module is not None
    predict: Any = getattr(model, "predict", None)
    for part in module.modules():
        for name, tensor in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(torch.empty_like(tensor), requires_grad=False))
    tasks.describe("none", "python", "infer", signature.read(predict))


async def _serve() -> None:
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(folder, "socket"))
        runner = web.AppRunner(
            application(Traffic("none", 1), []), handler_cancellation=True, access_log=None, handle_signals=False
        )
        await runner.setup()
        await web.SockSite(runner, listener).start()
        await runner.cleanup()
