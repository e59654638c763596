"""Quantities, shares and durations: what they mean, what they refuse, and that both directions agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnimodel.quantity import (
    BYTES_PATTERN,
    CEILING_BYTES,
    DURATION_PATTERN,
    FLOOR_BYTES,
    SUFFIX_BYTES,
    QuantityError,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_bytes_or_share,
    parse_cpu,
    parse_duration,
    parse_lifetime,
    parse_share,
)

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()),
    st.from_regex(r"[-+]?[0-9]{0,4}\.?[0-9]{0,4} ?(B|GB|Gi|gi|m|%|s|min|d|e9)?", fullmatch=True),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24Gi", 24 << 30),
        ("24G", 24 * 10**9),
        ("1500M", 1_500_000_000),
        ("1.5Gi", 1_610_612_736),
        (25_769_803_776, 24 << 30),
        ("25769803776", 24 << 30),
        ("1Mi", 1 << 20),
        ("2000k", 2_000_000),
        ("1.0000001Mi", 1_048_577),
    ],
)
def test_a_quantity_means_the_same_as_in_kubernetes(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("0s", 0),
        ("20m", 1200),
        ("1.5h", 5400),
        ("1m0.5s", 60.5),
    ],
)
def test_a_duration_means_seconds(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), ("1", 1), (0.5, Fraction(1, 2)), ("500m", Fraction(1, 2)), ("0.25", Fraction(1, 4)), (16, 16)],
)
def test_cores_as_number_or_text_mean_the_same(value: float | str, expected: Fraction) -> None:
    assert parse_cpu(value) == expected


def test_a_share_is_exact() -> None:
    assert parse_share("80%") == Fraction(4, 5)
    assert int((10**18 + 7) * parse_share("70%")) == 700_000_000_000_000_004
    assert parse_bytes_or_share("24Gi") == 24 << 30


def test_the_word_never_is_the_only_way_to_say_it() -> None:
    assert parse_lifetime("never") is None
    assert parse_lifetime("15m") == 900


@given(st.integers(0, 999_999), st.sampled_from(sorted(SUFFIX_BYTES)))
def test_whole_quantities_are_the_product_of_number_and_unit(number: int, suffix: str) -> None:
    amount = number * SUFFIX_BYTES[suffix]
    if FLOOR_BYTES <= amount <= CEILING_BYTES:
        assert parse_bytes(f"{number}{suffix}") == amount
    else:
        with pytest.raises(QuantityError):
            parse_bytes(f"{number}{suffix}")


def refused(parse: Callable[[object], object], value: object) -> QuantityError | None:
    """The error that a value gives."""
    try:
        parse(value)
    except QuantityError as error:
        return error
    return None


@given(ANYTHING)
def test_whatever_is_written_is_either_understood_or_refused_with_a_cure(value: object) -> None:
    for parse in (parse_bytes, parse_share, parse_bytes_or_share, parse_duration, parse_lifetime, parse_cpu):
        error = refused(parse, value)
        assert error is None or (error.problem and error.cure and "\n" not in str(error))


@given(st.from_regex(r"\A[0-9]{1,9}(\.[0-9]{1,3})?[a-zA-Z ]{0,3}\Z"))
def test_the_pattern_of_the_crd_takes_what_the_parser_takes(text: str) -> None:
    matches = re.fullmatch(BYTES_PATTERN[1:-1], text, re.ASCII) is not None
    error = refused(parse_bytes, text)
    out_of_range = error is not None and ("makes no sense" in error.problem or "more than 32Pi" in error.problem)
    assert matches == (error is None or out_of_range)


@given(st.from_regex(r"\A[0-9]{1,4}(\.[0-9]{1,3})?(ms|s|m|h|d| s|S)([0-9]{1,2}s)?\Z"))
def test_the_pattern_of_durations_takes_what_the_parser_takes(text: str) -> None:
    matches = re.fullmatch(DURATION_PATTERN[1:-1], text, re.ASCII) is not None
    error = refused(parse_duration, text)
    assert matches == (error is None or "longer than a year" in error.problem)


@given(st.integers(FLOOR_BYTES, 1 << 50))
def test_bytes_for_a_person_are_right_within_five_percent(amount: int) -> None:
    again = parse_bytes(format_bytes(amount), floor=0)
    assert abs(again - amount) <= amount * 0.051


@given(st.floats(0.001, 10**6))
def test_a_duration_for_a_person_is_right_within_six_percent(seconds: float) -> None:
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= max(seconds * 0.06, 60 if seconds > 3600 else 0)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (512, "512"), (1536, "1.5Ki"), (257 << 20, "257Mi"), (3 << 29, "1.5Gi"), (-(1 << 20), "-1Mi")],
)
def test_bytes_for_a_person(amount: int, text: str) -> None:
    assert format_bytes(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0035, "3.5ms"), (0.35, "350ms"), (1.5, "1.5s"), (90, "1m30s"), (3600, "1h"), (5400, "1h30m")],
)
def test_a_duration_for_a_person(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
