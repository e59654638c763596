"""The OpenAI-compatible endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from omnimodel.gateway.bodies import chunks_of, largest_body_bytes, parse, read, rewritten, too_large
from omnimodel.gateway.forms import FormScanner, FormUpload, boundary_of
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.gateway.names import check_task, find, listed_names, not_found, resolve
from omnimodel.gateway.refusals import RequestError
from omnimodel.protocol.dispatch import InferenceRequest, ModelCard

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def routes() -> list[web.RouteDef]:
    """All of them."""
    return [
        web.get("/v1/models", _models),
        web.get("/v1/models/{name:.+}", _model),
        web.post("/v1/chat/completions", _json_endpoint("text-generation", streams=True)),
        web.post("/v1/completions", _json_endpoint("text-generation", streams=True)),
        web.post("/v1/embeddings", _json_endpoint("embeddings")),
        web.post("/v1/audio/speech", _json_endpoint("text-to-speech")),
        web.post("/v1/audio/transcriptions", _transcriptions),
    ]


def _json_endpoint(task: str, *, streams: bool = False) -> Handler:
    """A handler for a JSON body that names its model."""

    async def handle(request: web.Request) -> web.StreamResponse:
        gateway = request.app[GATEWAY]
        terms = gateway.terms(request)
        cards = gateway.backend.models()
        with gateway.buffered.lease() as lease:
            body = await read(request, lease, largest_body_bytes(cards), gateway.settings.upload_silence_seconds)
            fields = await parse(body)
            served = resolve(cards, _model_name(request, fields))
            check_task(served.card, task)
            if len(body) > served.card.request_bytes:
                raise too_large(len(body), served.card.request_bytes)
            inference = InferenceRequest(
                served.card.name,
                "POST",
                request.path,
                {"Content-Type": "application/json", **gateway.passed_headers(request)},
                await rewritten(body, fields, served.card.name, served.defaults, lease),
                terms.deadline_seconds,
                terms.priority,
            )
            stream = streams and {**served.defaults, **fields}.get("stream") is True
            return await gateway.relay.carry(request, inference, stream=stream)

    return handle


def _model_name(request: web.Request, fields: dict[str, Any]) -> str:
    """The field `model`, or the query's; a request that names none is never guessed at."""
    name = fields.get("model")
    if name is None:
        name = request.query.get("model")
    if name is None:
        raise RequestError(
            "the request names no model",
            "set the field model; GET /v1/models lists them",
            code="model_missing",
            param="model",
        )
    if not isinstance(name, str) or not name:
        raise RequestError("the field model is no name", "set it to the name of a model", param="model")
    return name


async def _transcriptions(request: web.Request) -> web.StreamResponse:
    """A form with a file: it goes on to the model while it comes."""
    gateway = request.app[GATEWAY]
    terms = gateway.terms(request)
    cards = gateway.backend.models()
    content_type = request.headers.get("Content-Type", "")
    limit_bytes = largest_body_bytes(cards)
    with gateway.buffered.lease() as lease:
        length = None if "Content-Encoding" in request.headers else request.content_length
        upload = FormUpload(
            FormScanner(boundary_of(content_type)),
            chunks_of(request, limit_bytes, gateway.settings.upload_silence_seconds),
            lease,
            length,
        )
        served = resolve(cards, await upload.model_name(request.query.get("model")))
        check_task(served.card, "automatic-speech-recognition")
        upload.limit_bytes = served.card.request_bytes
        if length is not None and length > served.card.request_bytes:
            raise too_large(length, served.card.request_bytes)
        headers = {"Content-Type": content_type, **gateway.passed_headers(request)}
        rewritten_bytes = upload.rewritten_length(served.card.name, served.defaults)
        if rewritten_bytes is not None:
            headers["Content-Length"] = str(rewritten_bytes)
        inference = InferenceRequest(
            served.card.name,
            "POST",
            request.path,
            headers,
            upload.chunks(served.card.name, served.defaults),
            terms.deadline_seconds,
            terms.priority,
        )
        return await gateway.relay.carry(request, inference, upload=upload)


async def _models(request: web.Request) -> web.Response:
    cards = request.app[GATEWAY].backend.models()
    return web.json_response({"object": "list", "data": [_entry(card) for card in cards if card.listed]})


async def _model(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    gateway = request.app[GATEWAY]
    card = find(gateway.backend.models(), name)
    if card is None:
        raise not_found(gateway.backend.models(), name)
    return web.json_response(_entry(card))


def _entry(card: ModelCard) -> dict[str, Any]:
    """A model as `GET /v1/models` shows it: OpenAI's fields, and what is ours."""
    entry: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": card.created_seconds,
        "owned_by": card.namespace,
        "aliases": [name for name in listed_names(card) if name != card.name],
        "task": card.task,
        "tier": card.tier,
        "ready": card.ready,
        "capabilities": list(card.capabilities),
        "metadata": dict(card.metadata),
    }
    if not card.ready:
        entry |= {"reason": card.reason, "message": card.message}
    return entry
