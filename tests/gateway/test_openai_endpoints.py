"""The OpenAI-compatible endpoints: what goes to the model, what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from gateway.standin import RECORDED
from gateway.world import World, until

CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hello"}]}


def client_of(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0)


async def test_the_official_client_talks_to_every_endpoint(world: World) -> None:
    async with client_of(world) as client:
        chat = await client.chat.completions.create(**CHAT)
        assert chat.choices[0].message.content == "hello"

        stream = await client.chat.completions.create(**CHAT, stream=True, extra_body={"chunks": 3, "tag": "t"})
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["t0 ", "t1 ", "t2 "]

        embeddings = await client.embeddings.create(model="minilm", input=["a", "b"], encoding_format="float")
        assert [row.embedding for row in embeddings.data] == [[0.5, 0.25]] * 2

        speech = await client.audio.speech.create(model="piper", input="hello", voice="a")
        assert speech.content == b"RIFFhello"

        text = await client.audio.transcriptions.create(model="whisper", file=("a.wav", b"RIFF", "audio/wav"))
        assert len(text.text) == 64

        models = await client.models.list()
        assert [model.id for model in models.data] == ["minilm", "piper", "resnet", "smollm2", "whisper"]
        assert (await client.models.retrieve("HuggingFaceTB/SmolLM2:135m")).id == "smollm2"


async def test_a_stream_passes_byte_for_byte(world: World) -> None:
    """opencode#43328: a proxy that parsed and re-wrote chunks broke tool calls and lost the usage."""
    body = {**CHAT, "stream": True}
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(world.process.socket))) as direct:
        response = await direct.post("http://model/v1/chat/completions", json=body)
        engine_side = await response.read()
    client_side = await (await world.post("/v1/chat/completions", json=body)).read()

    assert client_side == engine_side == b"".join(RECORDED)


async def test_a_body_passes_byte_for_byte(world: World) -> None:
    body = b' {"model" : "smollm2",\n "messages":[{"role":"user","content":"\\u00e4\xc3\xa4"}], "seed": 1e2 }\n'
    await world.post("/v1/chat/completions", data=body)

    assert world.process.bodies == [body]


@pytest.mark.parametrize("name", ["gpt-4o", "HuggingFaceTB/SmolLM2:135m"])
async def test_an_alias_reaches_the_model_under_its_own_name(world: World, name: str) -> None:
    response = await world.post("/v1/chat/completions", json={**CHAT, "model": name})

    assert response.status == 200
    assert json.loads(world.process.bodies[0]) == CHAT
    assert response.headers["Omni-Model"] == "smollm2"


async def test_an_alias_in_the_query_does_where_the_body_has_none(world: World) -> None:
    await world.post("/v1/chat/completions?model=gpt-4o", json={"messages": CHAT["messages"]})

    assert json.loads(world.process.bodies[0]) == CHAT


async def test_an_alias_sets_what_the_request_does_not(world: World) -> None:
    world.agent.change("smollm2", defaults={"gpt-4o": {"temperature": 0.5, "max_tokens": 7}})
    await world.post("/v1/chat/completions", json={**CHAT, "model": "gpt-4o", "max_tokens": 3})
    await world.post("/v1/chat/completions", json=CHAT)

    first, second = (json.loads(body) for body in world.process.bodies)
    assert first == {**CHAT, "temperature": 0.5, "max_tokens": 3}
    assert second == CHAT


async def test_a_large_body_of_an_alias_counts_with_its_copy(world: World) -> None:
    world.gateway.buffered.limit_bytes = 5 << 20
    body = {**CHAT, "model": "gpt-4o", "x": "y" * (2 << 20)}
    used = []
    opened = world.agent.open

    @asynccontextmanager
    async def seen(request: Any) -> Any:
        used.append(world.gateway.buffered.used_bytes)
        async with opened(request) as response:
            yield response

    world.agent.open = seen
    response = await world.post(CHAT_PATH, json=body)

    assert response.status == 200
    assert used[0] > 4 << 20
    assert world.gateway.buffered.used_bytes == 0
    assert (await world.post(CHAT_PATH, json={**body, "x": "y" * (3 << 20)})).status == 429


async def test_a_text_that_no_encoding_holds_survives_an_alias(world: World) -> None:
    body = b'{"model":"gpt-4o","messages":[{"role":"user","content":"\\ud800"}]}'
    response = await world.post("/v1/chat/completions", data=body)

    assert response.status == 200
    assert json.loads(world.process.bodies[0])["messages"][0]["content"] == "\ud800"


