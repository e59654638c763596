"""Forms with a file: the model's name is found and rewritten while the upload passes through."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.world import World, until
from omnimodel.gateway.bodies import Buffered
from omnimodel.gateway.forms import End, FormScanner, FormUpload, ModelField, Raw
from omnimodel.gateway.refusals import RequestError

PATH = "/v1/audio/transcriptions"
BOUNDARY = "x-boundary"
TYPE = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
MIB = 1 << 20


def form(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """A form; the part named file is a file."""
    body = b""
    for name, value in parts:
        file = '; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else ""
        body += (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value + b"\r\n"
        )
    return body + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


@pytest.fixture
def whisper(world: World) -> World:
    world.agent.change("whisper", served_names=("whisper", "whisper-1", "openai/whisper:tiny"))
    return world


@pytest.mark.parametrize("name", ["whisper", "whisper-1", "openai/whisper:tiny"])
@pytest.mark.parametrize("order", ["model first", "file first", "in the query"])
async def test_an_alias_reaches_the_model_under_its_own_name(whisper: World, name: str, order: str) -> None:
    """llama.cpp#22215: upload by alias hung, or the form's model field reached the backend unrewritten."""
    file, model = ("file", b"RIFF" * 1000), ("model", name.encode())
    parts = {"model first": (model, file), "file first": (file, model), "in the query": (file,)}[order]
    query = {"model": name} if order == "in the query" else {}
    response = await whisper.post(PATH, data=form(*parts, ("language", b"en")), headers=TYPE, params=query)

    assert response.status == 200, await response.text()
    assert (await response.json())["text"] == hashlib.sha256(b"RIFF" * 1000).hexdigest()
    assert whisper.process.forms == [{"filename": "a.wav", "model": "whisper", "language": "en"}]


async def test_an_alias_sets_fields_that_the_form_has_not(whisper: World) -> None:
    whisper.agent.change("whisper", defaults={"whisper-1": {"language": "de", "temperature": 0.5}})
    body = form(("model", b"whisper-1"), ("file", b"x"), ("language", b"en"))
    await whisper.post(PATH, data=body, headers=TYPE)

    assert whisper.process.forms == [{"filename": "a.wav", "model": "whisper", "language": "en", "temperature": "0.5"}]


async def test_an_upload_of_25_mb_passes_while_it_comes(whisper: World) -> None:
    content = bytes(range(256)) * 4096 * 25
    body = form(("model", b"whisper-1"), ("file", content))
    middle = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), MIB):
            yield body[start : start + MIB]
            if start == 12 * MIB:
                await middle.wait()

    asked = asyncio.create_task(whisper.post(PATH, data=chunks(), headers=TYPE))
    await until(lambda: whisper.process.received_bytes > 10 * MIB)
    assert whisper.gateway.buffered.used_bytes < 2 * MIB
    middle.set()

    assert (await (await asked).json())["text"] == hashlib.sha256(content).hexdigest()


async def test_a_declared_length_stays_exact_when_the_name_changes(whisper: World) -> None:
    body = form(("model", b"openai/whisper:tiny"), ("file", b"x" * 100))
    await whisper.post(PATH, data=body, headers=TYPE)

    assert int(whisper.process.headers[0]["Content-Length"]) == len(body) - len("openai/whisper:tiny") + len("whisper")


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "found while it comes"])
async def test_an_upload_over_the_limit_is_told_the_limit(whisper: World, declared: bool) -> None:
    """ai-gateway#827: refused at 32 KiB without a word about it."""
    whisper.agent.change("whisper", request_bytes=MIB)
    body = form(("model", b"whisper"), ("file", b"x" * 4 * MIB))

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    response = await whisper.post(PATH, data=body if declared else chunks(), headers=TYPE)

    assert response.status == 413
    assert f"the limit is {MIB} bytes" in (await response.json())["error"]["message"]
    await until(lambda: not whisper.process.running)


async def test_an_upload_whose_client_leaves_is_ended(whisper: World) -> None:
    body = form(("model", b"whisper"), ("file", b"x" * MIB))

    async def chunks() -> AsyncIterator[bytes]:
        yield body
        await asyncio.Event().wait()

    asked = asyncio.create_task(
        whisper.post(PATH, data=chunks(), headers={**TYPE, "Content-Length": str(len(body) + 1)})
    )
    await until(lambda: whisper.process.running)
    asked.cancel()
    await until(lambda: not whisper.process.running)

    assert whisper.agent.lines["whisper"].opened == 0


async def test_a_held_upload_waits_with_its_client(whisper: World) -> None:
    line = whisper.agent.add("cold", "automatic-speech-recognition", awake=False)
    asked = asyncio.create_task(
        whisper.post(PATH, data=form(("model", b"cold"), ("file", b"x" * 20 * MIB)), headers=TYPE)
    )
    await until(lambda: line.waiting)
    assert whisper.gateway.buffered.used_bytes < 2 * MIB
    line.awake.set()

    assert (await asked).status == 200


