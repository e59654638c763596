"""Conditions of objects, and why one is refused: the same on one machine and in a cluster. Pure.

Conditions follow kstatus: `Ready`, and the abnormal-true `Reconciling` and `Stalled`. The controller is the writer of
all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from omnimodel.errors import CURES, advised


@dataclass(frozen=True)
class Refusal:
    """Why a model is not given to the agent at all, or a pod or pool does not serve.

    Args:
        reason: of the condition.
        problem: what is wrong.
        cure: what to do about it; the usual one of the reason when it is None.
        serves_on: of a model only its newest version is refused.
    """

    reason: str
    problem: str
    cure: str | None = None
    serves_on: bool = False

    @property
    def advice(self) -> str:
        """What to do about it."""
        return CURES.get(self.reason, "") if self.cure is None else self.cure

    @property
    def message(self) -> str:
        """Of the condition: what is wrong and what to do about it."""
        return advised(self.reason, self.problem, self.cure)


def timestamp(unix_seconds: float) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes it; empty for never (0)."""
    if not unix_seconds:
        return ""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition_list(
    wanted: Sequence[tuple[str, str, str, str]],
    before: Sequence[Mapping[str, Any]],
    generation: int,
    now_seconds: float,
) -> list[dict[str, Any]]:
    """Conditions, each with the time of its last change of status.

    Args:
        wanted: (type, status, reason, message) of each.
        before: the conditions there were; one whose status stays keeps its time.
        generation: of the spec they speak about.
        now_seconds: Unix time.
    """
    times = {(old["type"], old["status"]): old["lastTransitionTime"] for old in before}
    return [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": generation,
            "lastTransitionTime": times.get((kind, status)) or timestamp(now_seconds),
        }
        for kind, status, reason, message in wanted
    ]


def verdict(ready: str, abnormal: str, reason: str, message: str) -> list[tuple[str, str, str, str]]:
    """The three conditions, with at most one of `Reconciling` and `Stalled` true."""
    rest = [
        (kind, "True", reason, message) if kind == abnormal else (kind, "False", "Idle", "")
        for kind in ("Reconciling", "Stalled")
    ]
    return [("Ready", ready, reason, message), *rest]