async def test_models_are_listed_with_their_tier(world: World) -> None:
    world.agent.add("hidden", unlisted=("hidden",))
    world.agent.change("smollm2", unlisted=("gpt-4o",))
    world.agent.add("broken", ready=False, tier="cold", reason="BadArtifact", message="index.json is cut off")
    listed = {entry["id"]: entry for entry in (await (await world.get("/v1/models")).json())["data"]}

    assert "hidden" not in listed
    assert listed["smollm2"]["tier"] == "resident"
    assert listed["smollm2"]["aliases"] == ["HuggingFaceTB/SmolLM2:135m"]
    assert (listed["broken"]["ready"], listed["broken"]["reason"]) == (False, "BadArtifact")
    assert (await world.get("/v1/models/hidden")).status == 200
    assert (await (await world.get("/v1/models/gpt-4o")).json())["id"] == "smollm2"


@dataclass(frozen=True)
class Refusal:
    what: str
    path: str
    body: bytes | dict[str, Any]
    status: int
    code: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()


CHAT_PATH = "/v1/chat/completions"
REFUSALS = [
    Refusal("a typo", CHAT_PATH, {**CHAT, "model": "smolm2"}, 404, "model_not_found", "did you mean smollm2"),
    Refusal("another case", CHAT_PATH, {**CHAT, "model": "GPT-4o"}, 404, "model_not_found", "did you mean gpt-4o"),
    Refusal("nothing near", CHAT_PATH, {**CHAT, "model": "q"}, 404, "model_not_found", "GET /v1/models lists"),
    Refusal("no model", CHAT_PATH, {"messages": []}, 400, "model_missing", "names no model"),
    Refusal("a model that is a number", CHAT_PATH, {"model": 4}, 400, "invalid_request", "model is no name"),
    Refusal("empty", CHAT_PATH, b"", 400, "invalid_json", "the body is empty"),
    Refusal("no JSON", CHAT_PATH, b'{"model": "smollm2",\n "x" 1}', 400, "invalid_json", "at line 2 column 6"),
    Refusal("no UTF-8", CHAT_PATH, b'{"model": "\xff"}', 400, "invalid_json", "not UTF-8 at byte 11"),
    Refusal("a list", CHAT_PATH, b"[1]", 400, "invalid_json", "the body is a list"),
    Refusal("nested without end", CHAT_PATH, b"[" * 200_000, 400, "invalid_json", "nested too deeply"),
    Refusal("a number without end", CHAT_PATH, b'{"a":' + b"9" * 5000 + b"}", 400, "invalid_json", "cannot be read"),
    Refusal(
        "an embedder asked to chat",
        CHAT_PATH,
        {**CHAT, "model": "minilm"},
        400,
        "wrong_endpoint",
        "send it to POST /v1/embeddings",
    ),
    Refusal(
        "a classifier asked to embed",
        "/v1/embeddings",
        {"model": "resnet", "input": "a"},
        400,
        "wrong_endpoint",
        "send it to POST /v2/models/resnet/infer",
    ),
    Refusal(
        "a chat model asked to speak",
        "/v1/audio/speech",
        {"model": "smollm2", "input": "a"},
        400,
        "wrong_endpoint",
        "send it to POST /v1/chat/completions",
    ),
    Refusal(
        "a form without a boundary",
        "/v1/audio/transcriptions",
        b"x",
        400,
        "invalid_content_type",
        "multipart/form-data",
    ),
    Refusal("no deadline", CHAT_PATH, CHAT, 400, "invalid_request", 'is "soon"', (("Omni-Deadline-Seconds", "soon"),)),
    Refusal("no time", CHAT_PATH, CHAT, 400, "invalid_request", 'is "0"', (("Omni-Deadline-Seconds", "0"),)),
    Refusal(
        "no priority", CHAT_PATH, CHAT, 400, "invalid_request", "interactive or background", (("Omni-Priority", "now"),)
    ),
    Refusal(
        "no such endpoint", "/v1/engines", {}, 404, "no_such_endpoint", "there is no POST /v1/engines; models answer"
    ),
    Refusal("one that others have", "/v1/responses", {}, 404, "no_such_endpoint", "POST /v1/chat/completions, /v1/co"),
    Refusal("wrong method", "/v1/models", {}, 405, "method_not_allowed", "use GET"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.what)
async def test_refused(world: World, case: Refusal) -> None:
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    response = await world.post(case.path, data=body, headers=dict(case.headers))
    error = (await response.json())["error"]

    assert response.status == case.status
    assert error["code"] == case.code
    assert case.message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not world.agent.requests, "the model was asked"


async def test_the_official_client_reads_the_errors(world: World) -> None:
    async with client_of(world) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(**{**CHAT, "model": "smolm2"})
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError):
            await client.embeddings.create(model="smollm2", input="a")