WRONG = {
    "no model": (form(("file", b"x")), 400, "model_missing", "the form has no field model"),
    "two models": (
        form(("model", b"whisper"), ("file", b"x" * MIB), ("model", b"whisper")),
        400,
        "invalid_request",
        "the field model twice",
    ),
    "cut off before the model": (form(("file", b"x"), end=False), 400, "invalid_form", "in the middle of a part"),
    "cut off after it": (form(("model", b"whisper"), ("file", b"x"), end=False), 400, "invalid_form", "in the middle"),
    "no parts": (f"--{BOUNDARY}--\r\n".encode(), 400, "invalid_form", "it has no parts"),
    "empty": (b"", 400, "invalid_form", "in the middle of a part"),
    "another boundary": (b"--other\r\n" + b"x" * 40_000, 400, "invalid_form", 'do not have the boundary "x-boundary"'),
    "a part without a name": (f"--{BOUNDARY}\r\nA: b\r\n\r\nx".encode(), 400, "invalid_form", "a part has no name"),
    "headers without end": (f"--{BOUNDARY}\r\n".encode() + b"x" * 40_000, 400, "invalid_form", "do not end"),
    "junk after a boundary": (f"--{BOUNDARY}junk\r\n".encode(), 400, "invalid_form", "not followed by a line break"),
    "a model without end": (form(("model", b"m" * 10_000)), 400, "invalid_request", "model is too long"),
    "unknown model": (form(("model", b"wisper"), ("file", b"x")), 404, "model_not_found", "did you mean whisper"),
    "another task": (form(("model", b"smollm2"), ("file", b"x")), 400, "wrong_endpoint", "POST /v1/chat/completions"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_refused(whisper: World, what: str) -> None:
    body, status, code, message = WRONG[what]
    response = await whisper.post(PATH, data=body, headers=TYPE)
    error = (await response.json())["error"]

    assert (response.status, error["code"]) == (status, code)
    assert message in error["message"]


async def test_the_form_of_another_client_library_passes(whisper: World) -> None:
    data = aiohttp.FormData()
    data.add_field("file", b"\r\n--" * 1000, filename="ä.wav", content_type="audio/wav")
    data.add_field("model", "whisper-1")
    response = await whisper.session.post(whisper.url + PATH, data=data)

    assert (await response.json())["text"] == hashlib.sha256(b"\r\n--" * 1000).hexdigest()
    assert whisper.process.forms[0]["model"] == "whisper"


# -- the scanner --

values = st.binary(max_size=200) | st.sampled_from(
    [b"\r\n--x", b"\r\n--x-boundar", b"\r\n", b"--x-boundary", b"\r\n\r\n"]
)


@given(
    st.lists(st.tuples(st.sampled_from(["file", "model", "language", "prompt"]), values), min_size=1, max_size=4),
    st.lists(st.integers(1, 40), min_size=1),
    st.booleans(),
)
def test_however_the_bytes_come_in_nothing_but_the_model_changes(parts, cuts, epilogue) -> None:
    parts = [(name, value) for name, value in parts if f"\r\n--{BOUNDARY}".encode() not in b"\r\n" + value]
    if not parts:
        return
    body = form(*parts) + (b"epilogue" if epilogue else b"")
    scanner = FormScanner(BOUNDARY.encode())
    pieces: list[Raw | ModelField | End] = []
    start, turn = 0, 0
    while start < len(body):
        size = cuts[turn % len(cuts)]
        pieces += scanner.feed(body[start : start + size])
        start, turn = start + size, turn + 1

    assert scanner.ended
    assert b"".join(p.value if isinstance(p, ModelField) else p.data for p in pieces) == body
    assert [p.value for p in pieces if isinstance(p, ModelField)] == [value for name, value in parts if name == "model"]
    assert scanner.names == {name for name, _ in parts}


@given(st.binary(max_size=400), st.integers(1, 50))
def test_hostile_bytes_are_refused_or_passed_and_never_crash(junk: bytes, size: int) -> None:
    scanner = FormScanner(BOUNDARY.encode())
    body = b"--x-boundary\r\n" + junk
    with suppress(RequestError):
        for start in range(0, len(body), size):
            list(scanner.feed(body[start : start + size]))


async def test_a_form_of_two_gigabytes_costs_no_memory() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield form(("model", b"whisper-1"))[: -len(BOUNDARY) - 6]
        yield f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
        block = b"\r" * MIB
        for _ in range(2048):
            yield block
        yield f"\r\n--{BOUNDARY}--\r\n".encode()

    buffered = Buffered(10 * MIB)
    total = 0
    with buffered.lease() as lease:
        upload = FormUpload(FormScanner(BOUNDARY.encode()), chunks(), lease, None)
        assert await upload.model_name(None) == "whisper-1"
        async for chunk in upload.chunks("whisper", {}):
            assert len(chunk) <= 2 * MIB
            total += len(chunk)
    assert total > 2048 * MIB
    assert buffered.used_bytes == 0
