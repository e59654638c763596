"""Known-answer checks: the request that a probe describes, and whether an answer is the expected one.

The agent sends a model's probe before the model counts as ready, and `omni check` sends it from outside.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST = 1e300  # a whole number of JSON may be larger than any float


@dataclass(frozen=True)
class ProbeRequest:
    """The HTTP request of a probe."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


def request(probe: Mapping[str, Any]) -> ProbeRequest:
    """The request of a probe as it stands in a manifest (`path`, and `json` or `form`)."""
    method = str(probe.get("method") or "POST")
    path = str(probe["path"])
    if probe.get("form"):
        boundary = uuid.uuid4().hex
        body = b"".join(_part(boundary, name, value) for name, value in probe["form"].items())
        kind = f"multipart/form-data; boundary={boundary}"
        return ProbeRequest(method, path, {"Content-Type": kind}, body + f"--{boundary}--\r\n".encode())
    if probe.get("json") is not None:
        return ProbeRequest(method, path, {"Content-Type": "application/json"}, json.dumps(probe["json"]).encode())
    return ProbeRequest(method, path, {}, b"")


def _part(boundary: str, name: str, value: Any) -> bytes:
    if isinstance(value, Mapping):
        content = base64.b64decode(value["base64"])
        head = (
            f'Content-Disposition: form-data; name="{name}"; filename="{value.get("filename", name)}"\r\n'
            f"Content-Type: {value.get('contentType', 'application/octet-stream')}\r\n"
        )
    else:
        content, head = str(value).encode(), f'Content-Disposition: form-data; name="{name}"\r\n'
    return f"--{boundary}\r\n{head}\r\n".encode() + content + b"\r\n"


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def failures(
    probe: Mapping[str, Any],
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    search: Callable[[str, str], bool] = _found,
) -> list[str]:
    """What is wrong with an answer: one sentence for each expectation that is not met; empty when it is right.

    Args:
        search: whether a regular expression is found in a text; some take for ever.
    """
    if not 200 <= status < 300:
        return [f"the status is {status}, and the answer {_short(body.decode(errors='replace'))}"]
    found = []
    parsed: Any = None
    for expectation in probe.get("expect") or ():
        if expectation.get("contentType"):
            kind = headers.get("Content-Type", headers.get("content-type", ""))
            if not kind.startswith(expectation["contentType"]):
                found.append(f"the content type is {kind!r}, not {expectation['contentType']!r}")
            continue
        if expectation.get("minBytes") is not None:
            if len(body) < expectation["minBytes"]:
                found.append(f"the answer has {len(body)} bytes, fewer than {expectation['minBytes']}")
            continue
        if parsed is None:
            try:
                parsed = json.loads(body)
            except (ValueError, RecursionError):
                return [*found, f"the answer is not JSON: {_short(body.decode(errors='replace'))}"]
        pointer = str(expectation.get("at") or "")
        try:
            value = _at(parsed, pointer)
        except (KeyError, IndexError, ValueError, TypeError):
            found.append(f"there is nothing at {pointer} in {_short(json.dumps(parsed))}")
            continue
        wrong = _mismatch(expectation, value, search)
        if wrong:
            found.append(f"{pointer or 'the answer'} is {_short(json.dumps(value))}, {wrong}")
    return found


def _at(document: Any, pointer: str) -> Any:
    """The value a JSON pointer (RFC 6901) names."""
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def _mismatch(expectation: Mapping[str, Any], value: Any, search: Callable[[str, str], bool]) -> str:
    if "equals" in expectation and expectation["equals"] is not None and value != expectation["equals"]:
        return f"not {json.dumps(expectation['equals'])}"
    contains = expectation.get("contains")
    if contains is not None and contains not in (value if isinstance(value, str | list) else json.dumps(value)):
        return f"which does not contain {contains!r}"
    matches = expectation.get("matches")
    if matches is not None and not search(matches, value if isinstance(value, str) else json.dumps(value)):
        return f"which does not match {matches!r}"
    near = expectation.get("near")
    if near is not None:
        within = expectation.get("within") or 1e-3
        wanted, given = (near, value) if isinstance(near, list) else ([near], [value])
        if (
            not isinstance(given, list)
            or len(given) < len(wanted)
            or not all(_is_near(g, w, within) for g, w in zip(given, wanted, strict=False))
        ):
            return f"not within {within:g} of {json.dumps(near)}"
    return ""


def _is_near(given: Any, wanted: float, within: float) -> bool:
    return isinstance(given, int | float) and abs(given) < _LARGEST and abs(given - wanted) <= within


def _short(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
