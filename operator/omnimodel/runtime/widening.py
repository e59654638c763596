"""Linear layers of bfloat16 on processors that do not compute in it: several rows at once are computed in float32.

Without such instructions torch reads all weights anew for each row of its input, so that a batch takes as long as its
requests one after another, and a prompt as long as an answer of its length. Here weights are widened piece by piece,
which takes little memory, and each piece is multiplied with all rows. Source: measured, docs/memory.md.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from omnimodel.memory.devices.processor import computes_bfloat16

_ROWS = 4  # from so many on it is faster than torch's own way, at every size that was measured
_PIECE = 1 << 20  # numbers of a piece of the weights: 4 MiB in float32


def widen(module: torch.nn.Module) -> None:
    """Have the linear layers of a model on the processor compute so, where that is faster."""
    if computes_bfloat16():
        return
    for part in module.modules():
        if type(part) is torch.nn.Linear and _is_plain(part.weight):
            part.forward = partial(_forward, part)  # type: ignore[method-assign]  # hooks stay as they are


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and type(weight) in {torch.Tensor, torch.nn.Parameter}


def _forward(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    rows = inputs.reshape(-1, layer.in_features)
    if len(rows) < _ROWS:
        return functional.linear(inputs, layer.weight, layer.bias)
    rows = rows.float()
    found = torch.empty(len(rows), layer.out_features, dtype=inputs.dtype)
    step = max(1, _PIECE // layer.in_features)
    for first in range(0, layer.out_features, step):
        piece = slice(first, first + step)
        bias = None if layer.bias is None else layer.bias[piece].float()
        found[:, piece] = functional.linear(rows, layer.weight[piece].float(), bias)
    return found.reshape(*inputs.shape[:-1], layer.out_features)
