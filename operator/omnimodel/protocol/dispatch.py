"""What a gateway asks of an agent: which models there are, and an answer to one request.

The agent implements `Backend` for the gateway in the same process; over a network the same calls go by HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

WAITED_HEADER = "Omni-Waited-Seconds"  # how long the request was held, in seconds
WAIT_REASON_HEADER = "Omni-Wait-Reason"  # `none`, `queue` or `wake`: what it waited for
WAKE_SECONDS_HEADER = "Omni-Wake-Seconds"  # the wake that this request waited for, in seconds
MODEL_HEADER = "Omni-Model"  # metadata.name of the model that answered
DEADLINE_HEADER = "Omni-Deadline-Seconds"  # of a request: how long the client is willing to wait
PRIORITY_HEADER = "Omni-Priority"  # of a request: `interactive` (default) or `background`


def card_name(namespace: str, name: str) -> str:
    """What a model is called among all: metadata.name, with its namespace unless that is `default`."""
    return name if namespace == "default" else f"{namespace}/{name}"


@dataclass(frozen=True)
class ModelCard:
    """What a gateway knows of a model.

    Args:
        name: see `card_name`; unique, and what `InferenceRequest.model` holds.
        served_names: every name that clients may use for it, metadata.name first, aliases last.
        defaults: request defaults of an alias: served name -> body fields that a request does not set itself.
        task: `text-generation`, `embeddings`, `text-classification`, `automatic-speech-recognition`,
            `text-to-speech` or `infer`.
        tier: `resident`, `warm`, `parked` or `cold`.
        ready: whether it can be woken; with `reason` and `message` when not.
        unlisted: the served names that /v1/models does not show, and that are proposed to nobody.
        granted: whether the served names are its own; else it asks for them, and another model may have them.
        request_bytes: the largest body it takes.
        inputs, outputs: tensors of the Open Inference Protocol: dicts of `name`, `datatype`, `shape`.
        capabilities, metadata: free, from the manifest, for /v1/models.
        created_seconds: Unix time.
        concurrency: how many requests it computes at once; 0 while unknown.
    """

    name: str
    namespace: str
    served_names: tuple[str, ...]
    task: str
    tier: str
    ready: bool
    reason: str = ""
    message: str = ""
    unlisted: tuple[str, ...] = ()
    granted: bool = True
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    request_bytes: int = 32 << 20
    inputs: Sequence[Mapping[str, Any]] = ()
    outputs: Sequence[Mapping[str, Any]] = ()
    capabilities: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    created_seconds: int = 0
    concurrency: int = 0

    @property
    def listed(self) -> bool:
        """Whether /v1/models shows it: by one of its names at least."""
        return any(name not in self.unlisted for name in self.served_names)


@dataclass(frozen=True)
class InferenceRequest:
    """One HTTP request for one model's process, already checked and rewritten by the gateway.

    Args:
        model: `ModelCard.name`.
        method, path: of the request to the process, such as `POST /v1/chat/completions`.
        headers: to pass on; hop-by-hop headers are not among them.
        body: the whole body, or its chunks for an upload.
        deadline_seconds: how long it may be held and computed in all; None for the model's own limit.
        priority: `interactive` or `background`.
    """

    model: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | AsyncIterable[bytes]
    deadline_seconds: float | None = None
    priority: str = "interactive"


@dataclass(frozen=True)
class Hold:
    """How long a request was held before its model took it, and for what (see the header names)."""

    waited_seconds: float
    reason: str
    wake_seconds: float


@dataclass(frozen=True)
class InferenceResponse:
    """The process's answer; `body` yields chunks exactly as the process sent them."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]
    hold: Hold


@dataclass(frozen=True)
class Estimate:
    """What a held request can expect: its place in its model's queue (from 1) and seconds to go."""

    position: int
    seconds: float


class Backend(Protocol):
    """The agent, as a gateway sees it."""

    def models(self) -> Sequence[ModelCard]:
        """Every model of the catalogue, in the order of their names."""

    def open(self, request: InferenceRequest) -> AbstractAsyncContextManager[InferenceResponse]:
        """Hold the request until its model is resident, send it, and give the response when its head is there.

        Leaving the context, or cancelling while it is entered, ends the request: the process stops working on it.

        Raises:
            DispatchError: there will be no response; the error has the HTTP status and what to do.
        """

    def estimate(self, model: str) -> Estimate:
        """What a request that came now could expect."""
