"""Held requests, streams with long silences, clients that go away, and models that fail in the middle."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import openai
import pytest

from gateway.standin import RECORDED, chunk_event, crashed
from gateway.world import World, until
from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway import relay
from omnimodel.gateway.settings import Settings

CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hello"}]}
COLD = {**CHAT, "model": "cold"}
PATH = "/v1/chat/completions"
comments = pytest.mark.parametrize("settings", [Settings(keepalive_seconds=0.05, drain_seconds=5.0)], ids=["comments"])


def without_comments(body: bytes) -> bytes:
    """The stream less the comments of the gateway."""
    events = body.split(b"\n\n")
    return b"\n\n".join(
        event for event in events if not event.startswith((b": waiting", b": still working", b": taken"))
    )


def error_of(body: bytes) -> dict[str, object]:
    """The one error of a stream, which is its last event: no client takes a part for the whole."""
    events = [event for event in body.split(b"\n\n") if event]
    assert sum(b'"error"' in event for event in events) == 1
    return json.loads(events[-1].removeprefix(b"data: "))["error"]


# -- held --


async def test_headers_say_how_long_a_request_was_held_and_for_what(world: World) -> None:
    line = world.agent.add("cold", awake=False)
    held = asyncio.create_task(world.post(PATH, json=COLD))
    await until(lambda: line.waiting)
    await asyncio.sleep(0.03)
    line.awake.set()
    response = await held

    assert float(response.headers["Omni-Waited-Seconds"]) >= 0.03
    assert response.headers["Omni-Wait-Reason"] == "wake"
    assert float(response.headers["Omni-Wake-Seconds"]) == 0.25
    quick = await world.post(PATH, json=CHAT)
    assert quick.headers["Omni-Wait-Reason"] == "none"


@comments
async def test_a_held_stream_is_kept_alive_and_then_whole(world: World) -> None:
    """litellm#34374: not one byte went out before the first token, so that a balancer cut every such stream."""
    line = world.agent.add("cold", awake=False)
    response = await world.session.post(world.url + PATH, json={**COLD, "stream": True})
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream"
    assert response.headers["Omni-Queue-Position"] == "1"
    assert float(response.headers["Omni-Estimate-Seconds"]) == 1.5
    first = await response.content.readuntil(b"\n\n")
    second = await response.content.readuntil(b"\n\n")
    assert first == second == b": waiting position=1 seconds=1.5\n\n"
    line.awake.set()
    rest = await response.read()

    assert without_comments(rest) == b"".join(RECORDED)
    assert re.search(rb": taken waited=\d+\.\d{3} reason=wake wake=0\.250\n\n", rest)


@comments
async def test_a_long_prefill_is_kept_alive(world: World) -> None:
    response = await world.session.post(world.url + PATH, json={**CHAT, "stream": True, "prefill": 0.3})
    body = await response.read()

    assert body.startswith(b": still working\n\n")
    assert without_comments(body) == b"".join(RECORDED)


@comments
async def test_no_comment_comes_into_the_middle_of_an_event(world: World) -> None:
    response = await world.session.post(world.url + PATH, json={**CHAT, "stream": True, "halves": True, "pause": 0.2})
    body = await response.read()

    assert b'data: {"a":1}\n\n' in body
    assert b": still working" in body
    assert without_comments(body) == b'data: {"a":1}\n\ndata: [DONE]\n\n'


@comments
async def test_the_official_client_does_not_see_the_comments(world: World) -> None:
    line = world.agent.add("cold", awake=False)
    async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0) as client:
        opening = asyncio.create_task(
            client.chat.completions.create(**COLD, stream=True, extra_body={"chunks": 3, "pause": 0.1})
        )
        stream = await opening  # the head came with the first comment
        line.awake.set()
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["0 ", "1 ", "2 "]


async def test_before_the_first_comment_an_error_has_its_status(world: World) -> None:
    world.agent.add("cold", awake=False, deadline_seconds=0.01)
    response = await world.post(PATH, json={**COLD, "stream": True})

    assert response.status == 504
    assert (await response.json())["error"]["code"] == "deadline_exceeded"