async def test_names_that_clients_type_never_become_labels(world: World) -> None:
    """aibrix#526: no metric label per typed name, and no wake."""
    for number in range(20):
        await world.post(CHAT_PATH, json={**CHAT, "model": f"typo-{number}"})
    metrics = await (await world.get("/metrics")).text()

    assert "typo" not in metrics
    assert 'omni_requests_total{model="-",outcome="refused"} 20.0' in metrics
    assert not world.agent.requests


async def test_a_refusal_of_the_model_passes_as_it_is(world: World) -> None:
    response = await world.post(CHAT_PATH, json={**CHAT, "refuse": True, "stream": True})

    assert response.status == 400
    assert (await response.json())["error"]["param"] == "temperature"


# -- limits --


async def test_a_body_over_the_limit_of_its_model_is_told_the_limit(world: World) -> None:
    world.agent.change("smollm2", request_bytes=1000)
    response = await world.post(CHAT_PATH, json={**CHAT, "x": "y" * 1000})

    assert response.status == 413
    assert "the limit is 1000 bytes" in (await response.json())["error"]["message"]
    assert not world.agent.requests


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_body_over_every_limit_is_not_read_to_its_end(world: World, declared: bool) -> None:
    for name in world.agent.lines:
        world.agent.change(name, request_bytes=100_000)
    body = b'{"model":"smollm2","x":"' + b"y" * 10_000_000 + b'"}'

    async def chunks():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    response = await world.post(CHAT_PATH, data=body if declared else chunks())

    assert response.status == 413
    assert "the limit is 100000 bytes" in (await response.json())["error"]["message"]
    assert world.gateway.buffered.used_bytes == 0


async def test_bodies_of_held_requests_are_bounded_in_all(world: World) -> None:
    world.gateway.buffered.limit_bytes = 1_000_000
    line = world.agent.add("cold", awake=False)
    body = {**CHAT, "model": "cold", "x": "y" * 400_000}
    held = [asyncio.create_task(world.post(CHAT_PATH, json=body)) for _ in range(2)]
    await until(lambda: line.waiting == 2)
    response = await world.post(CHAT_PATH, json=body)

    assert response.status == 429
    assert int(response.headers["Retry-After"]) >= 1
    line.awake.set()
    assert [(await task).status for task in held] == [200, 200]
    assert world.gateway.buffered.used_bytes == 0


async def test_a_client_that_stops_in_the_middle_of_its_body_does_not_hold_the_gateway(world: World) -> None:
    object.__setattr__(world.gateway.settings, "upload_silence_seconds", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", world.listening.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n")
    writer.close()

    assert b" 408 " in head


async def test_a_body_that_is_not_what_its_encoding_says_is_refused_and_is_no_failure(world: World) -> None:
    response = await world.post(CHAT_PATH, data=b"not gzip", headers={"Content-Encoding": "gzip"})

    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["code"], "gzip" in error["message"]) == ("invalid_body", True)


# -- what passes in either direction --


async def test_neither_credentials_reach_a_model_nor_its_cookies_a_client(world: World) -> None:
    headers = {"Authorization": "Bearer secret", "Cookie": "a=b", "X-Request-Id": "r1"}
    response = await world.post(CHAT_PATH, json=CHAT, headers=headers)

    assert not {"authorization", "cookie"} & {name.lower() for name in world.process.headers[0]}
    assert world.process.headers[0]["X-Request-Id"] == "r1"
    assert not {"set-cookie", "x-inside"} & {name.lower() for name in response.headers}


async def test_deadline_and_priority_reach_the_agent(world: World) -> None:
    headers = {"Omni-Deadline-Seconds": "2.5", "Omni-Priority": "background"}
    await world.post(CHAT_PATH, json=CHAT, headers=headers)
    await world.post(CHAT_PATH, json=CHAT)

    assert [(r.deadline_seconds, r.priority) for r in world.agent.requests] == [
        (2.5, "background"),
        (None, "interactive"),
    ]
