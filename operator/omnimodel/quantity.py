"""Quantities, shares and durations as manifests write them, and what to write instead of what they must not be.

Everyone may import it. Every refusal says what is wrong with the value and gives one that works.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from omnimodel.errors import OmniError, Reason

NEVER: Final = "never"
AUTO: Final = "auto"
FLOOR_BYTES: Final = 1 << 20  # 1Mi: `24` and `24m` parse in Kubernetes, as 24 bytes and 0.024 bytes
CEILING_BYTES: Final = 1 << 55  # 32Pi, so that sums of quantities stay within 63 bits

SUFFIX_BYTES: Final = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "Pi": 1 << 50,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "": 1,
}
UNIT_SECONDS: Final = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}

# The same expressions stand in the CRDs, so they keep to what RE2 and `re` agree on.
BYTES_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
SHARE_PATTERN: Final = r"^([1-9][0-9]?|100)%$"
DURATION_PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
CPU_PATTERN: Final = r"^([0-9]+(\.[0-9]{1,3})?|[0-9]+m)$"
_DIGITS_LIMIT = 32  # a longer text is no quantity; refusing it keeps parsing linear


class QuantityError(OmniError, ValueError):
    """A value that is no quantity, share or duration; `problem` and `cure` are made for a person."""

    reason = Reason.INVALID_MANIFEST

    def __init__(self, value: object, problem: str, cure: str) -> None:
        super().__init__(shown(value), problem, cure)


def shown(value: object) -> str:
    """A value as an error message shows it: strings quoted, long ones cut."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_bytes(value: object, *, floor: int = FLOOR_BYTES) -> int:
    """Bytes of a quantity: `24Gi`, `1500M`, or a plain number of bytes as integer or text.

    Args:
        value: what the manifest says.
        floor: the least number of bytes that makes sense.

    Raises:
        QuantityError: it is no quantity, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise _not_bytes(value)
    if isinstance(value, int):
        return _in_range(value, value, floor)
    if len(value) > _DIGITS_LIMIT or not re.fullmatch(BYTES_PATTERN[1:-1], value, re.ASCII):
        raise _not_bytes(value)
    number, suffix = _split(value)
    amount = Fraction(number) * SUFFIX_BYTES[suffix]
    # A fraction of a byte is rounded up as Kubernetes does.
    return _in_range(value, math.ceil(amount), floor)


def parse_share(value: object) -> Fraction:
    """A share of the whole, above 0 and at most 1: `80%` is 4/5.

    Raises:
        QuantityError: it is no whole percentage from 1% to 100%.
    """
    if isinstance(value, str) and re.fullmatch(SHARE_PATTERN[1:-1], value, re.ASCII):
        return Fraction(int(value[:-1]), 100)
    raise QuantityError(value, "is not a share from 1% to 100%", _share_cure(value))


def parse_bytes_or_share(value: object) -> int | Fraction:
    """Bytes of a quantity, or the share that a percentage means.

    Raises:
        QuantityError: it is neither.
    """
    if isinstance(value, str) and "%" in value:
        return parse_share(value)
    fraction = _fraction(value)
    if fraction is not None:
        raise QuantityError(value, "is neither a quantity nor a share", f"did you mean {_percent(fraction)}%?")
    return parse_bytes(value)


def parse_duration(value: object) -> float:
    """Seconds of a duration: `30s`, `5m`, `1h30m`, `250ms`.

    Raises:
        QuantityError: it is no duration; a bare number is none, for its unit would be a guess.
    """
    if (
        not isinstance(value, str)
        or len(value) > _DIGITS_LIMIT
        or not re.fullmatch(DURATION_PATTERN[1:-1], value, re.ASCII)
    ):
        raise _not_duration(value)
    total = Fraction(0)
    for number, unit in re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", value):
        total += Fraction(number) * UNIT_SECONDS[unit]
    if total > 366 * 24 * 3600:
        raise QuantityError(value, "is longer than a year", "write a shorter duration such as 24h")
    return float(total)


def parse_lifetime(value: object) -> float | None:
    """Seconds of a duration above zero, or None for the word `never`.

    Raises:
        QuantityError: it is neither; 0 and -1 mean `now`, `never` or `inherit` depending on whom one asks.
    """
    if value == NEVER:
        return None
    if isinstance(value, str) and value.strip().lower() in (NEVER, "forever", "infinite", "inf"):
        raise QuantityError(value, "is not a duration", "write never")
    zero = value in (0, "0") or (isinstance(value, str) and re.fullmatch(r"([0.]+(ms|s|m|h))+", value) is not None)
    if (zero and not isinstance(value, bool)) or _is_negative(value):
        text = f"{value}s" if isinstance(value, (int, float)) else str(value)
        raise QuantityError(value, f"{text} is not a lifetime", "did you mean never? Else write a duration such as 5m")
    return parse_duration(value)


def parse_cpu(value: object) -> Fraction:
    """Cores: `1`, `"1"`, `0.5`, `500m`.

    Raises:
        QuantityError: it is no number of cores above zero.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or len(str(value)) > _DIGITS_LIMIT:
        raise QuantityError(value, "is not a number of cores", "write one such as 2, 0.5 or 500m")
    text = str(value)
    if not re.fullmatch(CPU_PATTERN[1:-1], text, re.ASCII):
        raise QuantityError(value, "is not a number of cores", "write one such as 2, 0.5 or 500m")
    cores = Fraction(text[:-1]) / 1000 if text.endswith("m") else Fraction(text)
    if not 0 < cores <= 4096:
        raise QuantityError(value, "is not a number of cores above 0", "write one such as 2, 0.5 or 500m")
    return cores


