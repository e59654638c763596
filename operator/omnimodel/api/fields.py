"""Types of single fields: each checks one value, refuses it with a cure, and knows its schema in a CRD."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from omnimodel.quantity import (
    AUTO,
    BYTES_PATTERN,
    CPU_PATTERN,
    DURATION_PATTERN,
    NEVER,
    QuantityError,
    parse_bytes,
    parse_bytes_or_share,
    parse_cpu,
    parse_duration,
    parse_lifetime,
)

REFUSAL = "omni"  # the type of errors that already have a problem and a cure
LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SERVED_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"
PATH_LIMIT = 1024


def refusal(problem: str, cure: str) -> PydanticCustomError:
    """The error of a validator: what is wrong with the value and what to write instead."""
    return PydanticCustomError(REFUSAL, "{problem}; {cure}", {"problem": problem, "cure": cure})


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


def _quantity(value: Any) -> Any:
    if value != AUTO:
        try:
            parse_bytes(value)
        except QuantityError as error:
            if "did you mean" in error.cure or error.problem.startswith("is a share") or _is_fraction(value):
                cure = "write a quantity such as 24Gi, or auto; a share belongs in spec.device.memory of an OmniPool"
                raise refusal("is a share, and a model asks for bytes", cure) from None
            raise
    return value


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, str) and value.strip()[:1] in ("0", ".") and "." in value)


def _pool_quantity(value: Any) -> Any:
    if value != AUTO:
        parse_bytes_or_share(value)
    return value


def _bytes(value: Any) -> Any:
    parse_bytes(value)
    return value


def _duration(value: Any) -> Any:
    if parse_duration(value) <= 0:
        raise refusal("is no time at all", "write a duration such as 30s, or leave the field out")
    return value


def _duration_or_zero(value: Any) -> Any:
    parse_duration(value)
    return value


def _lifetime(value: Any) -> Any:
    parse_lifetime(value)
    return value


def _cpu(value: Any) -> Any:
    parse_cpu(value)
    return value


_ENOUGH = "quantity(string(self)).compareTo(quantity('1Mi')) >= 0"


def _int_or_string(*words: str, share: bool = False, problem: str, cure: str) -> dict[str, Any]:
    """Schema of a quantity: an integer number of bytes or a text, whose refusal is our sentence."""
    pattern = BYTES_PATTERN.replace("\\", "\\\\")
    alternatives = [f"string(self) == '{word}'" for word in words]
    if share:
        alternatives.append("string(self).matches('^([1-9][0-9]?|100)%$')")
    alternatives.append(f"(string(self).matches('{pattern}') && {_ENOUGH})")
    return {
        "x-kubernetes-int-or-string": True,
        "maxLength": 32,
        "x-kubernetes-validations": [cel(" || ".join(alternatives), problem, cure)],
    }


Quantity = Annotated[
    int | str,
    Checked(
        _bytes, _int_or_string(problem="is not a quantity of at least 1Mi", cure="write one such as 24Gi or 1500M")
    ),
]
QuantityOrAuto = Annotated[
    int | str,
    Checked(
        _quantity,
        _int_or_string(
            AUTO, problem="is not a quantity of at least 1Mi, nor auto", cure="write one such as 24Gi or 1500M, or auto"
        ),
    ),
]
PoolQuantity = Annotated[
    int | str,
    Checked(
        _pool_quantity,
        _int_or_string(
            AUTO,
            share=True,
            problem="is not a quantity of at least 1Mi, a share, nor auto",
            cure="write one such as 24Gi, 80% or auto",
        ),
    ),
]
_DURATION_CEL = f"self.matches('{DURATION_PATTERN}')".replace("\\", "\\\\")
_DURATION_CURE = "write one such as 30s, 5m or 1h30m"


def _text_schema(limit: int, **rest: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": limit, **rest}


_DURATION_SCHEMA = _text_schema(
    32, **{"x-kubernetes-validations": [cel(_DURATION_CEL, "is not a duration", _DURATION_CURE)]}
)
Duration = Annotated[str, Checked(_duration, _DURATION_SCHEMA)]
DurationOrZero = Annotated[str, Checked(_duration_or_zero, _DURATION_SCHEMA)]
Lifetime = Annotated[
    str,
    Checked(
        _lifetime,
        _text_schema(
            32,
            **{
                "x-kubernetes-validations": [
                    cel(
                        f"self == '{NEVER}' || {_DURATION_CEL}",
                        "is not a duration, nor never",
                        f"{_DURATION_CURE}, or never",
                    ),
                    cel(
                        "!self.matches('^([0.]+(ms|s|m|h))+$')",
                        "is not a lifetime",
                        "did you mean never? Else write a duration such as 5m",
                    ),
                ]
            },
        ),
    ),
]
# A number with a fraction is no int-or-string of Kubernetes, so the node has no type and CEL cannot see it.
Cpu = Annotated[
    int | float | str,
    Checked(
        _cpu, {"x-kubernetes-preserve-unknown-fields": True, "maxLength": 32, "pattern": CPU_PATTERN, "minimum": 0.001}
    ),
]


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
            what = "is missing a value" if value is None else "is not text"
            raise refusal(what, f'write it in quotes: "{value}"' if _scalar(value) else _cure(cure, ""))
        if not value and not empty:
            raise refusal("is empty", _cure(cure, value))
        if len(value) > limit:
            raise refusal(f"has {len(value)} characters, and {limit} are possible", "write a shorter one")
        if not expression.fullmatch(value) and (value or not empty):
            raise refusal(problem, _cure(cure, value))
        return value

    rule = f"self.matches('{pattern}')".replace("\\", "\\\\")
    static = cure if isinstance(cure, str) else cure("")
    schema = _text_schema(limit, minLength=0 if empty else 1)
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

    return Checked(check, _text_schema(limit, **({} if empty else {"minLength": 1})))


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

    return Checked(check, {"type": "integer", "minimum": least, "maximum": most})


def number(least: float, most: float) -> Checked:
    """A finite number within bounds, both included."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise refusal("is not a number", f"write one from {least:g} to {most:g}")
        if not least <= value <= most:
            raise refusal("is out of range", f"write a number from {least:g} to {most:g}")
        return float(value)

    return Checked(check, {"type": "number", "minimum": least, "maximum": most})


