"""What the API server says when it refuses, and that it says nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from omnimodel.errors import OmniError


class KubeError(OmniError):
    """The API server refused, or was not there.

    Args:
        status: HTTP status; 0 when no answer came.
        cause: the API's own reason, such as `AlreadyExists`.
        retry_after_seconds: what the server asks for; 0 for nothing.
    """

    def __init__(
        self,
        subject: str,
        problem: str,
        cure: str = "",
        *,
        status: int,
        cause: str = "",
        retry_after_seconds: float = 0,
    ) -> None:
        super().__init__(subject, problem, cure)
        self.status = status
        self.cause = cause
        self.retry_after_seconds = retry_after_seconds

    @property
    def missing(self) -> bool:
        """There is no such object, or no such kind."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def conflict(self) -> bool:
        """Someone else wrote at the same time, or has it already."""
        return self.status == HTTPStatus.CONFLICT

    @property
    def gone(self) -> bool:
        """The version asked for is too old: list again."""
        return self.status == HTTPStatus.GONE

    @property
    def invalid(self) -> bool:
        """The object itself is not accepted; sending it again does not help."""
        return self.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}


class suppress_missing:  # noqa: N801 - reads as contextlib.suppress does
    """Let it pass that an object is not there, or is another one than was meant."""

    def __init__(self, *, also_conflict: bool = False) -> None:
        self._also_conflict = also_conflict

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return isinstance(error, KubeError) and (error.missing or (self._also_conflict and error.conflict))


def refused(path: str, status: int, body: bytes | str | None, headers: Mapping[str, str]) -> KubeError:
    """The error of an answer that refuses."""
    try:
        answer = json.loads(body or b"")
    except ValueError:
        answer = {}
    answer = answer if isinstance(answer, dict) else {}
    details = answer.get("details") or {}
    seconds = headers.get("Retry-After") or details.get("retryAfterSeconds") or 0
    return KubeError(
        f"Kubernetes {path}",
        answer.get("message") or f"answered with status {status}",
        status=status,
        cause=str(answer.get("reason", "")),
        retry_after_seconds=float(seconds) if str(seconds).replace(".", "", 1).isdigit() else 0,
    )


def unreachable(path: str, error: BaseException) -> KubeError:
    """The error of an answer that did not come."""
    what = str(error) or type(error).__name__
    return KubeError(f"Kubernetes {path}", f"the API server does not answer ({what})", status=0)
