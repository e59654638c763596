"""The HTTP form of `dispatch.Backend`: how a gateway asks an agent in another pod.

`METHOD /omni/v1/ingress/{namespace}/{name}/{path}` is `Backend.open`. A request with a body is sent with
`Expect: 100-continue`, and the agent says `100 Continue` only when the model takes the request: what an agent holds
has not been sent, so that it can go to another agent when the first one dies, and no body lies in a buffer meanwhile.
The answer is that of the model's process, byte for byte, with the hold in headers. A `DispatchError` has `Omni-Error`
in its head; when it comes in the middle of an answer the connection is broken off, and `EXCHANGES_PATH` tells why.

`GET /omni/v1/report` is what the agent knows; with `?follow=true` a line of JSON for every change after the first
whole one, and an empty object when there was none for a while.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

from omnimodel.errors import DispatchError, Reason
from omnimodel.protocol.dispatch import (
    WAIT_REASON_HEADER,
    WAITED_HEADER,
    WAKE_SECONDS_HEADER,
    Hold,
    ModelCard,
)
from omnimodel.protocol.report import AgentReport, DeviceReport, ModelReport, PoolReport, ProcessReport

INGRESS_PATH = "/omni/v1/ingress"
REPORT_PATH = "/omni/v1/report"
EXCHANGES_PATH = "/omni/v1/exchanges"  # + /{exchange}: why an answer was broken off
ERROR_HEADER = "Omni-Error"  # the answer is no model's but a DispatchError as JSON
EXCHANGE_HEADER = "Omni-Exchange"  # of a request: a name for `EXCHANGES_PATH`
HEARTBEAT_SECONDS = 2.0  # a followed report is never silent for longer

_Record = TypeVar("_Record", bound=object)


class Reporting(Protocol):
    """An agent, as the routes of this protocol see it beside `Backend`."""

    @property
    def report(self) -> Callable[[], AgentReport]:
        """Called for everything at this moment."""

    @property
    def wait_changed(self) -> Callable[[], Awaitable[None]]:
        """Called to wait until the report may have changed; any number may wait."""


@dataclass(frozen=True)
class Told:
    """A `Reporting` of two functions."""

    report: Callable[[], AgentReport]
    wait_changed: Callable[[], Awaitable[None]]


def key_of(card: ModelCard) -> str:
    """`namespace/name` of a card: its name holds the namespace unless that is `default`."""
    return card.name if "/" in card.name else f"{card.namespace}/{card.name}"


def error_message(error: DispatchError) -> dict[str, Any]:
    """A DispatchError as JSON."""
    return {
        "subject": error.subject,
        "problem": error.problem,
        "cure": error.cure,
        "reason": str(error.reason),
        "status": error.status,
        "retryAfterSeconds": error.retry_after_seconds,
    }


def error_from(message: Mapping[str, Any], status: int = 502) -> DispatchError:
    """Read a DispatchError; a reason that a newer agent made up counts as internal."""
    reason = message.get("reason", "")
    after = message.get("retryAfterSeconds")
    return DispatchError(
        str(message.get("subject", "")),
        str(message.get("problem", "it was refused without a word")),
        str(message.get("cure", "")),
        reason=Reason(reason) if reason in set(Reason) else Reason.INTERNAL,
        status=int(message.get("status") or status),
        retry_after_seconds=None if after is None else float(after),
    )


def hold_headers(hold: Hold) -> dict[str, str]:
    """How long a request was held, as headers."""
    return {
        WAITED_HEADER: f"{hold.waited_seconds:.6f}",
        WAIT_REASON_HEADER: hold.reason,
        WAKE_SECONDS_HEADER: f"{hold.wake_seconds:.6f}",
    }


def hold_from(headers: Mapping[str, str], *, waited_before_seconds: float = 0.0) -> Hold:
    """Read them; what was waited elsewhere before comes on top."""
    return Hold(
        _seconds(headers.get(WAITED_HEADER)) + waited_before_seconds,
        headers.get(WAIT_REASON_HEADER, "none"),
        _seconds(headers.get(WAKE_SECONDS_HEADER)),
    )


def _seconds(text: str | None) -> float:
    try:
        value = float(text or 0.0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


@dataclass(frozen=True)
class Snapshot:
    """What an agent knows at one moment.

    Args:
        pool: of the agent.
        models: by `namespace/name`.
        cards: by `namespace/name`; a model may have a card and no report while it has no process.
        draining: it takes no more requests.
    """

    pool: PoolReport
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    draining: bool = False


def snapshot_of(report: AgentReport, cards: Sequence[ModelCard], *, draining: bool) -> Snapshot:
    """Put together what an agent says."""
    return Snapshot(
        report.pool,
        {f"{model.namespace}/{model.name}": model for model in report.models},
        {key_of(card): card for card in cards},
        draining,
    )


def changes(before: Snapshot | None, after: Snapshot) -> dict[str, Any]:
    """What a follower that knows `before` must be told; empty when there is nothing new, whole when before is None."""
    if before is None:
        return {
            "whole": True,
            "pool": asdict(after.pool),
            "draining": after.draining,
            "models": {key: asdict(model) for key, model in after.models.items()},
            "cards": {key: asdict(card) for key, card in after.cards.items()},
        }
    found: dict[str, Any] = {}
    if before.pool != after.pool:
        found["pool"] = asdict(after.pool)
    if before.draining != after.draining:
        found["draining"] = after.draining
    for name, old, new in (("models", before.models, after.models), ("cards", before.cards, after.cards)):
        changed: dict[str, Any] = {key: asdict(item) for key, item in new.items() if old.get(key) != item}
        changed |= dict.fromkeys(key for key in old if key not in new)
        if changed:
            found[name] = changed
    return found


def merged(before: Snapshot | None, message: Mapping[str, Any]) -> Snapshot:
    """What a follower knows after a message.

    Raises:
        ValueError: the message makes no sense, or is a change of nothing.
    """
    if message.get("whole"):
        before = None
    elif before is None:
        raise ValueError("a change came before the whole")
    try:
        return Snapshot(
            pool=_pool_report(message["pool"]) if before is None or "pool" in message else before.pool,
            models=_merged_items(before.models if before else {}, message.get("models", {}), _model_report),
            cards=_merged_items(before.cards if before else {}, message.get("cards", {}), _card),
            draining=bool(message.get("draining", before.draining if before else False)),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is no report: {error}") from error


def _merged_items(before: Mapping[str, _Record], changed: Mapping[str, Any], read: Any) -> Mapping[str, _Record]:
    if not changed:
        return before
    items = dict(before)
    for key, value in changed.items():
        if value is None:
            items.pop(key, None)
        else:
            items[key] = read(value)
    return dict(sorted(items.items()))


def _record(kind: type[_Record], message: Mapping[str, Any]) -> _Record:
    """A dataclass from JSON; what a newer agent says beyond it is left out, lists become the tuples they were."""
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    return kind(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in message.items() if name in known}
    )  # fmt: skip


def _pool_report(message: Mapping[str, Any]) -> PoolReport:
    devices = tuple(_record(DeviceReport, device) for device in message.get("devices", ()))
    return _record(PoolReport, {**message, "devices": devices})


def _model_report(message: Mapping[str, Any]) -> ModelReport:
    process = message.get("process")
    return _record(ModelReport, {**message, "process": _record(ProcessReport, process) if process else None})


def _card(message: Mapping[str, Any]) -> ModelCard:
    return _record(ModelCard, message)