def _scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cure(cure: str | Callable[[str], str], value: str) -> str:
    return cure if isinstance(cure, str) else cure(value)


def choice(*words: str) -> Checked:
    """One of these words, in this case."""
    listing = " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]

    def check(value: Any) -> str:
        if value in words and isinstance(value, str):
            return value
        folded = {re.sub(r"[^a-z0-9]", "", word.lower()): word for word in words}
        near = folded.get(re.sub(r"[^a-z0-9]", "", str(value).lower()))
        if near:
            raise refusal("is in the wrong case or spelling", f"write {near}; possible are {listing}")
        raise refusal("is none of the possible words", f"write {listing}")

    return Checked(check, {"type": "string", "enum": list(words)})


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise refusal("is neither true nor false", "write true or false, without quotes")


Flag = Annotated[bool, Checked(_flag, {"type": "boolean"})]


def _label_cure(value: str) -> str:
    label = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:63].rstrip("-")
    if label and label != value:
        return f"write {label} here, and the name that clients use in spec.servedNames"
    return "write lower-case letters, digits and hyphens, such as smollm2"


def _served_cure(value: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._:/@+-]+", "-", value).strip("-._:/@+")[:96]
    example = f"write {name}" if name and name != value else "write a name such as Qwen/Qwen3-Coder-30B or gpt-oss:20b"
    return f"{example}; letters, digits and . _ : / @ + - are possible"


Label = Annotated[str, text(LABEL_PATTERN, "is no DNS label", _label_cure, 63)]
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
        raise refusal("is not an absolute path", f"write /{path.removeprefix('~/').removeprefix('./').lstrip('/')}")
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
    _text_schema(
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
        _text_schema(
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
