"""A model's process and an agent for tests of the gateway: real HTTP over a UNIX socket, held requests, bounded queues.

The process does what the body asks for: `chunks` events with `pause` seconds between them, or until `Process.gate` is
open. It counts what runs and what was broken off.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from omnimodel.errors import DispatchError, Reason
from omnimodel.protocol.admin import Event
from omnimodel.protocol.dispatch import Estimate, Hold, InferenceRequest, InferenceResponse, ModelCard

# What a real engine sends: an odd mixture of spaces, nulls, tools, reasoning, logprobs, and usage in the last chunk.
RECORDED = (
    b'data: {"id":"c1","choices":[{"index":0,"delta":{"role":"assistant","content":null,"reasoning":"hm"}}]}\n\n',
    b'data: {"id": "c1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"t1","function":{"name":"f"}}]}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\":"}}]}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\xc3\xa4"},"logprobs":{"content":[{"token":"x","logprob":-0.1}]}}]}\n\n',
    b": a comment of the engine\n\n",
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
)


class Process:
    """A model's process."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.most_running = self.broken_off = self.received_bytes = self.sent_bytes = 0
        self.bodies: list[bytes] = []
        self.forms: list[dict[str, str]] = []
        self.headers: list[Mapping[str, str]] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._count])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._chat)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/v1/audio/transcriptions", self._transcribe)
        app.router.add_post("/v1/audio/speech", self._speak)
        app.router.add_post("/v2/models/{name}/infer", self._infer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.headers.append(request.headers)
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self.broken_off += 1
            raise
        finally:
            self.running -= 1

    async def _json(self, request: web.Request) -> dict[str, Any]:
        self.bodies.append(await request.read())
        return json.loads(self.bodies[-1])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._json(request)
        if body.get("refuse"):
            error = {
                "message": "temperature must be at most 2",
                "type": "invalid_request_error",
                "param": "temperature",
                "code": None,
            }
            return web.json_response({"error": error}, status=400)
        if body.get("die_before"):
            request.transport.abort()
            return web.Response()
        if not body.get("stream"):
            await asyncio.sleep(body.get("pause", 0))
            await self.gate.wait()
            message = {
                "role": "assistant",
                "content": body["messages"][-1]["content"] if body.get("messages") else "hello",
            }
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            return web.json_response(
                {"id": "c1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]},
                headers={"Set-Cookie": "spy=1", "X-Inside": "secret"},
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await asyncio.sleep(body.get("prefill", 0))
        for piece in self._pieces(body):
            await response.write(piece)
            self.sent_bytes += len(piece)
            await asyncio.sleep(body.get("pause", 0))
            if body.get("die_after"):
                request.transport.abort()
                return response
            await self.gate.wait()
        if "tell_error" in body:  # as the runtime does: the connection ends without the end of the body
            await response.write(b"data: " + json.dumps({"error": {"message": body["tell_error"]}}).encode() + b"\n\n")
            request.transport.close()
            return response
        await response.write_eof()
        return response

    def _pieces(self, body: Mapping[str, Any]) -> Sequence[bytes]:
        if body.get("halves"):
            return b'data: {"a":', b"1}\n\n", b"data: [DONE]\n\n"
        if "chunks" not in body:
            return RECORDED
        pad = "x" * body.get("pad", 0)
        events = [chunk_event(f"{body.get('tag', '')}{i} {pad}") for i in range(body["chunks"])]
        return events if "tell_error" in body else [*events, b"data: [DONE]\n\n"]

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await self._json(request)
        rows = [{"object": "embedding", "index": i, "embedding": [0.5, 0.25]} for i, _ in enumerate(body["input"])]
        return web.json_response(
            {"object": "list", "model": body["model"], "data": rows, "usage": {"prompt_tokens": 1, "total_tokens": 1}}
        )

    async def _transcribe(self, request: web.Request) -> web.Response:
        form: dict[str, str] = {}
        digest = hashlib.sha256()
        async for part in await request.multipart():
            if part.filename is None:
                form[part.name] = await part.text()
                continue
            form["filename"] = part.filename
            while chunk := await part.read_chunk(65536):
                self.received_bytes += len(chunk)
                digest.update(chunk)
        self.forms.append(form)
        return web.json_response({"text": digest.hexdigest()})

    async def _speak(self, request: web.Request) -> web.Response:
        body = await self._json(request)
        return web.Response(body=b"RIFF" + body["input"].encode(), content_type="audio/wav")

    async def _infer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.json_response({"model_name": request.match_info["name"], "outputs": []})


def chunk_event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@dataclass
class Line:
    """What an agent knows of one model."""

    card: ModelCard
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    concurrency: int = 1000
    queue: int = 1000
    deadline_seconds: float = 60.0
    waiting: int = 0
    opened: int = 0
    failure: DispatchError | None = None
    wakes: int = 0

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.concurrency)


class Agent:
    """A `Backend` that holds requests until `Line.awake` is set and sends them to one process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: dict[str, Line] = {}
        self.requests: list[InferenceRequest] = []
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(process.socket), limit=0), auto_decompress=False
        )

    def add(self, name: str, task: str = "text-generation", *, awake: bool = True, **more: Any) -> Line:
        fields = {"served_names": (name,), "tier": "resident" if awake else "warm", "ready": True}
        limits = {k: more.pop(k) for k in ("concurrency", "queue", "deadline_seconds", "failure") if k in more}
        card = ModelCard(name, "default", task=task, **(fields | more))
        self.lines[name] = line = Line(card, **limits)
        if awake:
            line.awake.set()
        return line

    def models(self) -> Sequence[ModelCard]:
        return [self.lines[name].card for name in sorted(self.lines)]

    def estimate(self, model: str) -> Estimate:
        return Estimate(self.lines[model].waiting, 1.5)

    def change(self, name: str, **fields: Any) -> None:
        self.lines[name].card = replace(self.lines[name].card, **fields)

    @asynccontextmanager
    async def open(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        self.requests.append(request)
        line = self.lines[request.model]
        subject = f"OmniModel default/{request.model}"
        if line.failure is not None:
            raise line.failure
        if line.waiting >= line.queue:
            raise DispatchError(
                subject,
                f"{line.queue} requests wait already",
                "try later",
                reason=Reason.QUEUE_FULL,
                status=429,
                retry_after_seconds=1.2,
            )
        allowed = min(line.deadline_seconds, request.deadline_seconds or line.deadline_seconds)
        began = time.monotonic()
        deadline = asyncio.get_running_loop().time() + allowed
        late = DispatchError(
            subject, f"not done within {allowed:g} s", "ask for less", reason=Reason.DEADLINE_EXCEEDED, status=504
        )
        line.waiting += 1
        admitted = False
        try:
            if not line.awake.is_set():
                line.wakes += 1
            try:
                async with asyncio.timeout_at(deadline):
                    await line.awake.wait()
                    await line.slots.acquire()
                    admitted = True
            except TimeoutError:
                raise late from None
            finally:
                line.waiting -= 1
            if line.failure is not None:
                raise line.failure
            line.opened += 1
            waited = time.monotonic() - began
            try:
                async with self._send(request, subject, deadline, late) as response:
                    yield InferenceResponse(
                        response.status,
                        dict(response.headers),
                        self._body(response, subject, deadline, late),
                        Hold(waited, "wake" if waited > 0.02 else "none", 0.25),
                    )
            finally:
                line.opened -= 1
        finally:
            if admitted:
                line.slots.release()

    @asynccontextmanager
    async def _send(
        self, request: InferenceRequest, subject: str, deadline: float, late: DispatchError
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with asyncio.timeout_at(deadline):
                response = await self.session.request(
                    request.method, f"http://model{request.path}", headers=request.headers, data=request.body
                )
        except TimeoutError:
            raise late from None
        except aiohttp.ClientError as error:
            raise crashed(subject) from error
        try:
            yield response
        finally:
            response.release() if response.content.at_eof() else response.close()

    async def _body(
        self, response: aiohttp.ClientResponse, subject: str, deadline: float, late: DispatchError
    ) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await response.content.readany()
            except TimeoutError:
                raise late from None
            except aiohttp.ClientError as error:
                raise crashed(subject) from error
            if not chunk:
                return
            yield chunk


def crashed(subject: str) -> DispatchError:
    return DispatchError(
        subject, "its process died", "see omni logs", reason=Reason.CRASHED, status=503, retry_after_seconds=1
    )


class System:
    """An `Admin` over lists."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[dict[str, Any]]] = {"OmniModel": [], "OmniPool": [], "OmniProcess": []}
        self.calls: list[tuple[str, str, str, float]] = []
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.happened: list[Event] = []
        self.followers = 0
        self.most_lines = 1000
        self.breaks: Exception | None = None  # what becomes of a followed log after its next line

    def objects(self, kind: str) -> Sequence[Mapping[str, Any]]:
        return self.kinds[kind]

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        self._known(name)
        self.calls.append(("wake", namespace, name, deadline_seconds))
        return {"tier": "resident", "wakeSeconds": 0.1}

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        self.calls.append(("evict", namespace, name, deadline_seconds))
        raise DispatchError(
            f"OmniModel {namespace}/{name}",
            "is kept resident",
            "set residency.keepResident: false",
            reason=Reason.SHARES_WITH_KEPT,
            status=409,
        )

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        self.calls.append(("prune", "", str(dry_run), 0.0))
        item = {"kind": "image", "name": "a" * 64, "what": "default/gone (float32)", "bytes": 3 << 20}
        return {"bytes": 3 << 20, "removed": [{**item, "lastUsedSeconds": 1.0}]}

    def _known(self, name: str) -> None:
        if all(item["metadata"]["name"] != name for item in self.kinds["OmniModel"]):
            raise DispatchError(
                f"OmniModel default/{name}", "does not exist", reason=Reason.MODEL_NOT_FOUND, status=404
            )

    async def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        self._known(name)
        for number in range(min(tail, self.most_lines)):
            yield f"line {number}\n".encode()
        self.followers += 1
        try:
            while follow:
                line = await self.lines.get()
                if line:
                    yield line
                if self.breaks:
                    raise self.breaks
        finally:
            self.followers -= 1

    async def events(self, *, follow: bool) -> AsyncIterator[Event]:
        for event in self.happened:
            yield event

    def status_lines(self) -> Mapping[str, Any]:
        return {"errors": [], "activity": []}