def format_bytes(amount: int) -> str:
    """Bytes for a person to read: `257Mi`, `1.5Gi`, `512` below 1Ki; at most one decimal.

    Args:
        amount: bytes, of either sign.
    """
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    size = float(amount)
    for suffix in ("", "Ki", "Mi", "Gi", "Ti"):
        # 1023.95 would be shown as 1024.0 of a unit that has a next one.
        if size < 1023.95:
            return sign + (f"{size:.0f}" if not suffix or size >= 100 or size == int(size) else f"{size:.1f}") + suffix
        size /= 1024
    return f"{sign}{size:.1f}Pi"


def format_duration(seconds: float) -> str:
    """A duration for a person to read: `4ms`, `1.5s`, `2m30s`, `3h`.

    Args:
        seconds: of either sign.
    """
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms" if seconds >= 0.0095 else f"{seconds * 1000:.1f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s".replace(".0s", "s")
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else "", f"{rest}s" if rest and not hours else ""]
    return "".join(parts)


def _split(text: str) -> tuple[str, str]:
    number = text.rstrip("KMGTPik")
    return number, text[len(number) :]


def _in_range(value: object, amount: int, floor: int) -> int:
    if amount < 0:
        raise QuantityError(value, "is negative", "write a quantity such as 24Gi")
    if amount < floor:
        size = "1 byte" if amount == 1 else f"{amount} bytes"
        raise QuantityError(
            value,
            f"is {size}, and less than {format_bytes(floor)} makes no sense",
            f"write a quantity such as {value}Gi" if 0 < amount < 4096 else "write a quantity such as 24Gi",
        )
    if amount > CEILING_BYTES:
        raise QuantityError(value, "is more than 32Pi", "write a quantity such as 24Gi")
    return amount


def _not_bytes(value: object) -> QuantityError:
    problem = "is not a quantity"
    example = "write a number with a unit, such as 24Gi or 1500M"
    if isinstance(value, float):
        if math.isfinite(value) and value > 0 and value == int(value) and value >= FLOOR_BYTES:
            return QuantityError(value, "is not a whole number of bytes", f"write {int(value)}")
        return QuantityError(value, problem, example)
    if not isinstance(value, str):
        return QuantityError(value, problem, example)
    text = value.strip()
    if not text:
        return QuantityError(value, "is empty", example)
    if text.startswith("-"):
        return QuantityError(value, "is negative", example)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text, re.ASCII)
    if text.endswith("%"):
        return QuantityError(value, "is a share, and no share is possible here", example)
    if match is None or len(text) > _DIGITS_LIMIT:
        return QuantityError(value, problem, example)
    number, unit = match.groups()
    if unit == "m":
        return QuantityError(value, f"means thousandths, {_milli(number)} bytes", f"write {number}Mi or {number}Gi")
    if number + unit != value and unit in SUFFIX_BYTES:
        return QuantityError(value, "has a space in it", f"write {number}{unit}")
    letter = unit[:1].upper()
    rest = unit[1:].lower()
    if letter in "KMGTP" and rest in ("", "b"):
        decimal = "k" if letter == "K" else letter
        return QuantityError(
            value,
            f"has no unit of a quantity ({unit})",
            f"write {number}{decimal} or {number}{letter}i, which differ by {_difference_percent(letter)} %",
        )
    if letter in "KMGTP" and rest in ("i", "ib"):
        return QuantityError(value, f"has no unit of a quantity ({unit})", f"write {number}{letter}i")
    return QuantityError(value, f"has no unit of a quantity ({unit})", example)


