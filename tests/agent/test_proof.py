"""The known answer of a model that misbehaves: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from omnimodel.agent import proof
from omnimodel.errors import ProcessError, Reason


@asynccontextmanager
async def answering(folder: Path, answer, **probe: object) -> AsyncIterator[SimpleNamespace]:
    """What `prove` needs of an instance, with a server behind a UNIX socket."""
    application = web.Application()
    application.router.add_post("/ask", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "socket")).start()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder / "socket"))) as session:
        yield SimpleNamespace(
            subject="OmniModel default/tiny",
            spec={"probe": {"path": "/ask", "json": {}, "timeoutSeconds": 60, **probe}},
            limits=SimpleNamespace(response_bytes=1 << 20),
            session=session,
            process=object(),
        )
    await runner.cleanup()


async def test_an_answer_without_an_end_is_given_up(tmp_path: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(65536))

    async with answering(tmp_path, endless) as instance:
        with pytest.raises(ProcessError, match="more than 1048576 bytes") as caught:
            await proof.prove(instance)
    assert caught.value.reason is Reason.PROBE_FAILED


async def test_an_expression_that_takes_for_ever_stops_nobody(tmp_path: Path, monkeypatch) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"text": "a" * 100 + "!"})

    monkeypatch.setattr(proof, "_SEARCH_SECONDS", 1.0)
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    watching = asyncio.create_task(watch())
    async with answering(tmp_path, answer, expect=[{"at": "/text", "matches": "^(a+)+$"}]) as instance:
        with pytest.raises(ProcessError, match="does not match"):
            await proof.prove(instance)
    watching.cancel()
    assert turns >= 3, "the event loop stood still while the expression was searched"


async def test_an_expression_that_is_found(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"text": "It is Paris."})

    async with answering(tmp_path, answer, expect=[{"at": "/text", "matches": "Par(is|ís)"}]) as instance:
        await proof.prove(instance)
