"""Linear layers of bfloat16 where the processor does not compute in it."""

from __future__ import annotations

import pytest
import torch

from omnimodel.runtime import widening
from omnimodel.runtime.widening import widen


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(40, 24)
        self.up = torch.nn.Linear(24, 56)
        self.down = torch.nn.Linear(56, 24, bias=False)
        self.head = torch.nn.Linear(24, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.up(self.words(ids)))))


@pytest.fixture
def narrow(monkeypatch):
    """A processor without bfloat16, and pieces of a few rows."""
    monkeypatch.setattr(widening, "computes_bfloat16", lambda: False)
    monkeypatch.setattr(widening, "_PIECE", 5 * 24)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 1), (2, 7), (1, 0)], ids=str)
@torch.inference_mode()
def test_it_computes_what_float32_does_of_the_same_weights(narrow, shape):
    torch.manual_seed(5)
    module = Tied().bfloat16().eval()
    exact = Tied().eval()
    exact.load_state_dict(module.state_dict())
    ids = torch.randint(0, 40, shape)
    widen(module)
    found = module(ids)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact(ids), rtol=0.02, atol=0.02)
    assert module.head.weight is module.words.weight


@torch.inference_mode()
def test_weights_are_read_where_they_lie_at_each_call(narrow):
    layer = torch.nn.Linear(24, 56, bias=False).bfloat16().eval()
    widen(layer)
    rows = torch.randn(6, 24).bfloat16()
    before = layer(rows)
    layer.weight.data.neg_()  # as another image in the same frames
    assert torch.equal(layer(rows), -before)


def test_others_are_left_alone(narrow, monkeypatch):
    class Own(torch.nn.Linear):
        pass

    wide, own, layer = torch.nn.Linear(8, 8), Own(8, 8).bfloat16(), torch.nn.Linear(8, 8).bfloat16()
    for module in (wide, own):
        widen(module)
        assert "forward" not in vars(module)
    monkeypatch.setattr(widening, "computes_bfloat16", lambda: True)
    widen(layer)
    assert "forward" not in vars(layer)
