"""The admin API behind `omni get`, `wake`, `evict`, `logs`, `events` and `top`: JSON, or lines where it follows."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from omnimodel.errors import OmniError
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.gateway.refusals import RequestError
from omnimodel.protocol.admin import ADMIN_PATH, OBJECTS_PATH

log = logging.getLogger(__name__)

KINDS = {"omnimodels": "OmniModel", "omnipools": "OmniPool", "omniprocesses": "OmniProcess"}
TAIL_LINES = 100
MOST_LINES = 1_000_000  # of a tail; more are as good as all
FIRST_SECONDS = 0.1  # how long the head of a followed stream waits for its first line
_TRUE = ("", "1", "true", "yes")


def routes() -> list[web.RouteDef]:
    """All of them."""
    model = ADMIN_PATH + "/models/{namespace}/{name}"
    return [
        web.get(OBJECTS_PATH + "/{kind}", _list),
        web.get(OBJECTS_PATH + "/{kind}/{namespace}/{name}", _one),
        web.post(model + "/wake", _wake),
        web.post(model + "/evict", _evict),
        web.get(model + "/logs", _logs),
        web.post(ADMIN_PATH + "/prune", _prune),
        web.get(ADMIN_PATH + "/events", _events),
        web.get(ADMIN_PATH + "/status", _status),
    ]


def _objects(request: web.Request) -> tuple[str, list[Mapping[str, Any]]]:
    kind = KINDS.get(request.match_info["kind"])
    if kind is None:
        raise RequestError(
            f"there are no {request.match_info['kind']}", f"ask for {', '.join(KINDS)}", status=404, code="no_such_kind"
        )
    return kind, list(request.app[GATEWAY].admin.objects(kind))


async def _list(request: web.Request) -> web.Response:
    kind, items = _objects(request)
    return web.json_response({"apiVersion": "omnimodel.io/v1alpha1", "kind": f"{kind}List", "items": items})


async def _one(request: web.Request) -> web.Response:
    kind, items = _objects(request)
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    for item in items:
        if item["metadata"]["name"] == name and item["metadata"].get("namespace", namespace) == namespace:
            return web.json_response(item)
    problem = f"{kind} {namespace}/{name}: there is no such {kind.removeprefix('Omni').lower()}"
    plural = request.match_info["kind"].removeprefix("omni")
    raise RequestError(problem, f"see omni get {plural}", status=404, code="not_found")


async def _wake(request: web.Request) -> web.Response:
    gateway, namespace, name, seconds = _change(request)
    return web.json_response(await gateway.admin.wake(namespace, name, seconds))


async def _evict(request: web.Request) -> web.Response:
    gateway, namespace, name, seconds = _change(request)
    return web.json_response(await gateway.admin.evict(namespace, name, seconds))


async def _prune(request: web.Request) -> web.Response:
    _check_origin(request)
    dry_run = request.query.get("dryRun", "false").lower() in _TRUE
    return web.json_response(await request.app[GATEWAY].admin.prune(dry_run=dry_run))


def _check_origin(request: web.Request) -> None:
    """Refuse a change that a foreign web page made a browser send."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise RequestError(f"requests from {origin} may not change anything", status=403, code="foreign_origin")


def _change(request: web.Request) -> tuple[Any, str, str, float]:
    """A request that changes one model."""
    _check_origin(request)
    gateway = request.app[GATEWAY]
    text = request.query.get("deadlineSeconds", str(gateway.settings.admin_seconds))
    seconds = _number(text)
    if seconds is None or seconds <= 0:
        raise RequestError(f'deadlineSeconds is "{text}"', "set it to a number of seconds", param="deadlineSeconds")
    return gateway, request.match_info["namespace"], request.match_info["name"], seconds


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


async def _logs(request: web.Request) -> web.StreamResponse:
    text = request.query.get("tail", str(TAIL_LINES))
    tail = _number(text)
    if tail is None or tail < 0:
        raise RequestError(f'tail is "{text}"', "set it to a number of lines", param="tail")
    lines = request.app[GATEWAY].admin.logs(
        request.match_info["namespace"],
        request.match_info["name"],
        tail=int(min(tail, MOST_LINES)),
        follow=_follow(request),
    )
    return await _stream(request, lines, "text/plain; charset=utf-8")


async def _events(request: web.Request) -> web.StreamResponse:
    events = request.app[GATEWAY].admin.events(follow=_follow(request))

    async def lines() -> AsyncIterator[bytes]:
        async for event in events:
            yield json.dumps(asdict(event)).encode() + b"\n"

    return await _stream(request, lines(), "application/x-ndjson")


async def _status(request: web.Request) -> web.Response:
    return web.json_response(request.app[GATEWAY].admin.status_lines())


def _follow(request: web.Request) -> bool:
    return request.query.get("follow", "false").lower() in _TRUE


async def _stream(request: web.Request, lines: AsyncIterator[bytes], content_type: str) -> web.StreamResponse:
    """Send what comes until it ends, the client goes or the gateway is stopped.

    The first piece is awaited before the head is sent, so that an object that does not exist is a 404 and not an
    empty 200; but not for long, because a log that is followed may be silent. After the head a failure can only break
    the answer off.
    """
    closing = asyncio.ensure_future(request.app[GATEWAY].closing.wait())
    coming = asyncio.ensure_future(_next(lines))
    try:
        await asyncio.wait({coming, closing}, timeout=FIRST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            coming.result()
        response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            while True:
                await asyncio.wait({coming, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done() or (line := coming.result()) is None:
                    break
                await response.write(line)
                coming = asyncio.ensure_future(_next(lines))
            await response.write_eof()
        except ConnectionError:
            log.debug("left path=%s", request.path)
        except Exception as error:
            if not isinstance(error, OmniError):
                log.exception("failed path=%s", request.path)
            log.info("broken_off path=%s error=%s", request.path, error)
            if request.transport is not None:
                request.transport.abort()
        return response
    finally:
        closing.cancel()
        coming.cancel()
        await asyncio.gather(coming, closing, return_exceptions=True)


async def _next(lines: AsyncIterator[bytes]) -> bytes | None:
    return await anext(lines, None)