@comments
async def test_after_it_the_error_is_an_event(world: World) -> None:
    world.agent.add("cold", awake=False, deadline_seconds=1.0)
    response = await world.post(PATH, json={**COLD, "stream": True})

    assert response.status == 200
    error = error_of(await response.read())
    assert error["code"] == "deadline_exceeded"
    assert error["message"] == "OmniModel default/cold: not done within 1 s; ask for less"


@comments
async def test_a_refusal_after_a_hold_is_an_event_too(world: World) -> None:
    line = world.agent.add("cold", awake=False)
    response = await world.session.post(world.url + PATH, json={**COLD, "stream": True, "refuse": True})
    await response.content.readuntil(b"\n\n")
    line.awake.set()

    assert error_of(await response.read())["param"] == "temperature"


@comments
async def test_the_official_client_raises_what_a_held_stream_ends_with(world: World) -> None:
    world.agent.add("cold", awake=False, deadline_seconds=1.0)
    async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**COLD, stream=True)
        with pytest.raises(openai.APIError, match="not done within"):
            async for _ in stream:
                pass


# -- clients that go away --


async def test_a_client_that_leaves_in_the_middle_of_a_stream_stops_the_model(world: World) -> None:
    """litellm#30244: the engine generated to the end for nobody, and its slot stayed taken."""
    line = world.agent.lines["smollm2"]
    world.process.gate.clear()
    response = await world.session.post(world.url + PATH, json={**CHAT, "stream": True, "chunks": 1000})
    await response.content.readuntil(b"\n\n")
    assert world.process.running == line.opened == 1
    response.close()
    await until(lambda: world.process.running == line.opened == 0)

    assert world.process.broken_off == 1
    metrics = await (await world.get("/metrics")).text()
    assert 'omni_requests_open{model="smollm2"} 0.0' in metrics
    assert 'omni_requests_total{model="smollm2",outcome="cancelled"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_is_held_waits_no_longer(world: World, stream: bool) -> None:
    """llama-swap#727: the load that nobody wanted any more ran to its end."""
    line = world.agent.add("cold", awake=False)
    held = asyncio.create_task(world.post(PATH, json={**COLD, "stream": stream}))
    await until(lambda: line.waiting)
    held.cancel()
    await until(lambda: not line.waiting)

    assert not world.gateway.measures.held.counts()


async def test_a_client_that_leaves_before_an_answer_stops_the_model(world: World) -> None:
    world.process.gate.clear()
    asked = asyncio.create_task(world.post(PATH, json=CHAT))
    await until(lambda: world.process.running)
    asked.cancel()
    await until(lambda: not world.process.running)

    assert world.process.broken_off == 1


async def test_short_deadlines_of_one_caller_do_no_harm(world: World) -> None:
    """litellm#41223 and BentoML#5642: 504 to the caller, no hidden work, no error for others, the bound holds."""
    line = world.agent.add("busy", concurrency=4)
    body = {**CHAT, "model": "busy", "pause": 0.5}
    storm = [world.post(PATH, json=body, headers={"Omni-Deadline-Seconds": "0.1"}) for _ in range(100)]
    others = [world.post(PATH, json={**CHAT, "model": "smollm2"}) for _ in range(20)]
    results = await asyncio.gather(*storm, *others)

    assert [response.status for response in results[:100]] == [504] * 100
    assert [response.status for response in results[100:]] == [200] * 20
    await until(lambda: world.process.running == 0)
    assert line.opened == line.waiting == 0
    assert world.process.most_running <= 4 + 20
    assert (await world.post(PATH, json={**body, "pause": 0})).status == 200


# -- queues --


