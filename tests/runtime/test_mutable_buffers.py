"""Buffers that a forward pass writes to: a process's own, and kept over an evict. All others can only be read."""

import aiohttp
import pytest

from runtime.children import CommandFailed, handler, spec
from runtime.handler_texts import HEAD

PATH = "/v2/models/tiny/infer"
ASK = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["?"]}]}


def counting(mutable: str) -> dict:
    """A handler that counts its requests in a buffer, from 5 on."""
    text = f"""
class Handler(Model):
    mutable = {mutable}
    def build(self):
        module = torch.nn.Linear(3, 2)
        module.inner = torch.nn.Module()
        module.inner.register_buffer("count", torch.full((2,), 5), persistent=False)
        return module
    def predict(self, x: str) -> dict[str, float]:
        self.module.inner.count += 1
        return {{"count": float(self.module.inner.count[1]), "weight": float(self.module.weight.sum())}}
"""
    return spec(handler=handler(HEAD + text))


async def said(child) -> tuple[int, int]:
    status, answer = await child.post(PATH, ASK)
    assert status == 200, answer
    values = {output["name"]: output["data"][0] for output in answer["outputs"]}
    return values["count"], values["weight"]


async def test_what_was_published_is_there_at_first_and_what_was_written_stays_over_an_evict(serving, source, frames):
    first = await serving(counting('("inner.count",)'), source)
    assert [await said(first), await said(first)] == [(6, 6), (7, 6)]
    for count in (8, 9):
        await frames.evict(first, first.frames)
        first.frames = await frames.wake(first)
        assert await said(first) == (count, 6)


@pytest.mark.parametrize(
    ("mutable", "said"),
    [('("count",)', "count"), ('("weight",)', "weight"), ('("inner.count", "inner.sum")', r"inner\.sum")],
    ids=["no buffer of that name", "a parameter", "one of two"],
)
async def test_what_is_no_buffer_is_named(serving, source, mutable, said):
    with pytest.raises(CommandFailed, match=f"mutable names {said}, which is no buffer"):
        await serving(counting(mutable), source)


async def test_who_writes_to_another_buffer_ends(serving, source):
    child = await serving(counting("()"), source)
    with pytest.raises(aiohttp.ClientError):
        await child.post(PATH, ASK)
    await child.ended()
