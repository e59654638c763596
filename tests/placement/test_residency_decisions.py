"""Which model is woken next and which goes for it: one row a decision, small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from omnimodel.errors import Reason
from omnimodel.placement.state import Drain
from placement.deciding import A_DRAINS_X, Case, check, cold, decide, hot

CASES = [
    Case("it fits: no victim", 6, {"a": cold(5.5, 0.0)}, wake="a"),
    Case("1/0.03 beats 1/0.21: the small one first", 20, {"a": cold(11, 0.5), "b": cold(1.1, 0.1)}, wake="b"),
    Case(
        "10/0.21 beats 1/0.03: ten waiters pay for the large one",
        20,
        {"a": cold(11, *[0.5] * 10), "b": cold(1.1, 0.1)},
        wake="a",
    ),
    Case(
        "10 of 11 GB are still valid: 1/0.028 beats 1/0.03",
        20,
        {"a": cold(11, 0.5, valid=10), "b": cold(1.1, 0.5)},
        wake="a",
    ),
    Case("overdue: first, whatever it costs", 20, {"a": cold(11, 30.5), "b": cold(1.1, 0.1)}, wake="a"),
    Case("two overdue: the older", 20, {"a": cold(1.1, 31.0), "b": cold(11, 32.0)}, wake="b"),
    Case(
        "least worth goes, 0.02 / max(2, 20) < 0.02 / max(10, 4), where LRU would take x",
        0,
        {"a": cold(5.5, 0.0), "x": hot(5.5, silent=10, gap=4), "y": hot(5.5, silent=2, gap=20)},
        wake="a",
        evict="y",
    ),
    Case(
        "equal use: per byte the large one is the cheaper to bring back",
        0,
        {"a": cold(0.5, 0.0), "x": hot(0.55), "y": hot(5.5)},
        wake="a",
        evict="y",
    ),
    Case(
        "silence beats an old rate: 100 s of it count as a gap of 100 s",
        0,
        {"a": cold(5.5, 0.0), "x": hot(5.5, silent=100, gap=1), "y": hot(5.5, silent=5, gap=50)},
        wake="a",
        evict="x",
    ),
    Case(
        "spare the small one that alone did not suffice",
        0,
        {"a": cold(5.5, 0.0), "x": hot(1.1, silent=900), "y": hot(5.5, silent=2)},
        wake="a",
        evict="y",
    ),
    Case(
        "an idle model goes before a busy one of less worth",
        0,
        {"a": cold(5.5, 9.0), "x": hot(5.5, n=1, silent=500, gap=500), "y": hot(5.5, silent=1, gap=1)},
        wake="a",
        evict="y",
    ),
    Case(
        "only a busy victim and patience left: look again at age 4",
        0,
        {"a": cold(5.5, 1.0), "x": hot(5.5, n=2)},
        again_in=3.0,
    ),
    Case("patience over: drain", 0, {"a": cold(5.5, 4.0), "x": hot(5.5, n=2)}, drain="x"),
    Case(
        "the first cannot be helped yet, the second can",
        0,
        {"a": cold(11, *[1.0] * 9), "b": cold(1.1, 0.5), "x": hot(11, n=2), "y": hot(1.1)},
        wake="b",
        evict="y",
        again_in=3.0,
    ),
    Case(
        "one drain at a time: the second waits though its patience is over",
        -5.5,
        {"a": cold(5.5, 9.0), "b": cold(5.5, 8.0), "x": hot(5.5, n=1, draining=True), "y": hot(5.5, n=1)},
        drains=A_DRAINS_X,
    ),
    Case(
        "beside a drain, another wake may use an idle victim",
        -5.5,
        {"a": cold(5.5, 9.0), "b": cold(1.1, 0.2), "x": hot(5.5, n=1, draining=True), "y": hot(1.1)},
        wake="b",
        evict="y",
        drains=A_DRAINS_X,
    ),
    Case(
        "it has not yet served those it was woken for: no victim, even for an overdue waiter",
        0,
        {"a": cold(5.5, 40.0), "x": hot(5.5, n=32, owed=3)},
    ),
    Case(
        "an overdue waiter that cannot be helped yet stops all others",
        2,
        {"a": cold(5.5, 40.0), "b": cold(1.1, 0.5), "x": hot(5.5, n=32, owed=3)},
    ),
    Case("nobody waits: nothing moves", 0, {"a": cold(5.5), "x": hot(5.5, silent=900)}),
    # -- what a drain goes through --
    Case("a copy is under way: nothing", 20, {"a": cold(5.5, 0.0), "b": cold(1.1, 9.0)}, copying="a"),
    Case(
        "a drain has ended: its target first, though another has more waiters",
        6,
        {"a": cold(5.5, 9.0), "b": cold(1.1, *[0.5] * 9), "x": hot(5.5, draining=True)},
        wake="a",
        evict="x",
        drains=A_DRAINS_X,
    ),
    Case(
        "one of two victims is done: it goes now",
        -9,
        {"a": cold(11, 9.0), "x": hot(5.5, draining=True), "y": hot(5.5, n=1, draining=True)},
        evict="x",
        drains=(Drain("a", ("x", "y")),),
    ),
    Case(
        "a victim that died is no longer waited for",
        0,
        {"a": cold(5.5, 9.0), "x": cold(5.5)},
        wake="a",
        drains=A_DRAINS_X,
    ),
    Case(
        "the idle part of the room is given at once, the busy part drains",
        0,
        {"a": cold(11, 4.0), "x": hot(5.5, n=1), "y": hot(5.5)},
        evict="y",
        drain="x",
    ),
    # -- the budget --
    Case(
        "residents have grown over the budget: an idle one goes",
        -0.5,
        {"x": hot(5.5, silent=900), "y": hot(5.5), "z": hot(5.5, silent=990, n=1)},
        evict="x",
    ),
    Case(
        "a model larger than the budget moves nothing",
        0,
        {"a": cold(101, 40.0), "b": cold(1.1, 0.1), "x": hot(5.5)},
        wake="b",
        evict="x",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_decision(case: Case) -> None:
    check(case)


def test_a_drain_names_the_target_its_room_is_for() -> None:
    step = decide({"a": cold(5.5, 4.0), "x": hot(5.5, n=2)}, 0)

    assert (step.wake, step.target, step.drain) == (None, "a", ("x",))


def test_a_drain_for_nobody_is_forgotten_and_then_others_get_the_room() -> None:
    models = {"a": cold(5.5), "b": cold(1.1, 0.5), "x": hot(5.5, n=1, draining=True)}

    assert decide(models, -5.5, A_DRAINS_X).abandon == ("a",)
    models["x"] = replace(models["x"], draining=False)
    assert decide(models, 2).wake == "b"


@pytest.mark.parametrize("in_flight", [0, 1], ids=["its victims are drained", "they still drain"])
def test_a_drain_whose_target_cannot_be_woken_any_more_is_forgotten(in_flight: int) -> None:
    models = {"a": cold(5.5, 9.0, loadable=False), "b": cold(1.1, 0.5), "x": hot(5.5, n=in_flight, draining=True)}

    assert decide(models, 0.5, A_DRAINS_X) == replace(decide(models, 0.5, A_DRAINS_X), abandon=("a",), wake=None)
    models["x"] = replace(models["x"], draining=False)
    assert decide(models, 2).wake == "b"


def test_a_resident_in_the_middle_of_a_move_does_not_go_for_the_budget() -> None:
    models = {"x": hot(5.5, silent=900, draining=True), "y": hot(5.5)}

    assert decide(models, -0.5).evict == ("y",)


def test_every_waiting_model_is_told_why_it_waits() -> None:
    step = decide({"a": cold(5.5, 1.0), "b": cold(101, 1.0), "x": hot(5.5, n=2)}, 0)

    assert step.reasons["a"] == "needs 5.12 GiB, 0 bytes are free: x is in use for another 3.0 s at least"
    assert step.reasons["b"] == "needs 94.06 GiB on the device, but the budget is 93.13 GiB"


def test_a_model_beside_kept_ones_that_leave_too_little_is_told_both_numbers() -> None:
    step = decide({"a": cold(60, 1.0), "x": hot(50, keep_resident=True)}, 50)

    assert not step.acts
    assert step.reasons["a"] == (
        "needs 55.88 GiB on the device, but the models that are kept resident leave 46.57 GiB of 93.13 GiB"
    )


@pytest.mark.parametrize(
    ("size", "reason", "cured_by"),
    [(60, Reason.SHARES_WITH_KEPT, "keepResident"), (101, Reason.TOO_LARGE, "dtype")],
    ids=["too little is left beside kept models", "larger than the budget"],
)
def test_a_model_that_can_never_be_resident_is_told_why_and_what_to_do(
    size: float, reason: Reason, cured_by: str
) -> None:
    step = decide({"a": cold(size, 1.0), "x": hot(50, keep_resident=True)}, 50)

    assert step.blocked["a"].reason is reason
    assert cured_by in step.blocked["a"].message


def test_of_kept_models_that_do_not_fit_together_the_more_important_is_kept() -> None:
    step = decide(
        {"a": cold(60, keep_resident=True), "b": cold(60, keep_resident=True, priority=900), "c": cold(30, 1.0)}, 100
    )

    assert set(step.blocked) == {"a"}
    assert step.wake == "b"


def test_a_target_that_is_tried_ninth_is_told_so() -> None:
    names = "abcdefghi"
    models = {name: cold(5.5, 1.0 + index) for index, name in enumerate(names)} | {"x": hot(100, owed=1)}
    step = decide(models, 0)

    assert step.reasons["a"] == "8 models go before it"


def test_a_model_seen_once_is_worth_nothing() -> None:
    models = {"a": cold(5.5, 0.0), "x": hot(5.5, silent=1, gap=inf), "y": hot(5.5, silent=900, gap=10)}

    assert decide(models, 0).evict == ("x",)