@pytest.mark.parametrize("awake", [True, False], ids=["resident", "cold"])
async def test_a_full_queue_is_429_whether_the_model_is_cold_or_resident(world: World, awake: bool) -> None:
    """ollama#7758: the limit held only for models that waited to load."""
    world.process.gate.clear()
    line = world.agent.add("busy", awake=awake, queue=5, concurrency=1)
    asked = [asyncio.create_task(world.post(PATH, json={**CHAT, "model": "busy"})) for _ in range(50)]
    await until(lambda: sum(task.done() for task in asked) >= 44)
    line.awake.set()
    world.process.gate.set()
    responses = [await task for task in asked]
    refused = [response for response in responses if response.status == 429]

    assert len(refused) in (44, 45)
    assert all(response.headers["Retry-After"] == "2" for response in refused)
    assert (await refused[0].json())["error"]["code"] == "queue_full"
    assert all(response.status == 200 for response in responses if response not in refused)


async def test_a_resident_model_answers_while_others_are_held(world: World) -> None:
    """ollama#14578: calls for the resident model waited in the same queue as those that load."""
    lines = [world.agent.add(f"cold-{number}", awake=False) for number in range(20)]
    held = [asyncio.create_task(world.post(PATH, json={**CHAT, "model": line.card.name})) for line in lines]
    await until(lambda: all(line.waiting for line in lines))
    answers = [await world.post(PATH, json=CHAT) for _ in range(20)]

    assert {response.headers["Omni-Wait-Reason"] for response in answers} == {"none"}
    assert not any(task.done() for task in held)
    for line in lines:
        line.awake.set()
    assert {(await task).status for task in held} == {200}


async def test_two_hundred_at_once_are_all_answered(world: World) -> None:
    world.agent.add("busy", concurrency=16)
    asked = [
        world.post(PATH, json={"model": "busy", "messages": [{"role": "user", "content": f"text {number}"}]})
        for number in range(200)
    ]
    answers = [await response.json() for response in await asyncio.gather(*asked)]

    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [f"text {n}" for n in range(200)]
    assert world.process.most_running <= 16


async def test_sixty_four_streams_lose_no_chunk(world: World) -> None:
    async def one(number: int) -> bytes:
        body = {**CHAT, "stream": True, "chunks": 50, "tag": f"s{number}-", "pause": 0.001}
        return await (await world.post(PATH, json=body)).read()

    bodies = await asyncio.gather(*(one(number) for number in range(64)))

    for number, body in enumerate(bodies):
        events = [chunk_event(f"s{number}-{i} ") for i in range(50)]
        assert without_comments(body) == b"".join(events) + b"data: [DONE]\n\n"


async def test_a_slow_reader_slows_the_model_and_not_the_memory(world: World) -> None:
    body = {**CHAT, "stream": True, "chunks": 600, "pad": 100_000}
    response = await world.session.post(world.url + PATH, json=body)
    quiet, sent = 0, -1
    while quiet < 20:  # until nothing moves any more
        await asyncio.sleep(0.01)
        quiet, sent = (quiet + 1, sent) if world.process.sent_bytes == sent else (0, world.process.sent_bytes)
    assert sent < 30_000_000, "60 MB went out although nobody reads"
    received = without_comments(await response.read())

    assert received == b"".join(chunk_event(f"{i} " + "x" * 100_000) for i in range(600)) + b"data: [DONE]\n\n"


# -- models that fail --


async def test_a_failed_model_is_503_that_names_the_cause(world: World) -> None:
    failure = DispatchError(
        "OmniModel default/broken",
        "its image is damaged: index.json is cut off",
        "publish it anew",
        reason=Reason.BAD_ARTIFACT,
        status=503,
        retry_after_seconds=60,
    )
    world.agent.add("broken", failure=failure)
    response = await world.post(PATH, json={**CHAT, "model": "broken", "stream": True})

    assert response.status == 503
    assert response.headers["Retry-After"] == "60"
    error = (await response.json())["error"]
    assert (error["code"], error["type"]) == ("bad_artifact", "server_error")
    assert error["message"] == "OmniModel default/broken: its image is damaged: index.json is cut off; publish it anew"


async def test_a_model_that_dies_before_its_answer_is_503(world: World) -> None:
    response = await world.post(PATH, json={**CHAT, "die_before": True})

    assert response.status == 503
    assert (await response.json())["error"]["code"] == "crashed"
    assert (await world.post(PATH, json=CHAT)).status == 200


