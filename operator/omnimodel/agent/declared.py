"""What a manifest declares about one model, as the numbers that the agent acts on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """What the manifest allows one model, resolved."""

    concurrency: int
    queue: int
    deadline_seconds: float
    load_deadline_seconds: float
    drain_seconds: float
    request_bytes: int
    response_bytes: int

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Limits:
        """Read them from a process spec."""
        limits = spec["limits"]
        return cls(
            concurrency=limits["concurrency"],
            queue=limits["queue"],
            deadline_seconds=limits["deadlineSeconds"],
            load_deadline_seconds=limits["loadDeadlineSeconds"],
            drain_seconds=limits["drainSeconds"],
            request_bytes=limits["requestBytes"],
            response_bytes=limits["responseBytes"],
        )


@dataclass(frozen=True)
class Residency:
    """What the manifest says about residency, resolved."""

    priority: int
    min_resident_seconds: float
    idle_after_seconds: float | None
    idle_tier: str
    keep_resident: bool
    preload: bool

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Residency:
        """Read it from a process spec."""
        residency = spec["residency"]
        return cls(
            priority=residency["priority"],
            min_resident_seconds=residency["minResidentSeconds"],
            idle_after_seconds=residency["idleAfterSeconds"],
            idle_tier=residency["idleTier"],
            keep_resident=residency["keepResident"],
            preload=residency["preload"],
        )
