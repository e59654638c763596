"""A request with a known answer."""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from omnimodel.api.amounts import Duration
from omnimodel.api.fields import AbsolutePath, Checked, Flag, cel, choice, number, plain, refusal, whole
from omnimodel.api.meta import Part, Rule
from omnimodel.api.references import text_or

UPLOAD_LIMIT = 1_048_576


def _base64(value: Any) -> str:
    encoded: str = plain(UPLOAD_LIMIT, empty=False).check(value)
    try:
        base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError):
        raise refusal("is not base64", "write what `base64 FILE` prints") from None
    return encoded


def _pointer(value: Any) -> str:
    pointer: str = plain(512).check(value)
    if pointer and not pointer.startswith("/"):
        path = re.sub(r"\[([0-9]+)\]", r".\1", pointer.removeprefix("$")).strip(".").replace(".", "/")
        raise refusal("is no JSON pointer", f"write /{path}")
    return pointer


def _expression(value: Any) -> str:
    expression: str = plain(512, empty=False).check(value)
    try:
        re.compile(expression)
    except re.error as error:
        raise refusal(f"is no regular expression ({error})", "write one such as Paris|paris") from None
    return expression


def _near(value: Any) -> Any:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(type(item) in (int, float) and math.isfinite(item) for item in numbers):
        raise refusal("is no number, nor a list of numbers", "write one such as 0.689")
    return value


_ANY = {"x-kubernetes-preserve-unknown-fields": True}


class Upload(Part):
    """A file field of a form."""

    base64: Annotated[str, Checked(_base64, {"type": "string", "minLength": 1, "maxLength": UPLOAD_LIMIT})] = Field(
        description="The file, base64 encoded.", examples=["UklGRiQAAABXQVZF"]
    )
    filename: Annotated[str, plain(255, empty=False)] = Field(description="Its name.", examples=["hello.wav"])
    content_type: Annotated[str, plain(128, empty=False)] | None = Field(
        default=None, description="Its media type.", examples=["audio/wav"]
    )


FormValue = Annotated[
    Annotated[Annotated[str, plain(65536)], Tag("~text")] | Annotated[Upload, Tag("~file")], text_or("~file")
]


class Expectation(Part):
    """One thing that must be true of the answer."""

    at: (
        Annotated[
            str,
            Checked(
                _pointer,
                {
                    "type": "string",
                    "maxLength": 512,
                    "x-kubernetes-validations": [
                        cel(
                            "self == '' || self.startsWith('/')",
                            "is no JSON pointer",
                            "write one such as /data/0/embedding",
                        )
                    ],
                },
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="JSON pointer to a value of the answer; with equals, contains, matches or near.",
        examples=["/choices/0/message/content"],
    )
    equals: Annotated[Any, Checked(lambda value: value, {**_ANY, "nullable": True})] = Field(
        default=None, description="The value is this.", examples=["Paris"]
    )
    contains: Annotated[str, plain(4096, empty=False)] | None = Field(
        default=None, description="The value is a text with this in it.", examples=["Paris"]
    )
    matches: Annotated[str, Checked(_expression, {"type": "string", "minLength": 1, "maxLength": 512})] | None = Field(
        default=None,
        description="The value is a text that this regular expression is found in.",
        examples=["Par(is|ís)"],
    )
    near: Annotated[Any, Checked(_near, _ANY)] = Field(
        default=None, description="The value is this number, or list of numbers, but for `within`.", examples=[0.689]
    )
    within: Annotated[float, number(0, 1e15)] | None = Field(
        default=None, description="How far a number may be from `near`.", examples=[0.01]
    )
    content_type: Annotated[str, plain(128, empty=False)] | None = Field(
        default=None, description="The answer has this media type.", examples=["audio/wav"]
    )
    min_bytes: Annotated[int, whole(1, 2**40)] | None = Field(
        default=None, description="The answer has at least so many bytes.", examples=[1000]
    )
    rules = (
        Rule(
            "[has(self.at), has(self.contentType), has(self.minBytes)].filter(x, x).size() == 1",
            lambda self: (
                sum(
                    "at" in self.model_fields_set if name == "at" else getattr(self, name) is not None
                    for name in ("at", "content_type", "min_bytes")
                )
                == 1
            ),
            "needs exactly one of at, contentType and minBytes",
            "write at: /POINTER with equals: VALUE, for example",
        ),
        Rule(
            "",
            lambda self: (
                not self.has("at") or len({"equals", "contains", "matches", "near"} & self.model_fields_set) == 1
            ),
            "at needs exactly one of equals, contains, matches and near",
            "write equals: VALUE beside it, for example",
        ),
        Rule(
            "has(self.at) || !(has(self.contains) || has(self.matches) || has(self.within))",
            lambda self: (
                self.at is not None or not {"equals", "contains", "matches", "near", "within"} & self.model_fields_set
            ),
            "equals, contains, matches and near need at",
            "write at: /POINTER beside it",
        ),
        Rule(
            "",
            lambda self: ("near" in self.model_fields_set) == (self.within is not None),
            "near and within belong together",
            "write near: 0.689 and within: 0.01",
        ),
    )


class Probe(Part):
    """A known-answer check: what is sent, and what must come back."""

    path: AbsolutePath = Field(description="Path of the endpoint.", examples=["/v1/chat/completions"])
    method: Annotated[Literal["POST", "GET"], choice("POST", "GET")] = Field(
        default="POST", description="Method of the request.", examples=["POST"]
    )
    json_body: (
        Annotated[
            dict[str, Any], Checked(lambda value: _mapping(value), {"type": "object", **_ANY})  # noqa: PLW0108
        ]
        | None
    ) = Field(
        default=None,
        alias="json",
        description="The body as JSON; `model` is filled in.",
        examples=[{"messages": [{"role": "user", "content": "What is the capital of France?"}]}],
    )
    form: dict[str, FormValue] | None = Field(
        default=None,
        max_length=32,
        description="The body as a multipart form: a text, or a file with base64, filename and contentType.",
        examples=[{"file": {"base64": "UklGRiQAAABXQVZF", "filename": "hello.wav", "contentType": "audio/wav"}}],
    )
    expect: list[Expectation] = Field(
        min_length=1,
        max_length=16,
        description="What must be true of the answer.",
        examples=[[{"at": "/choices/0/message/content", "contains": "Paris"}]],
    )
    timeout: Duration | None = Field(
        default=None, description="How long the answer may take; 60s when left out.", examples=["60s"]
    )
    after_wake: Flag = Field(
        default=False,
        description=(
            "Sent after every wake too, before the model counts as ready. A server that has slept (`vllm`, `sglang`) "
            "is asked anyway, and without a probe it is stopped instead."
        ),
        examples=[True],
    )
    rules = (
        Rule(
            "",
            lambda self: (
                (self.json_body is None) != (self.form is None)
                or (self.method == "GET" and self.json_body is None and self.form is None)
            ),
            "needs exactly one of json and form",
            "write json: {input: TEXT}, for example",
        ),
        Rule(
            "!(has(self.method) && self.method == 'GET') || !has(self.json)",
            lambda self: self.method != "GET" or (self.json_body is None and self.form is None),
            "a GET has no body",
            "remove json and form, or write method: POST",
            "method",
        ),
    )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal("is no mapping", "write the fields of the request's body")
    return value
