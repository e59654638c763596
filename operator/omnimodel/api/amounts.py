"""Types of fields that are amounts: memory, time, cores."""

from __future__ import annotations

from typing import Annotated, Any

from omnimodel.api.fields import Checked, cel, refusal
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


def _quantity(value: Any) -> Any:
    if value != AUTO:
        try:
            parse_bytes(value)
        except QuantityError as error:
            if _is_share(value):
                cure = "write a quantity such as 24Gi, or auto; a share belongs in spec.device.memory of an OmniPool"
                raise refusal("is a share, and a model asks for bytes", cure) from None
            raise refusal(error.problem, _or(error.cure, "auto")) from None
    return value


def _is_share(value: Any) -> bool:
    try:
        return not isinstance(parse_bytes_or_share(value), int)
    except QuantityError as error:
        return "share" in error.problem


def _pool_quantity(value: Any) -> Any:
    if value != AUTO:
        try:
            parse_bytes_or_share(value)
        except QuantityError as error:
            raise refusal(error.problem, _or(error.cure, "80%, or auto")) from None
    return value


def _or(cure: str, words: str) -> str:
    """A cure that is only an example, with the other things that are possible."""
    return f"{cure}, or {words}" if cure.startswith("write a number with a unit") else cure


def _bytes(value: Any) -> Any:
    parse_bytes(value)
    return value


_NO_TIME = ("is no time at all", "write a duration such as 30s, or leave the field out")


def _duration(value: Any) -> Any:
    if (value in (0, "0") and value is not False) or parse_duration(value) <= 0:
        raise refusal(*_NO_TIME)
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


BYTES = Checked(
    _bytes, _int_or_string(problem="is not a quantity of at least 1Mi", cure="write one such as 24Gi or 1500M")
)
Quantity = Annotated[int | str, BYTES]
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
_DURATION_CURE = "write one such as 30s, 5m or 1h30m"
_WITHOUT_UNIT = {
    "rule": "type(self) != int",
    "message": "has no unit, and is not a duration; write 300s for seconds",
    "messageExpression": "'has no unit, and is not a duration; write %ds for seconds'.format([int(self)])",
}
_ZERO = "string(self).matches('^([0.]+(ms|s|m|h))+$')"


_NO_LIFETIME = {
    **_WITHOUT_UNIT,
    "messageExpression": "int(self) > 0 ? "
    + _WITHOUT_UNIT["messageExpression"]
    + " : '%ds is not a lifetime; did you mean "
    "never? Else write a duration such as 5m'.format([int(self)])",
}


_NO_TIME_OR_UNIT = {
    **_WITHOUT_UNIT,
    "messageExpression": f"int(self) == 0 ? '{'; '.join(_NO_TIME)}' : {_WITHOUT_UNIT['messageExpression']}",
}


def _time(*rules: dict[str, Any]) -> dict[str, Any]:
    """Schema of a time: an integer is no time, but its refusal shall be our sentence."""
    return {"x-kubernetes-int-or-string": True, "maxLength": 32, "x-kubernetes-validations": list(rules)}


_IS_DURATION = f"type(self) == int || string(self).matches('{DURATION_PATTERN}')".replace("\\", "\\\\")
Duration = Annotated[
    str,
    Checked(
        _duration,
        _time(
            _NO_TIME_OR_UNIT,
            cel(_IS_DURATION, "is not a duration", _DURATION_CURE),
            cel(f"!{_ZERO}", *_NO_TIME),
        ),
    ),
]
DurationOrZero = Annotated[
    str, Checked(_duration_or_zero, _time(_WITHOUT_UNIT, cel(_IS_DURATION, "is not a duration", _DURATION_CURE)))
]
Lifetime = Annotated[
    str,
    Checked(
        _lifetime,
        _time(
            _NO_LIFETIME,
            cel(
                f"string(self) == '{NEVER}' || {_IS_DURATION}",
                "is not a duration, nor never",
                f"{_DURATION_CURE}, or never",
            ),
            cel(f"!{_ZERO}", "is not a lifetime", "did you mean never? Else write a duration such as 5m"),
        ),
    ),
]
# A number with a fraction is no int-or-string of Kubernetes, so the node has no type and CEL cannot see it.
Cpu = Annotated[
    int | float | str,
    Checked(
        _cpu,
        {
            "x-kubernetes-preserve-unknown-fields": True,
            "maxLength": 32,
            "pattern": CPU_PATTERN,
            "minimum": 0,
            "exclusiveMinimum": True,
        },
    ),
]