async def test_a_model_that_dies_in_a_stream_ends_it_with_an_error(world: World) -> None:
    response = await world.post(PATH, json={**CHAT, "stream": True, "die_after": True})

    assert response.status == 200
    assert error_of(await response.read())["code"] == "crashed"


@pytest.mark.parametrize("pause", [0, 0.001], ids=["with the last words", "after them"])
async def test_an_error_that_the_model_told_in_its_stream_is_not_told_twice(world: World, pause: float) -> None:
    body = {**CHAT, "stream": True, "chunks": 2, "tell_error": 'its data: {"error"', "pause": pause}
    response = await world.post(PATH, json=body)

    assert response.status == 200
    told = await response.read()
    assert error_of(told)["message"] == 'its data: {"error"'
    assert told.startswith(chunk_event("0 ") + chunk_event("1 "))


async def test_a_model_that_dies_in_the_middle_of_an_event_ends_that_first(world: World) -> None:
    response = await world.post(PATH, json={**CHAT, "stream": True, "halves": True, "die_after": True})

    assert (await response.read()).startswith(b'data: {"a":\n\ndata: {"error"')


async def test_half_an_answer_is_never_taken_for_the_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.agent
    body_of = agent._body

    async def half(*args):
        async for chunk in body_of(*args):
            yield chunk[: len(chunk) // 2]
            raise crashed("OmniModel default/smollm2")

    agent._body = half
    short = await world.post(PATH, json=CHAT)
    told = await short.json()
    assert (short.status, "its process died" in told["error"]["message"]) == (503, True)
    monkeypatch.setattr(relay, "SHORT_BYTES", 0)
    with pytest.raises(aiohttp.ClientError):
        await world.post(PATH, json=CHAT)


async def test_a_model_that_never_answers_holds_up_nobody_else(world: World) -> None:
    """production-stack#749: one dead backend hung all."""
    world.agent.add("dead", deadline_seconds=0.3)
    dead = [world.post(PATH, json={**CHAT, "model": "dead", "pause": 3600}) for _ in range(50)]
    asked = asyncio.gather(*dead)
    assert {(await world.post(PATH, json=CHAT)).status for _ in range(20)} == {200}

    assert {response.status for response in await asked} == {504}


async def test_a_deleted_model_is_gone_at_once(world: World) -> None:
    """ollama-operator#118: a deleted model was still served."""
    del world.agent.lines["smollm2"]

    assert (await world.post(PATH, json=CHAT)).status == 404


async def test_a_fault_of_the_gateway_shows_nothing_of_its_inside(world: World) -> None:
    def broken() -> None:
        raise KeyError("/etc/secret")

    world.agent.models = broken
    response = await world.post(PATH, json=CHAT)

    assert response.status == 500
    assert "secret" not in await response.text()
    assert (await response.json())["error"]["code"] == "internal_error"


# -- the end --


async def test_a_stream_in_flight_ends_before_the_gateway_does(world: World) -> None:
    world.process.gate.clear()
    response = await world.session.post(world.url + PATH, json={**CHAT, "stream": True, "chunks": 3})
    await response.content.readuntil(b"\n\n")
    closing = asyncio.create_task(world.listening.close())
    await until(world.gateway.closing.is_set)
    with pytest.raises(aiohttp.ClientConnectorError):
        await world.post(PATH, json=CHAT)
    world.process.gate.set()

    assert (await response.read()).endswith(b"data: [DONE]\n\n")
    async with asyncio.timeout(30):
        await closing


async def test_what_does_not_end_in_time_is_cut_off(world: World) -> None:
    world.listening._runner._shutdown_timeout = 0.05
    world.process.gate.clear()
    response = await world.session.post(world.url + PATH, json={**CHAT, "stream": True, "chunks": 3})
    await response.content.readuntil(b"\n\n")
    async with asyncio.timeout(30):
        await world.listening.close()

    await until(lambda: world.process.running == 0)
    assert world.agent.lines["smollm2"].opened == 0
