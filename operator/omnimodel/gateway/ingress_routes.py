"""The agent's side of `protocol.ingress`: requests of gateways in other pods, and reports to them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.protocol.dispatch import DEADLINE_HEADER, PRIORITY_HEADER, InferenceRequest, InferenceResponse
from omnimodel.protocol.ingress import (
    ERROR_HEADER,
    EXCHANGE_HEADER,
    EXCHANGES_PATH,
    HEARTBEAT_SECONDS,
    INGRESS_PATH,
    REPORT_PATH,
    Reporting,
    Snapshot,
    changes,
    error_message,
    hold_headers,
    snapshot_of,
)

log = logging.getLogger(__name__)

KEPT_ERRORS = 1000  # of answers that were broken off; a gateway asks for one within seconds
_TRUE = ("", "1", "true", "yes")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Of the connection between gateway and agent, not of the request that goes on to the model.
_OWN_HEADERS = frozenset(
    {
        "host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect", "user-agent",
        "accept-encoding", "authorization", DEADLINE_HEADER.lower(), PRIORITY_HEADER.lower(), EXCHANGE_HEADER.lower(),
    }
)  # fmt: skip


class IngressRoutes:
    """See the module.

    Args:
        reporting: the agent.
    """

    def __init__(self, reporting: Reporting) -> None:
        self._reporting = reporting
        self._errors: OrderedDict[str, DispatchError] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        path = INGRESS_PATH + "/{namespace}/{name}/{path:.*}"
        return [
            web.route("*", path, self._ingress, expect_handler=_expect_later),
            web.get(EXCHANGES_PATH + "/{exchange}", self._exchange),
            web.get(REPORT_PATH, self._report),
        ]

    async def _ingress(self, request: web.Request) -> web.StreamResponse:
        gateway = request.app[GATEWAY]
        body = _Body(request)
        response: web.StreamResponse | None = None
        try:
            if gateway.closing.is_set():
                raise _draining(request.match_info["name"])
            async with gateway.backend.open(_inference(request, body)) as answer:
                response = _head(answer)
                await response.prepare(request)
                async for chunk in answer.body:
                    await response.write(chunk)
            await response.write_eof()
            return response
        except ConnectionError:  # the gateway is gone; leaving the context has told the model
            return response or web.Response(status=499)
        except Exception as failure:
            if not isinstance(failure, OmniError):
                log.exception("failed path=%s", request.path)
            error = _as_dispatch_error(failure)
            if response is None:
                return _refusal(error, body)
            self._remember(request.headers.get(EXCHANGE_HEADER, ""), error)
            if request.transport is not None:
                request.transport.abort()
            return response

    def _remember(self, exchange: str, error: DispatchError) -> None:
        self._errors[exchange] = error
        while len(self._errors) > KEPT_ERRORS:
            self._errors.popitem(last=False)

    async def _exchange(self, request: web.Request) -> web.Response:
        error = self._errors.get(request.match_info["exchange"])
        if error is None:
            return web.json_response({}, status=404)
        return web.json_response(error_message(error))

    async def _report(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("follow", "false").lower() not in _TRUE:
            return web.json_response(changes(None, self._snapshot(request)))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-cache"})
        await response.prepare(request)
        closing = request.app[GATEWAY].closing
        known: Snapshot | None = None
        async with self._news(closing) as news:
            with suppress(ConnectionError):
                while True:
                    last = closing.is_set()
                    news.clear()  # before the snapshot: what changes from here on is told in the next line
                    snapshot = self._snapshot(request)
                    await response.write(json.dumps(changes(known, snapshot), separators=(",", ":")).encode() + b"\n")
                    known = snapshot
                    if last:
                        break
                    with suppress(TimeoutError):
                        async with asyncio.timeout(HEARTBEAT_SECONDS):
                            await news.wait()
                await response.write_eof()
        return response

    @asynccontextmanager
    async def _news(self, closing: asyncio.Event) -> AsyncIterator[asyncio.Event]:
        """An event that is set when there may be something to tell, however often it is looked at."""
        news = asyncio.Event()

        async def changed() -> None:
            while True:
                await self._reporting.wait_changed()
                news.set()

        async def closed() -> None:
            await closing.wait()
            news.set()

        tasks = [asyncio.create_task(changed()), asyncio.create_task(closed())]
        await asyncio.sleep(0)  # both have begun to wait
        try:
            yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _snapshot(self, request: web.Request) -> Snapshot:
        gateway = request.app[GATEWAY]
        return snapshot_of(self._reporting.report(), gateway.backend.models(), draining=gateway.closing.is_set())


async def _expect_later(_: web.Request) -> None:
    """Say nothing yet: `_Body` says `100 Continue` when the model takes the request."""


class _Body:
    """The body of a request, asked for only when its model takes it."""

    def __init__(self, request: web.Request) -> None:
        self.asked = "Expect" not in request.headers  # then it comes at once
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        request = self._request
        if not self.asked:
            self.asked = True
            assert request.transport is not None
            request.transport.write(_CONTINUE)
        async for chunk in request.content.iter_any():
            yield chunk


def _inference(request: web.Request, body: _Body) -> InferenceRequest:
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    _, _, path = request.rel_url.raw_path.removeprefix(INGRESS_PATH + "/").split("/", 2)
    query = request.rel_url.raw_query_string
    seconds = _number(request.headers.get(DEADLINE_HEADER))
    has_body = request.body_exists or not body.asked
    return InferenceRequest(
        model=name if namespace == "default" else f"{namespace}/{name}",
        method=request.method,
        path=f"/{path}?{query}" if query else f"/{path}",
        headers={name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS},
        body=body if has_body else b"",
        deadline_seconds=seconds if seconds > 0 else None,
        priority=request.headers.get(PRIORITY_HEADER, "interactive"),
    )


def _number(text: str | None) -> float:
    try:
        value = float(text or 0.0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _head(answer: InferenceResponse) -> web.StreamResponse:
    headers = {name: value for name, value in answer.headers.items() if name.lower() != ERROR_HEADER.lower()}
    return web.StreamResponse(status=answer.status, headers={**headers, **hold_headers(answer.hold)})


def _as_dispatch_error(failure: Exception) -> DispatchError:
    if isinstance(failure, DispatchError):
        return failure
    if not isinstance(failure, OmniError):
        return DispatchError("", "the agent failed to answer; its log says why", reason=Reason.INTERNAL, status=500)
    return DispatchError(failure.subject, failure.problem, failure.cure, reason=failure.reason, status=500)


def _refusal(error: DispatchError, body: _Body) -> web.Response:
    response = web.json_response(error_message(error), status=error.status, headers={ERROR_HEADER: "1"})
    if not body.asked:  # the gateway has not sent it, and what comes next on the connection would be taken for it
        response.force_close()
    return response


def _draining(name: str) -> DispatchError:
    return DispatchError(
        f"OmniModel {name}", "its agent is stopping", "send it again", reason=Reason.DRAINING, status=503,
        retry_after_seconds=1,
    )  # fmt: skip
