"""What a manifest says on top of the policy: priority, background, minResident, keepResident; one row a decision."""

from __future__ import annotations

import pytest

from placement.deciding import NOW, Case, check, cold, hot

CASES = [
    # -- the manifest's priority --
    Case(
        "more priority goes first, though less is won by it",
        20,
        {"a": cold(11, 0.5, priority=600), "b": cold(1.1, *[0.5] * 9)},
        wake="a",
    ),
    Case(
        "age beats priority",
        20,
        {"a": cold(11, 30.5, priority=1), "b": cold(1.1, 20.0, priority=1000)},
        wake="a",
    ),
    Case(
        "the less important idle model goes, though it is worth more",
        0,
        {"a": cold(5.5, 0.0), "x": hot(5.5, silent=900), "y": hot(5.5, silent=1, gap=1, priority=400)},
        wake="a",
        evict="y",
    ),
    Case(
        "a busy model of more priority is drained only for an overdue waiter",
        0,
        {"a": cold(5.5, 9.0), "x": hot(5.5, n=1, priority=600)},
        again_in=21.0,
    ),
    Case(
        "and then it is",
        0,
        {"a": cold(5.5, 30.5), "x": hot(5.5, n=1, priority=1000)},
        drain="x",
    ),
    # -- background requests --
    Case(
        "background waiters leave a model alone that was used a moment ago",
        0,
        {"a": cold(5.5, 3.0, 2.0, background=2), "x": hot(5.5, silent=4)},
        again_in=6.0,
    ),
    Case(
        "one interactive waiter among them is enough",
        0,
        {"a": cold(5.5, 3.0, 2.0, background=1), "x": hot(5.5, silent=4)},
        wake="a",
        evict="x",
    ),
    Case(
        "nor is it drained for them in the middle of its request",
        0,
        {"a": cold(5.5, 9.0, background=1), "x": hot(5.5, n=1, silent=1)},
        again_in=9.0,
    ),
    Case(
        "interactive waiters go first",
        20,
        {"a": cold(1.1, *[1.0] * 5, background=5), "b": cold(11, 0.1)},
        wake="b",
    ),
    # -- minResident --
    Case(
        "inside its minResident it is no victim, even for an overdue waiter",
        0,
        {"a": cold(5.5, 40.0), "x": hot(5.5, min_resident_until=NOW + 20)},
        again_in=20.0,
    ),
    Case(
        "a minResident that ends now no longer protects",
        0,
        {"a": cold(5.5, 1.0), "x": hot(5.5, min_resident_until=NOW)},
        wake="a",
        evict="x",
    ),
    Case(
        "another victim outside its minResident is taken, though it is worth more",
        0,
        {"a": cold(5.5, 1.0), "x": hot(5.5, silent=900, min_resident_until=NOW + 20), "y": hot(5.5, gap=1)},
        wake="a",
        evict="y",
    ),
    Case(
        "an overdue waiter behind a minResident does not stop those who are gone before it ends",
        2,
        {"a": cold(5.5, 40.0), "b": cold(1.1, 0.5), "x": hot(98, min_resident_until=NOW + 20)},
        wake="b",
        again_in=20.0,
    ),
    Case(
        "but nobody may hold that room longer by a minResident of its own",
        2,
        {
            "a": cold(5.5, 40.0),
            "b": cold(1.1, 0.5, min_resident_seconds=60.0),
            "x": hot(98, min_resident_until=NOW + 20),
        },
        again_in=20.0,
    ),
    # -- keepResident --
    Case("a kept model is never a victim", 0, {"a": cold(5.5, 40.0), "x": hot(50, keep_resident=True)}),
    Case("a kept model is woken without a request", 6, {"a": cold(5.5, keep_resident=True)}, wake="a"),
    Case(
        "a kept model may take the room of idle ones",
        0,
        {"a": cold(5.5, keep_resident=True), "x": hot(5.5)},
        wake="a",
        evict="x",
    ),
    Case("someone wants it without a request", 6, {"a": cold(5.5, wanted_since=NOW)}, wake="a"),
    Case(
        "its image is not there yet: others go on",
        6,
        {"a": cold(5.5, 50.0, loadable=False), "b": cold(1.1, 0.1)},
        wake="b",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_decision(case: Case) -> None:
    check(case)
