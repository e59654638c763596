"""The HTTP side that all engines share: limits, errors as the endpoint has them, what happens when a client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from omnimodel.errors import OmniError, Reason
from omnimodel.runtime.requests import NOT_RESIDENT, RequestError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# asyncio takes a connect that found the backlog of a UNIX socket full for one that succeeded, and fails at the first
# byte. So there is room for more than a gateway ever sends at once; the kernel cuts it to net.core.somaxconn.
BACKLOG = 4096
INFERENCE_PATH = "/v2/"
READY_PATH = "/v2/health/ready"
LIVE_PATH = "/v2/health/live"


class Traffic:
    """What requests a process has, and whether it takes any.

    Args:
        subject: the model, for messages.
        request_bytes: the largest body it takes.
    """

    def __init__(self, subject: str, request_bytes: int) -> None:
        self.subject = subject
        self.request_bytes = request_bytes
        self.resident = False
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what cannot be answered now, count what is under way, and turn errors into answers."""
        if request.path in (READY_PATH, LIVE_PATH):
            ready = self.resident or request.path == LIVE_PATH
            return web.json_response({"ready": ready}, status=200 if ready else 503)
        if not self.resident:
            return _refusal(request, RequestError(f"{self.subject} is not resident", code=NOT_RESIDENT, status=503))
        self.in_flight += 1
        self.idle.clear()
        try:
            return await self._answer(request, handler)
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            return _refusal(request, error)
        except web.HTTPRequestEntityTooLarge:
            text = f"The body is larger than the {self.request_bytes} bytes that {self.subject} takes"
            return _refusal(request, RequestError(text, code="request_too_large", status=413))
        except web.HTTPException as error:
            text = f"{request.method} {request.path} is nothing that {self.subject} answers"
            refusal = _refusal(
                request, RequestError(text if error.status in (404, 405) else error.reason, status=error.status)
            )
            if isinstance(error, web.HTTPMethodNotAllowed):
                refusal.headers["Allow"] = error.headers["Allow"]
            return refusal
        except OmniError as error:
            log.exception("request failed path=%s", request.path)
            return _refusal(request, RequestError(str(error), code=str(error.reason), status=500))
        except Exception as error:
            log.exception("request failed path=%s", request.path)
            text = f"{self.subject}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            return _refusal(request, RequestError(text, code=str(Reason.HANDLER_FAILED), status=500))


def _refusal(request: web.Request, error: RequestError) -> web.Response:
    return web.json_response(_error_object(request, error), status=error.status)


def _error_object(request: web.Request, error: RequestError) -> dict[str, Any]:
    """An error as the protocol of the path has it."""
    return error.inference_body() if request.path.startswith(INFERENCE_PATH) else error.body()


def application(traffic: Traffic, routes: list[web.RouteDef]) -> web.Application:
    """The application with a process's routes."""
    app = web.Application(middlewares=[traffic.middleware], client_max_size=traffic.request_bytes)
    app.add_routes(routes)
    return app


async def send_events(request: web.Request, events: AsyncGenerator[Any, None], *, done: bool) -> web.StreamResponse:
    """Answer with server-sent events, one JSON object each.

    What fails before the first event is an ordinary error answer; what fails later is an event with an error object,
    and the connection is closed without the end mark, so that no client takes a part for the whole.

    Args:
        request: whose answer it is.
        events: the objects.
        done: whether OpenAI's `[DONE]` ends the stream.
    """
    async with aclosing(events) as source:
        try:
            first = await anext(source)
        except StopAsyncIteration:
            first = None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            if first is not None:
                await response.write(_event(first))
                async for event in source:
                    await response.write(_event(event))
            if done:
                await response.write(b"data: [DONE]\n\n")
        except (RequestError, OmniError, RuntimeError, ValueError, TypeError) as raised:
            log.exception("stream failed path=%s", request.path)
            error = raised if isinstance(raised, RequestError) else RequestError(str(raised), status=500)
            await response.write(_event(_error_object(request, error)))
            if request.transport is not None:
                request.transport.close()
            return response
        await response.write_eof()
    return response


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
