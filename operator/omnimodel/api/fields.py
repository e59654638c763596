"""Types of single fields: each checks one value, refuses it with a cure, and knows its schema in a CRD."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from omnimodel.quantity import QuantityError

REFUSAL = "omni"  # the type of errors that already have a problem and a cure
LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SERVED_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"
PATH_LIMIT = 1024


def refusal(problem: str, cure: str, *, secret: bool = False) -> PydanticCustomError:
    """The error of a validator: what is wrong with the value and what to write instead.

    Args:
        problem, cure: the sentence.
        secret: whether the value must not be shown.
    """
    return PydanticCustomError(
        REFUSAL, "{problem}; {cure}", {"problem": problem, "cure": cure, **({"secret": True} if secret else {})}
    )


@dataclass(frozen=True, eq=False)
class Checked:
    """Annotation of a field that one function checks.

    Args:
        check: returns the value, or raises `QuantityError` or a refusal.
        schema: of the field in a CRD.
    """

    check: Callable[[Any], Any]
    schema: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._run)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.schema)

    def _run(self, value: Any) -> Any:
        try:
            return self.check(value)
        except QuantityError as error:
            raise refusal(error.problem, error.cure) from None


def cel(rule: str, problem: str, cure: str) -> dict[str, Any]:
    """One CEL rule with the sentence that offline validation gives as well."""
    return {"rule": rule, "message": f"{problem}; {cure}"}


def text_schema(limit: int, **rest: Any) -> dict[str, Any]:
    """Schema of a text of at most `limit` characters."""
    return {"type": "string", "maxLength": limit, **rest}


def text(pattern: str, problem: str, cure: str | Callable[[str], str], limit: int, *, empty: bool = False) -> Checked:
    """A text that matches a pattern as a whole.

    Args:
        pattern: for both `re` and RE2, anchored with ^ and $.
        problem: what is wrong with another text.
        cure: what to write instead; it may depend on the value.
        limit: most characters.
        empty: whether the empty text is possible.
    """
    expression = re.compile(pattern[1:-1], re.ASCII)

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise refusal("is not text", f'write it in quotes: "{value}"' if _scalar(value) else _cure(cure, ""))
        if not value and not empty:
            raise refusal("is empty", _cure(cure, value))
        if len(value) > limit:
            raise refusal(f"has {len(value)} characters, and {limit} are possible", "write a shorter one")
        if not expression.fullmatch(value) and (value or not empty):
            raise refusal(problem, _cure(cure, value))
        return value

    rule = f"self.matches('{pattern}')".replace("\\", "\\\\")
    static = cure if isinstance(cure, str) else cure("")
    schema = text_schema(limit, minLength=0 if empty else 1)
    schema["x-kubernetes-validations"] = [cel(f"self == '' || {rule}" if empty else rule, problem, static)]
    return Checked(check, schema)


def plain(limit: int, *, empty: bool = True) -> Checked:
    """Any text of at most `limit` characters."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise refusal("is not text", f'write it in quotes: "{value}"' if _scalar(value) else "write a text")
        if not value and not empty:
            raise refusal("is empty", "write a text or leave the field out")
        if len(value) > limit:
            raise refusal(f"has {len(value)} characters, and {limit} are possible", "write a shorter one")
        return value

    return Checked(check, text_schema(limit, **({} if empty else {"minLength": 1})))


def whole(least: int, most: int, what: str = "a whole number") -> Checked:
    """A whole number within bounds, both included."""
    cure = f"write {what} from {least} to {most}"

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            numeric = isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value, re.ASCII)
            if numeric and least <= int(value) <= most:
                raise refusal("is text, not a number", f"write {value} without quotes")
            raise refusal("is not a whole number", cure)
        if not least <= value <= most:
            raise refusal(f"is {'less' if value < least else 'more'} than is possible", cure)
        return value

    # The API server keeps bounds as floating-point numbers: a larger one comes back as another number, and tools that
    # compare would find a difference for ever.
    bounds = {"minimum": least, "maximum": most} if most <= 2**53 else {"minimum": least, "format": "int64"}
    return Checked(check, {"type": "integer", **bounds})


