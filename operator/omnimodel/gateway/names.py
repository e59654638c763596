"""From the name that a client uses to the model it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from omnimodel.gateway.refusals import RequestError
from omnimodel.protocol.dispatch import ModelCard
from omnimodel.protocol.ingress import key_of

ENDPOINTS = {  # where each task is served
    "text-generation": "POST /v1/chat/completions",
    "embeddings": "POST /v1/embeddings",
    "automatic-speech-recognition": "POST /v1/audio/transcriptions",
    "text-to-speech": "POST /v1/audio/speech",
}


@dataclass(frozen=True)
class Served:
    """A model under the name a client used for it.

    Args:
        card: the model.
        defaults: body fields that this name sets when the request does not.
    """

    card: ModelCard
    defaults: Mapping[str, Any]


def find(cards: Sequence[ModelCard], name: str) -> ModelCard | None:
    """The model that a name means: the one that it was given to, else the oldest that asks for it.

    By NAMESPACE/NAME a model is reached whatever others are called, and by its name when nobody else is called so.
    """
    full = [card for card in cards if name == key_of(card)]
    found = full or [card for card in cards if name in card.served_names]
    if found:
        return min(found, key=lambda card: (not card.granted, card.created_seconds, card.name))
    return next((card for card in cards if name == card.name), None)


def listed_names(card: ModelCard) -> list[str]:
    """The names by which a model is shown."""
    return [served for served in card.served_names if served not in card.unlisted]


def resolve(cards: Sequence[ModelCard], name: str) -> Served:
    """The model a client means.

    Raises:
        RequestError: there is none; the error lists near names.
    """
    card = find(cards, name)
    if card is None:
        raise not_found(cards, name)
    return Served(card, card.defaults.get(name) or {})


def not_found(cards: Sequence[ModelCard], name: str) -> RequestError:
    """404 with the names that come nearest."""
    known = {served.lower(): served for card in cards for served in listed_names(card)}
    near = [known[match] for match in get_close_matches(name[:200].lower(), list(known), n=2, cutoff=0.7)]
    shown = name if len(name) <= 200 else name[:200] + "…"
    cure = f"did you mean {' or '.join(near)}?" if near else "GET /v1/models lists those there are"
    return RequestError(f'model "{shown}" does not exist', cure, status=404, code="model_not_found", param="model")


def endpoint_of(card: ModelCard) -> str:
    """Where requests for this model belong."""
    return ENDPOINTS.get(card.task, f"POST /v2/models/{card.name}/infer")


def check_task(card: ModelCard, task: str) -> None:
    """Refuse a model that does something else than the endpoint is for.

    Raises:
        RequestError: naming the right endpoint.
    """
    if card.task != task:
        raise RequestError(
            f'model "{card.name}" is for {card.task}, which this endpoint does not serve',
            f"send it to {endpoint_of(card)}",
            code="wrong_endpoint",
            param="model",
        )
