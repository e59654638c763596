"""One request on its way to a model and its answer on the way back, byte for byte.

The handler of a request is the only one that writes to its client. For a stream, another task owns the exchange with
the agent and hands over what comes, so that the handler can put comments into the silence: while the request is held,
and while the model reads a long prompt. Cancelling the handler (the client went away) ends that task at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeAlias

from aiohttp import web

from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.gateway.forms import FormUpload
from omnimodel.gateway.measures import Measures
from omnimodel.gateway.refusals import error_event, refusal, status_of
from omnimodel.gateway.settings import Settings
from omnimodel.protocol.dispatch import (
    MODEL_HEADER,
    WAIT_REASON_HEADER,
    WAITED_HEADER,
    WAKE_SECONDS_HEADER,
    Backend,
    InferenceRequest,
    InferenceResponse,
)

log = logging.getLogger(__name__)

POSITION_HEADER = "Omni-Queue-Position"  # of a held stream: its place in its model's queue when its head was sent
ESTIMATE_HEADER = "Omni-Estimate-Seconds"  # and how long it was expected to wait from then on
ERROR_BYTES = 64 << 10  # of a model's refusal that has to go into an event
SHORT_BYTES = 16 << 10  # of an answer that goes in one packet with its head
_EVENT = b"\ndata: "  # no text of an answer has it: line ends in it are escaped
_ERROR_EVENT = b'\ndata: {"error"'
QUEUED_CHUNKS = 8  # between the model and a client that reads slower

# A model's process is not trusted: only what describes the body passes, no cookie and no redirect.
_ANSWER_HEADERS = frozenset(
    {
        "content-type",
        "content-length",
        "content-encoding",
        "content-disposition",
        "cache-control",
        "inference-header-content-length",
        "x-request-id",
    }
)
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # a proxy in front shall pass events on at once
_REPLACED = frozenset({"content-length", "cache-control"})
_OUTCOMES = {429: "queue_full", 503: "unavailable", 504: "deadline"}


_Exchange: TypeAlias = (
    "asyncio.Queue[InferenceResponse | bytes | BaseException | None]"  # head, chunks, None; or an error
)


class _ClientGoneError(Exception):
    """The client no longer reads."""


def outcome_of(status: int) -> str:
    """How a request ended, as a label of few values."""
    if status < 400:
        return "ok"
    return _OUTCOMES.get(status, "refused" if status < 500 else "error")


class Relay:
    """Carries requests.

    Args:
        backend: the agent.
        settings: times.
        measures: where each request is counted.
    """

    def __init__(self, backend: Backend, settings: Settings, measures: Measures) -> None:
        self._backend = backend
        self._settings = settings
        self._measures = measures

    async def carry(
        self,
        request: web.Request,
        inference: InferenceRequest,
        *,
        stream: bool = False,
        upload: FormUpload | None = None,
    ) -> web.StreamResponse:
        """Send a request to its model and the answer to the client.

        Args:
            request: of the client.
            inference: what the model gets.
            stream: the client reads server-sent events, so that a silence may be filled with comments.
            upload: the body, when it is passed through while it comes.

        Returns:
            What the client got: the model's answer, or an error object.
        """
        model = inference.model
        ticket = self._measures.held.enter(model)
        outcome = "cancelled"
        self._measures.running.labels(model).inc()
        try:
            answer = _Answer(request, model)
            try:
                carry = self._carry_stream if stream else self._carry_plain
                outcome = outcome_of(await carry(answer, inference, ticket))
            except _ClientGoneError:
                pass  # nobody is there to be told
            except Exception as error:
                # Whoever reads an upload may wrap what it raises, so that the upload itself knows best.
                cause = upload.error if upload is not None and upload.error is not None else error
                if not isinstance(cause, OmniError):
                    log.exception("failed model=%s", model)
                outcome = outcome_of(status_of(cause))
                if answer.response is None:
                    return refusal(cause, request.path)
                with suppress(_ClientGoneError):
                    await answer.fail(cause)
            return answer.response or web.Response(status=499)
        finally:
            self._measures.held.leave(model, ticket)
            self._measures.running.labels(model).dec()
            self._measures.ended(model, outcome)

    def _taken(self, inference: InferenceRequest, ticket: object, response: InferenceResponse) -> None:
        self._measures.held.leave(inference.model, ticket)
        self._measures.wait.labels(inference.model).observe(response.hold.waited_seconds)

    async def _carry_plain(self, answer: _Answer, inference: InferenceRequest, ticket: object) -> int:
        async with self._backend.open(inference) as response:
            self._taken(inference, ticket, response)
            if short := _is_short(response):
                body = b"".join([chunk async for chunk in response.body])
            else:
                await answer.begin(response)
                async for chunk in response.body:
                    await answer.write(chunk)
        await (answer.give(response, body) if short else answer.end())
        return response.status

    async def _carry_stream(self, answer: _Answer, inference: InferenceRequest, ticket: object) -> int:
        queue: _Exchange = asyncio.Queue(QUEUED_CHUNKS)
        exchange = asyncio.create_task(self._exchange(inference, queue), name=f"exchange {inference.model}")
        try:
            response = await self._next(answer, queue, inference)
            assert isinstance(response, InferenceResponse)
            self._taken(inference, ticket, response)
            answer.taken = True
            if answer.response is not None and not _is_event_stream(response):
                return await self._answer_in_event(answer, queue, inference, response.status)
            if answer.response is None:
                await answer.begin(response)
            else:  # what the headers would have said
                hold = response.hold
                await answer.comment(
                    f"taken waited={hold.waited_seconds:.3f} reason={hold.reason} wake={hold.wake_seconds:.3f}"
                )
            while isinstance(chunk := await self._next(answer, queue, inference), bytes):
                await answer.write(chunk)
            await answer.end()
            return response.status
        finally:
            exchange.cancel()
            with suppress(asyncio.CancelledError):
                await exchange

    async def _exchange(self, inference: InferenceRequest, queue: _Exchange) -> None:
        """Own the exchange with the agent: put its head, its chunks and then None, or what went wrong."""
        try:
            async with self._backend.open(inference) as response:
                await queue.put(response)
                async for chunk in response.body:
                    await queue.put(chunk)
            await queue.put(None)
        except Exception as error:  # the handler raises it
            await queue.put(error)

    async def _next(
        self,
        answer: _Answer,
        queue: _Exchange,
        inference: InferenceRequest,
    ) -> InferenceResponse | bytes | None:
        """What comes next from the model, with comments to the client as long as nothing does."""
        while True:
            if queue.empty():
                try:
                    async with asyncio.timeout(self._settings.keepalive_seconds):
                        item = await queue.get()
                except TimeoutError:
                    await self._comment(answer, inference)
                    continue
            else:
                item = queue.get_nowait()
            if isinstance(item, BaseException):
                raise item
            return item

    async def _comment(self, answer: _Answer, inference: InferenceRequest) -> None:
        if answer.taken:
            await answer.comment("still working")
            return
        try:
            estimate = self._backend.estimate(inference.model)
        except OmniError:  # the model has gone meanwhile; the exchange will say so
            await answer.comment("waiting")
            return
        headers = {POSITION_HEADER: str(estimate.position), ESTIMATE_HEADER: f"{estimate.seconds:.3f}"}
        await answer.begin_held(headers)
        await answer.comment(f"waiting position={estimate.position} seconds={estimate.seconds:.1f}")

    async def _answer_in_event(
        self,
        answer: _Answer,
        queue: _Exchange,
        inference: InferenceRequest,
        status: int,
    ) -> int:
        """The head was sent while the request was held, and then the model answered with something else than events."""
        body = b""
        while isinstance(chunk := await self._next(answer, queue, inference), bytes) and len(body) < ERROR_BYTES:
            body += chunk
        value = _json_or_none(body)
        if value is None or (status >= 400 and not (isinstance(value, dict) and "error" in value)):
            raise DispatchError(
                f"OmniModel {inference.model}",
                f"answered {status} to a streaming request that had been held",
                "send it again without stream",
                reason=Reason.HANDLER_FAILED,
                status=502,
            )
        end = b"data: [DONE]\n\n" if status < 400 else b""
        await answer.write(b"data: " + json.dumps(value).encode() + b"\n\n" + end)
        await answer.end()
        return status


class _Answer:
    """What goes to the client: a head once, then nothing but the body."""

    def __init__(self, request: web.Request, model: str) -> None:
        self.response: web.StreamResponse | None = None
        self.taken = False  # the model has the request
        self._request = request
        self._model = model
        self._events = False
        self._tail = b"\n\n"  # the last bytes written, to know whether an event is over
        self._error_told = False  # the last event was an error of the model

    async def give(self, answer: InferenceResponse, body: bytes) -> None:
        """Send head and body at once, in one packet."""
        self.response = web.Response(status=answer.status, headers=self._head(answer), body=body)
        await self._to_client(self.response.prepare(self._request))
        await self._to_client(self.response.write_eof())

    async def begin(self, answer: InferenceResponse) -> None:
        """Send the model's head, with how long the request was held and for what."""
        headers = self._head(answer)
        self._events = _is_event_stream(answer)
        if self._events:  # comments may come between
            kept = {name: value for name, value in headers.items() if name.lower() not in _REPLACED}
            headers = kept | _UNBUFFERED
        self.response = web.StreamResponse(status=answer.status, headers=headers)
        await self._to_client(self.response.prepare(self._request))

    def _head(self, answer: InferenceResponse) -> dict[str, str]:
        headers = {name: value for name, value in answer.headers.items() if name.lower() in _ANSWER_HEADERS}
        headers[MODEL_HEADER] = self._model
        headers[WAITED_HEADER] = f"{answer.hold.waited_seconds:.6f}"
        headers[WAIT_REASON_HEADER] = answer.hold.reason
        headers[WAKE_SECONDS_HEADER] = f"{answer.hold.wake_seconds:.6f}"
        return headers

    async def begin_held(self, headers: dict[str, str]) -> None:
        """Send the head of an event stream before the model has the request; once or more."""
        if self.response is not None:
            return
        self._events = True
        headers |= {"Content-Type": "text/event-stream", MODEL_HEADER: self._model} | _UNBUFFERED
        self.response = web.StreamResponse(headers=headers)
        await self._to_client(self.response.prepare(self._request))

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body; waits as long as the client does not read."""
        assert self.response is not None
        if self._events:
            seen = self._tail + chunk
            last = seen.rfind(_EVENT)
            if last >= 0:
                self._error_told = seen.startswith(_ERROR_EVENT, last)
            self._tail = seen[-len(_ERROR_EVENT) :]
        await self._to_client(self.response.write(chunk))

    async def comment(self, text: str) -> None:
        """Fill a silence, if the last event is over."""
        if self.response is not None and self._events and self._tail.endswith((b"\n\n", b"\r\n\r\n")):
            await self._to_client(self.response.write(f": {text}\n\n".encode()))

    async def end(self) -> None:
        """The body is whole."""
        assert self.response is not None
        await self._to_client(self.response.write_eof())

    async def fail(self, error: BaseException) -> None:
        """Say in the stream what went wrong, or break the answer off, so that nobody takes it for whole.

        A stream has one error, in its last event: what the model has told already is not told again.
        """
        assert self.response is not None
        log.info("broken off model=%s error=%s", self._model, error)
        if not self._events:
            if self._request.transport is not None:
                self._request.transport.abort()
            return
        apart = b"" if self._tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
        event = b"" if self._error_told else error_event(error)
        await self._to_client(self.response.write(apart + event))
        await self.end()

    async def _to_client(self, sending: Awaitable[object]) -> None:
        """Tell a client that is gone from a model that is."""
        try:
            await sending
        except ConnectionError as error:
            raise _ClientGoneError from error


def _is_event_stream(answer: InferenceResponse) -> bool:
    kind = next((value for name, value in answer.headers.items() if name.lower() == "content-type"), "")
    return answer.status == 200 and kind.lower().startswith("text/event-stream")


def _is_short(answer: InferenceResponse) -> bool:
    """Whether all of an answer comes at once, and is not for somebody who reads it while it comes."""
    length = next((value for name, value in answer.headers.items() if name.lower() == "content-length"), "")
    return length.isdecimal() and int(length) <= SHORT_BYTES and not _is_event_stream(answer)


def _json_or_none(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