def number(least: float, most: float) -> Checked:
    """A finite number within bounds, both included."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise refusal("is not a number", f"write one from {least:g} to {most:g}")
        if not least <= value <= most:
            raise refusal("is out of range", f"write a number from {least:g} to {most:g}")
        return float(value)

    bounds = {"minimum": least, "maximum": most}
    plain = {name: int(bound) if float(bound).is_integer() else bound for name, bound in bounds.items()}
    return Checked(check, {"type": "number", **plain})


def _scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cure(cure: str | Callable[[str], str], value: str) -> str:
    return cure if isinstance(cure, str) else cure(value)


def choice(*words: str) -> Checked:
    """One of these words, in this case."""
    listing = " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
    folded = {_folded(word): word for word in words}

    def check(value: Any) -> str:
        if value in words and isinstance(value, str):
            return value
        near = folded.get(_folded(str(value)))
        if near:
            raise refusal("is in the wrong case or spelling", f"write {near}; possible are {listing}")
        raise refusal("is none of the possible words", f"write {listing}")

    return Checked(check, {"type": "string", "enum": [*words]})


def _folded(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise refusal("is neither true nor false", "write true or false, without quotes")


FLAG = Checked(_flag, {"type": "boolean"})
Flag = Annotated[bool, FLAG]


def _label(value: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:63].rstrip("-")


def _label_cure(value: str) -> str:
    label = _label(value)
    return f"write {label}" if label and label != value else "write lower-case letters, digits and hyphens"


def _name_cure(value: str) -> str:
    label = _label(value)
    if label and label != value:
        return f"write {label} here, and the name that clients use in spec.servedNames"
    return "write lower-case letters, digits and hyphens, such as smollm2"


def _served_cure(value: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._:/@+-]+", "-", value).strip("-._:/@+")[:96]
    example = f"write {name}" if name and name != value else "write a name such as Qwen/Qwen3-Coder-30B or gpt-oss:20b"
    return f"{example}; letters, digits and . _ : / @ + - are possible"


Label = Annotated[str, text(LABEL_PATTERN, "is no DNS label", _label_cure, 63)]
Name = Annotated[str, text(LABEL_PATTERN, "is no DNS label", _name_cure, 63)]
ServedNameText = Annotated[str, text(SERVED_NAME_PATTERN, "is no name a client can send", _served_cure, 96)]
Sha256 = Annotated[
    str,
    text(
        r"^[0-9a-f]{64}$",
        "is no SHA-256",
        "write the 64 lower-case hexadecimal digits that `sha256sum FILE` prints",
        64,
    ),
]


def _absolute(value: Any) -> str:
    path: str = plain(PATH_LIMIT, empty=False).check(value)
    if not path.startswith("/"):
        if path.startswith("~"):
            raise refusal("is not an absolute path", f"write the whole of it, such as /home/NAME{path[1:]}")
        raise refusal("is not an absolute path", f"write /{path.removeprefix('./')}")
    return _without_dots(path)


def _relative(value: Any) -> str:
    path: str = plain(PATH_LIMIT, empty=False).check(value)
    if path.startswith("/"):
        raise refusal("is an absolute path", f"write it without the leading slash: {path.lstrip('/') or 'models'}")
    return _without_dots(path)


def _without_dots(path: str) -> str:
    if ".." in path.split("/"):
        raise refusal("has .. in it and may leave its folder", "write the path without ..")
    if "\0" in path or "\n" in path:
        raise refusal("has a control character in it", "write a plain path")
    return path


_NO_DOTS = cel(
    "!self.matches('(^|/)[.][.](/|$)')", "has .. in it and may leave its folder", "write the path without .."
)
ABSOLUTE_PATH = Checked(
    _absolute,
    text_schema(
        PATH_LIMIT,
        minLength=1,
        **{
            "x-kubernetes-validations": [
                cel("self.startsWith('/')", "is not an absolute path", "write it with a leading slash"),
                _NO_DOTS,
            ]
        },
    ),
)
AbsolutePath = Annotated[str, ABSOLUTE_PATH]
RelativePath = Annotated[
    str,
    Checked(
        _relative,
        text_schema(
            PATH_LIMIT,
            minLength=1,
            **{
                "x-kubernetes-validations": [
                    cel("!self.startsWith('/')", "is an absolute path", "write it without the leading slash"),
                    _NO_DOTS,
                ]
            },
        ),
    ),
]