def _difference_percent(letter: str) -> int:
    binary, decimal = SUFFIX_BYTES[f"{letter}i"], SUFFIX_BYTES["k" if letter == "K" else letter]
    return round(100 * (binary - decimal) / decimal)


def _milli(number: str) -> str:
    return f"{float(Fraction(number) / 1000):g}"


def _fraction(value: object) -> float | None:
    """A number between 0 and 1, as number or text, as people write a share elsewhere."""
    if isinstance(value, str) and re.fullmatch(r"\s*0?\.[0-9]{1,20}\s*", value, re.ASCII):
        value = float(value)
    return value if isinstance(value, float) and 0 < value < 1 else None


def _percent(share: float) -> str:
    return f"{max(1, round(share * 100))}"


def _share_cure(value: object) -> str:
    example = "write one such as 80%"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        if 0 < value < 1:
            return f"did you mean {_percent(value)}%?"
        if 1 < value <= 100 and value == int(value):
            return f"did you mean {int(value)}%?"
        return example
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%?\s*", value, re.ASCII)
        if match and len(value) <= _DIGITS_LIMIT:
            number = float(match.group(1))
            if 0 < number < 1:
                return f"did you mean {_percent(number)}%?"
            if number == int(number) and 1 <= number <= 100:
                return f"write {int(number)}%"
            if 1 < number < 100:
                return f"write {round(number)}%"
    return example


def _is_negative(value: object) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, (int, float)):
        return value < 0
    return isinstance(value, str) and re.fullmatch(r"-[0-9].*", value.strip()) is not None


_WORDS = {
    "d": 24 * 3600,
    "day": 24 * 3600,
    "w": 7 * 24 * 3600,
    "week": 7 * 24 * 3600,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
    "m": 60,
    "min": 60,
    "minute": 60,
    "s": 1,
    "sec": 1,
    "second": 1,
}


def _not_duration(value: object) -> QuantityError:
    problem = "is not a duration"
    example = "write one such as 30s, 5m or 1h30m"
    if isinstance(value, bool) or value is None:
        return QuantityError(value, problem, example)
    if _is_negative(value):
        return QuantityError(value, "is negative", example)
    if isinstance(value, (int, float)):
        if math.isfinite(value):
            number = f"{value:g}" if isinstance(value, float) else str(value)
            return QuantityError(value, "has no unit, and is not a duration", f"write {number}s for seconds")
        return QuantityError(value, problem, example)
    if not isinstance(value, str):
        return QuantityError(value, problem, example)
    text = value.strip().lower()
    if text == NEVER:
        return QuantityError(value, "is no duration here: everything that waits has a deadline", example)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text, re.ASCII)
    if not text or match is None or len(text) > _DIGITS_LIMIT:
        return QuantityError(value, "is empty" if not text else problem, example)
    number, unit = match.groups()
    if not unit:
        return QuantityError(value, "has no unit, and is not a duration", f"write {number}s for seconds")
    if unit in ("ms", "msec", "millis", "milliseconds"):
        return QuantityError(value, problem, f"write {number}ms")
    seconds = _WORDS.get(unit) or _WORDS.get(unit.removesuffix("s"))
    if seconds is None:
        return QuantityError(value, problem, example)
    total = Fraction(number) * seconds
    units = (("h", 3600), ("m", 60), ("s", 1))
    for name, size in units:
        if total >= size and (total / size).denominator == 1:
            return QuantityError(value, problem, f"write {total / size}{name}")
    return QuantityError(value, problem, example)
