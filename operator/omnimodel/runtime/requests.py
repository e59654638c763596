"""What can be wrong with a request, as the error objects that clients of both protocols understand."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

NOT_RESIDENT = "not_resident"
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # JSON may have one half of a pair alone, UTF-8 and tokenizers may not


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        message: one sentence for the person who wrote the request.
        param: the field it is about.
        code: the machine-readable cause.
        status: of HTTP.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    @property
    def type(self) -> str:
        """The error type that OpenAI gives this status."""
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def inference_body(self) -> dict[str, str]:
        """The error object of the Open Inference Protocol, whose `error` is text, with field and cause beside it."""
        beside = {"param": self.param, "code": self.code}
        return {"error": self.message, **{name: text for name, text in beside.items() if text}}


def unsupported(name: str, why: str = "") -> RequestError:
    """A parameter that this model does not know or does not follow."""
    text = f"Unsupported parameter: {name}{f' ({why})' if why else ''}; leave it out"
    return RequestError(text, param=name, code="unsupported_parameter")


def invalid(name: str, problem: str) -> RequestError:
    """A parameter with a value it cannot have."""
    return RequestError(f"Invalid value for {name}: {problem}", param=name, code="invalid_value")


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        RequestError: it is none, or has texts that are none.
    """
    try:
        text = body.decode(json.detect_encoding(body))
        value = json.loads(text)
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, not a {type(value).__name__}", code="invalid_json")
    return value


def refuse_others(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse the first field of a body that is not among `known`.

    Raises:
        RequestError: there is one.
    """
    for name in body:
        if name not in known:
            raise unsupported(name)


def text_of(body: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    """A field that holds text; null means the default.

    Raises:
        RequestError: it is missing or holds something else.
    """
    value = default if body.get(name) is None else body[name]
    if value is None:
        raise RequestError(f"Missing required parameter: {name}", param=name, code="missing_required_parameter")
    if not isinstance(value, str):
        raise invalid(name, f"expected a string, got {kind_of(value)}")
    return value


def texts_of(body: Mapping[str, Any], name: str) -> list[str]:
    """A field that holds a text or a list of texts, as a list.

    Raises:
        RequestError: it is missing, empty or holds something else.
    """
    value = body.get(name)
    if value is None:
        raise RequestError(f"Missing required parameter: {name}", param=name, code="missing_required_parameter")
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid(name, "expected a string or a list of strings")
    if not texts:
        raise invalid(name, "the list is empty")
    return texts


def number_of(body: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    """A field that holds a number between two bounds; null means the default.

    Raises:
        RequestError: it holds something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, f"expected a number, got {kind_of(value)}")
    if not low <= value <= high:
        raise invalid(name, f"{value} is not between {low:g} and {high:g}")
    return float(value)


def integer_of(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A field that holds an integer between two bounds; None when it is missing or null.

    Raises:
        RequestError: it holds something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"expected an integer, got {kind_of(value)}")
    if not low <= value <= high:
        raise invalid(name, f"{value} is not between {low} and {high}")
    return value


def flag_of(body: Mapping[str, Any], name: str) -> bool:
    """A field that holds true or false; missing or null means false.

    Raises:
        RequestError: it holds something else.
    """
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(name, f"expected true or false, got {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """What JSON calls a value's type."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")
