"""Priorities: a number from 0 to 1000 or a word."""

from __future__ import annotations

from typing import Annotated, Any, Final

from omnimodel.api.fields import Checked, cel, refusal

PRIORITIES: Final = {"batch": 0, "low": 250, "normal": 500, "high": 750, "critical": 1000}
_CURE = f"write a whole number from 0 to 1000, or {', '.join(PRIORITIES)}"


def priority_number(value: int | str) -> int:
    """The number that a priority of a manifest means."""
    return PRIORITIES[value] if isinstance(value, str) else value


def _priority(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise refusal("is no priority", _CURE)
    if isinstance(value, int):
        if not 0 <= value <= 1000:
            raise refusal("is no priority", _CURE)
    elif value not in PRIORITIES:
        word = value.lower()
        if word in PRIORITIES:
            raise refusal("is in the wrong case or spelling", f"write {word}")
        if value.isdecimal() and int(value[:6]) <= 1000:
            raise refusal("is text, not a number", f"write {value} without quotes")
        raise refusal("is no priority", _CURE)
    return value


_WORDS = ", ".join(f"'{word}'" for word in PRIORITIES)
Priority = Annotated[
    int | str,
    Checked(
        _priority,
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 16,
            "x-kubernetes-validations": [
                cel(
                    f"type(self) == int ? int(self) >= 0 && int(self) <= 1000 : string(self) in [{_WORDS}]",
                    "is no priority",
                    _CURE,
                )
            ],
        },
    ),
]
