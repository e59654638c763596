"""When a text generation is frozen between two tokens instead of drained, and what it waits for; one row a decision."""

from __future__ import annotations

import pytest

from placement.deciding import A_DRAINS_X, GB, NOW, Case, check, cold, hot

CASES = [
    # -- freezing --
    Case(
        "a text generation is frozen where another model would be drained",
        0,
        {"a": cold(5.5, 4.0), "x": hot(5.5, n=2, freezable=True, working_bytes=GB)},
        wake="a",
        freeze="x",
    ),
    Case(
        "a frozen victim keeps its working memory: a second victim gives the rest",
        0,
        {
            "a": cold(6, 4.0),
            "x": hot(5.5, n=2, freezable=True, working_bytes=GB),
            "y": hot(1.1, n=3, silent=0.1, gap=0.1),
        },
        freeze="x",
        drain="y",
    ),
    Case(
        "frozen memory would not leave room for the largest model: drained",
        0,
        {
            "a": cold(5.5, 4.0),
            "x": hot(5.5, n=2, freezable=True, working_bytes=GB),
            "z": cold(9.5),
        },
        drain="x",
        budget=10,
    ),
    Case(
        "frozen before: together with what is frozen already there would be too little room",
        1.5,
        {
            "a": cold(5.5, 4.0),
            "x": hot(5.5, n=2, freezable=True, working_bytes=GB),
            "y": cold(2, in_flight=1, frozen_bytes=2 * GB, working_bytes=2 * GB, frozen_since=NOW - 1, freezable=True),
            "z": cold(7.5),
        },
        drain="x",
        budget=10,
        again_in=3.0,
    ),
    Case(
        "woken a moment ago: it shall make some tokens first",
        0,
        {"a": cold(5.5, 9.0), "x": hot(5.5, n=2, freezable=True, resident_since=NOW - 0.5)},
        again_in=0.5,
    ),
    Case(
        "the more of them the longer its wake takes: twice 2.01 s",
        0,
        {"a": cold(5.5, 9.0), "x": hot(110, n=2, freezable=True, resident_since=NOW - 1)},
        again_in=3.02,
        budget=200,
    ),
    Case(
        "a freeze costs nobody's batch: patience for it is 1 s",
        0,
        {"a": cold(5.5, 1.0), "x": hot(5.5, n=2, freezable=True)},
        wake="a",
        freeze="x",
    ),
    Case(
        "but where only a drain helps it is 4 s",
        1.5,
        {
            "a": cold(7, 1.0),
            "x": hot(5.5, n=2, freezable=True, working_bytes=GB),
            "z": cold(9.5),
        },
        budget=10,
        again_in=3.0,
    ),
    Case(
        "beside a drain one may be frozen",
        -5.5,
        {
            "a": cold(5.5, 9.0),
            "b": cold(5.5, 8.0),
            "x": hot(5.5, n=1, draining=True),
            "y": hot(5.5, n=1, freezable=True),
        },
        wake="b",
        freeze="y",
        drains=A_DRAINS_X,
    ),
    Case(
        "of more priority it is frozen for an overdue waiter only",
        0,
        {"a": cold(5.5, 9.0), "x": hot(5.5, n=2, freezable=True, priority=501)},
        again_in=21.0,
    ),
    Case(
        "a frozen model waits like any other, since it was frozen, with all its requests",
        20,
        {
            "a": cold(11, in_flight=9, frozen_since=NOW - 1, frozen_bytes=GB, working_bytes=GB),
            "b": cold(1.1, 0.5),
        },
        wake="a",
    ),
    Case(
        "a frozen model needs only its weights again",
        5.5,
        {"a": cold(5.5, in_flight=1, frozen_since=NOW - 1, frozen_bytes=GB, working_bytes=GB)},
        wake="a",
    ),
    Case(
        "frozen longer than is fair: overdue",
        20,
        {"a": cold(11, in_flight=1, frozen_since=NOW - 31), "b": cold(1.1, *[0.5] * 9)},
        wake="a",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_decision(case: Case) -> None:
    check(case)
