"""Request bodies: read within limits, and rewritten only where an alias asks for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from aiohttp import web

from omnimodel.gateway.refusals import RequestError
from omnimodel.protocol.dispatch import ModelCard

LARGE_BYTES = 1 << 20  # a body beyond this is parsed in a thread, so that other requests do not stand still


class Buffered:
    """How many bytes of bodies the gateway keeps in memory, in all."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def lease(self) -> Lease:
        """For one request."""
        return Lease(self)


class Lease:
    """What one request keeps in memory, as a context: given back at its end."""

    def __init__(self, buffered: Buffered) -> None:
        self._buffered = buffered
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffered.used_bytes -= self._held_bytes
        self._held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count further bytes.

        Raises:
            RequestError: all requests together hold too much.
        """
        if self._buffered.used_bytes + size_bytes > self._buffered.limit_bytes:
            raise RequestError(
                f"bodies of waiting requests fill the {self._buffered.limit_bytes} bytes the gateway has for them",
                "send it again later",
                status=429,
                code="queue_full",
                retry_after_seconds=5,
            )
        self._buffered.used_bytes += size_bytes
        self._held_bytes += size_bytes


def largest_body_bytes(cards: Sequence[ModelCard]) -> int:
    """What may be read before it is known which model is meant."""
    return max((card.request_bytes for card in cards), default=1 << 20)


def too_large(size_bytes: int | None, limit_bytes: int) -> RequestError:
    """413, with the limit in it."""
    has = f"has {size_bytes} bytes" if size_bytes else "is too large"
    return RequestError(
        f"the body {has}, the limit is {limit_bytes} bytes",
        "send less, or raise limits.requestBytes of the model",
        status=413,
        code="request_too_large",
    )


async def chunks_of(request: web.Request, limit_bytes: int, silence_seconds: float) -> AsyncIterator[bytes]:
    """The body as it comes.

    Raises:
        RequestError: it is larger than the limit, it is not what its headers say, or the client pauses too long.
    """
    length = request.content_length
    if length is not None and length > limit_bytes:
        raise too_large(length, limit_bytes)
    total = 0
    while True:
        try:
            chunk = request.content.read_nowait()
            if not chunk and not request.content.at_eof():
                async with asyncio.timeout(silence_seconds):
                    chunk = await request.content.readany()
        except TimeoutError:
            raise RequestError(
                f"the body stopped for {silence_seconds:g} s after {total} bytes",
                "send it whole",
                status=408,
                code="request_timeout",
            ) from None
        except web.RequestPayloadError as error:
            raise RequestError(
                f"the body cannot be read after {total} bytes: {' '.join(str(error).split())}",
                "send it as its Content-Encoding and Transfer-Encoding say",
                code="invalid_body",
            ) from None
        if not chunk:
            return
        total += len(chunk)
        if total > limit_bytes:
            raise too_large(None, limit_bytes)
        yield chunk


async def read(request: web.Request, lease: Lease, limit_bytes: int, silence_seconds: float) -> bytes:
    """The whole body.

    Raises:
        RequestError: see `chunks_of` and `Lease.take`.
    """
    parts: list[bytes] = []
    async for chunk in chunks_of(request, limit_bytes, silence_seconds):
        lease.take(len(chunk))
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def parse(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestError: it is none; the error says what it is instead, or where it stops being JSON.
    """
    if not body or body.isspace():
        raise RequestError("the body is empty", "send a JSON object", code="invalid_json")
    try:
        value = await asyncio.to_thread(json.loads, body) if len(body) > LARGE_BYTES else json.loads(body)
    except json.JSONDecodeError as error:
        place = f"at line {error.lineno} column {error.colno}"
        raise RequestError(
            f"the body is not JSON: {error.msg} {place}", "send a JSON object", code="invalid_json"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8 at byte {error.start}", "send JSON in UTF-8", code="invalid_json"
        ) from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body cannot be read: {what}", "send a JSON object", code="invalid_json") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}.get(
            type(value), "null"
        )
        raise RequestError(f"the body is {kind}", "send a JSON object", code="invalid_json")
    return value


async def rewritten(body: bytes, fields: dict[str, Any], name: str, defaults: Mapping[str, Any], lease: Lease) -> bytes:
    """The body for the model: byte for byte that of the client, unless an alias renames it or sets fields.

    Raises:
        RequestError: see `Lease.take`.
    """
    if fields.get("model") == name and not defaults:
        return body
    return await written({**defaults, **fields, "model": name}, len(body), lease)


async def written(fields: Mapping[str, Any], size_bytes: int, lease: Lease) -> bytes:
    """JSON of a body that was changed.

    Args:
        fields: of the body.
        size_bytes: of what the client sent: when it is large, it is written in a thread.
        lease: that the copy counts in too.

    Raises:
        RequestError: see `Lease.take`.
    """
    content = await asyncio.to_thread(_encoded, fields) if size_bytes > LARGE_BYTES else _encoded(fields)
    lease.take(len(content))
    return content


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
