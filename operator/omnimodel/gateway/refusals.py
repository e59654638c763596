"""Every answer that is not a model's: error objects in the manner of OpenAI, or of the Open Inference Protocol."""

from __future__ import annotations

import json
import math
from typing import Any

from aiohttp import web

from omnimodel.errors import DispatchError, OmniError, Reason

_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error"}
_TYPES |= {401: "authentication_error", 403: "permission_error"}
_TYPES |= {408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}


class RequestError(OmniError):
    """A request that the gateway refuses by itself, before any model is asked.

    Args:
        problem, cure: see OmniError.
        status: of HTTP.
        code: machine-readable, such as `model_not_found`.
        param: the field of the request that is wrong.
        retry_after_seconds: when it makes sense to try again; None when it does not.
        allowed_methods: of HTTP, where another one was used.
    """

    def __init__(
        self,
        problem: str,
        cure: str = "",
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after_seconds: float | None = None,
        allowed_methods: tuple[str, ...] = (),
    ) -> None:
        super().__init__("", problem, cure)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.allowed_methods = allowed_methods


def status_of(error: BaseException) -> int:
    """The HTTP status that says what happened."""
    if isinstance(error, RequestError | DispatchError):
        return error.status
    return 500


def code_of(error: BaseException) -> str:
    """The machine-readable code: `QueueFull` of the reasons is `queue_full` here."""
    if isinstance(error, RequestError):
        return error.code
    return (error.reason if isinstance(error, OmniError) else Reason.INTERNAL).code


def message_of(error: BaseException) -> str:
    """What a person reads; nothing of the inside is shown when the gateway itself is at fault."""
    return str(error) if isinstance(error, OmniError) else "the gateway failed to answer; its log says why"


def error_object(error: BaseException) -> dict[str, Any]:
    """The error in OpenAI's form."""
    status = status_of(error)
    return {
        "error": {
            "message": message_of(error),
            "type": _TYPES.get(status, "server_error"),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": code_of(error),
        }
    }


def error_body(error: BaseException, path: str) -> bytes:
    """The error as the protocol of this path wants it."""
    if path == "/v2" or path.startswith("/v2/"):
        return json.dumps({"error": message_of(error)}).encode()
    return json.dumps(error_object(error)).encode()


def refusal(error: BaseException, path: str) -> web.Response:
    """The whole answer, with Retry-After where trying again makes sense, and Allow where another method does."""
    headers = {"Content-Type": "application/json"}
    after = error.retry_after_seconds if isinstance(error, RequestError | DispatchError) else None
    if after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(after)))
    if isinstance(error, RequestError) and error.allowed_methods:
        headers["Allow"] = ", ".join(error.allowed_methods)
    return web.Response(status=status_of(error), body=error_body(error, path), headers=headers)


def error_event(error: BaseException) -> bytes:
    """The error for a stream that has begun. No `[DONE]` follows it, so that nobody takes a part for the whole."""
    return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n"
