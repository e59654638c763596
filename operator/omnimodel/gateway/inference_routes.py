"""The Open Inference Protocol v2, for every model that is no text generator. Names may hold slashes and colons."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web

from omnimodel.gateway.bodies import Lease, parse, read, written
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.gateway.names import Served, endpoint_of, find, not_found, resolve
from omnimodel.gateway.refusals import RequestError
from omnimodel.protocol.dispatch import InferenceRequest, ModelCard

LENGTH_HEADER = "Inference-Header-Content-Length"  # binary tensors follow so many bytes of JSON
VERSION = "1"  # the only one: the manifest says which model a name is


def routes() -> list[web.RouteDef]:
    """All of them."""
    return [
        web.get("/v2", _server),
        web.get("/v2/health/live", _live),
        web.get("/v2/health/ready", _ready),
        web.get("/v2/models/{tail:.+}", _get),
        web.post("/v2/models/{tail:.+}", _post),
    ]


@dataclass(frozen=True)
class _Address:
    """A path under /v2/models: the model, and what is asked of it."""

    name: str
    verb: str


def _address(request: web.Request, cards: Sequence[ModelCard]) -> _Address:
    """Read the path from its end, because a name may hold slashes.

    Raises:
        RequestError: a version is asked for that does not exist.
    """
    name, verb = request.match_info["tail"], ""
    for ending in ("infer", "ready"):
        if name.endswith("/" + ending):
            name, verb = name.removesuffix("/" + ending), ending
            break
    before, _, asked = name.rpartition("/versions/")
    if find(cards, name) is not None:  # it only looks like a version
        return _Address(name, verb)
    if before and asked:
        if asked != VERSION:
            raise RequestError(
                f'model "{before}" has no version {asked}', f"ask for version {VERSION}, or none", status=404
            )
        name = before
    return _Address(name, verb)


async def _server(_: web.Request) -> web.Response:
    try:
        own = version("omnimodel")
    except PackageNotFoundError:
        own = "unknown"
    return web.json_response({"name": "omnimodel", "version": own, "extensions": []})


async def _live(_: web.Request) -> web.Response:
    return web.json_response({"live": True})


async def _ready(request: web.Request) -> web.Response:
    ready = not request.app[GATEWAY].closing.is_set()
    return web.json_response({"ready": ready}, status=200 if ready else 503)


async def _get(request: web.Request) -> web.Response:
    cards = request.app[GATEWAY].backend.models()
    whole = find(cards, request.match_info["tail"])
    if whole is not None:  # a name may end like a verb
        return web.json_response(_metadata(whole))
    address = _address(request, cards)
    card = find(cards, address.name)
    if card is None:
        raise not_found(cards, address.name)
    if address.verb == "infer":
        raise RequestError(
            "infer is asked for with GET", "use POST", status=405, code="method_not_allowed", allowed_methods=("POST",)
        )
    if address.verb == "ready":
        return web.json_response({"name": card.name, "ready": card.ready}, status=200 if card.ready else 503)
    return web.json_response(_metadata(card))


async def _post(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    terms = gateway.terms(request)
    cards = gateway.backend.models()
    address = _address(request, cards)
    served = resolve(cards, address.name)
    card = served.card
    if address.verb != "infer":
        raise RequestError(
            f"there is no POST {request.path}",
            f"use POST /v2/models/{card.name}/infer",
            status=404,
            code="no_such_endpoint",
        )
    if card.task == "text-generation":
        raise RequestError(
            f'model "{card.name}" is for {card.task}, which this endpoint does not serve',
            f"send it to {endpoint_of(card)}",
            code="wrong_endpoint",
        )
    headers = {
        "Content-Type": request.headers.get("Content-Type", "application/json"),
        **gateway.passed_headers(request),
    }
    with gateway.buffered.lease() as lease:
        body = await read(request, lease, card.request_bytes, gateway.settings.upload_silence_seconds)
        content = await _checked(body, served, headers, lease)
        path = f"/v2/models/{card.name}/infer"
        inference = InferenceRequest(card.name, "POST", path, headers, content, terms.deadline_seconds, terms.priority)
        return await gateway.relay.carry(request, inference)


async def _checked(body: bytes, served: Served, headers: MutableMapping[str, str], lease: Lease) -> bytes:
    """The body; read in full only where an alias sets fields, because the model reads its tensors anyway.

    Args:
        body: JSON, and behind it binary tensors where a header tells the length of the JSON.
        served: with the fields of the alias.
        headers: that go with it; the length is put right.
        lease: that a copy counts in.
    """
    length = headers.get(LENGTH_HEADER)
    if served.defaults:
        end = _json_bytes(length, body)
        fields = await parse(body[:end])
        text = await written({**served.defaults, **fields}, end, lease)
        if length is not None:
            headers[LENGTH_HEADER] = str(len(text))
        return text + body[end:]
    if body[:256].lstrip()[:1] != b"{":
        await parse(body)  # says what it is instead
    return body


def _json_bytes(length: str | None, body: bytes) -> int:
    """How long the JSON of a body is.

    Raises:
        RequestError: the header that says so makes no sense.
    """
    if length is None:
        return len(body)
    if not length.isdecimal() or int(length) > len(body):
        raise RequestError(
            f'the header {LENGTH_HEADER} is "{length[:40]}"',
            f"set it to the bytes of the JSON, at most the {len(body)} of the body",
            param=LENGTH_HEADER,
        )
    return int(length)


def _metadata(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "versions": [VERSION],
        "platform": f"omnimodel_{card.task}",
        "inputs": [dict(tensor) for tensor in card.inputs],
        "outputs": [dict(tensor) for tensor in card.outputs],
    }
