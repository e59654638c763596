"""The decisions of the residency policy, one row each, small enough to check by hand.

Sizes in GB, copies at 55 GB/s, so that a wake takes 0.010 s + missing / 55: 0.55 GB 0.02 s, 1.1 GB 0.03 s,
5.5 GB 0.11 s, 11 GB 0.21 s. `free` is what is left of a budget of 100 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import pytest

from omnimodel.placement.residency import next_step
from omnimodel.placement.state import Constants, Drain, ModelState, Step

NOW = 1000.0
GB = 10**9
CONSTANTS = Constants(copy_bytes_per_second=55e9)


def cold(weights: float, *ages: float, valid: float = 0.0, **more: object) -> ModelState:
    """A model that is not resident, with the ages of its waiters in seconds."""
    queue = tuple(sorted(NOW - age for age in ages))
    state = ModelState("", int(weights * GB), valid_bytes=int(valid * GB), queue=queue)
    return replace(state, **more)


def hot(
    weights: float, n: int = 0, silent: float = 1.0, gap: float = 10.0, owed: int = 0, **more: object
) -> ModelState:
    """A resident model with `n` requests in flight."""
    state = ModelState("", int(weights * GB), resident=True, in_flight=n, owed=owed, last_arrival=NOW - silent, gap=gap)
    return replace(state, **more)


def decide(models: dict[str, ModelState], free: float, drains: tuple[Drain, ...] = (), **more: object) -> Step:
    named = [replace(model, name=name) for name, model in models.items()]
    options = {"copying": None, "constants": CONSTANTS, "budget_bytes": 100 * GB} | more
    return next_step(NOW, named, int(free * GB), drains, **options)


@dataclass(frozen=True)
class Case:
    what: str
    free: float
    models: dict[str, ModelState]
    wake: str | None = None
    evict: str = ""
    drain: str = ""
    freeze: str = ""
    again_in: float | None = None
    drains: tuple[Drain, ...] = ()
    budget: float = 100
    copying: str | None = None


A_DRAINS_X = (Drain("a", ("x",)),)
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
    step = decide(case.models, case.free, case.drains, copying=case.copying, budget_bytes=int(case.budget * GB))

    assert step.wake == case.wake
    assert sorted(step.evict) == sorted(case.evict)
    assert sorted(step.drain) == sorted(case.drain)
    assert sorted(step.freeze) == sorted(case.freeze)
    if case.again_in is None:
        assert step.look_again_at is None
    else:
        assert step.look_again_at == pytest.approx(NOW + case.again_in)


def test_a_drain_names_the_target_its_room_is_for() -> None:
    step = decide({"a": cold(5.5, 4.0), "x": hot(5.5, n=2)}, 0)

    assert (step.wake, step.target, step.drain) == (None, "a", ("x",))


def test_a_drain_for_nobody_is_forgotten_and_then_others_get_the_room() -> None:
    models = {"a": cold(5.5), "b": cold(1.1, 0.5), "x": hot(5.5, n=1, draining=True)}

    assert decide(models, -5.5, A_DRAINS_X).abandon == ("a",)
    models["x"] = replace(models["x"], draining=False)
    assert decide(models, 2).wake == "b"


def test_every_waiting_model_is_told_why_it_waits() -> None:
    step = decide({"a": cold(5.5, 1.0), "b": cold(101, 1.0), "x": hot(5.5, n=2)}, 0)

    assert step.reasons["a"] == "needs 5.12 GiB, 0 bytes are free: x is in use for another 3.0 s at least"
    assert step.reasons["b"] == "needs 94.06 GiB on the device, but the budget is 93.13 GiB"


def test_a_model_beside_kept_ones_that_leave_too_little_is_told_both_numbers() -> None:
    step = decide({"a": cold(60, 1.0), "x": hot(50, keep_resident=True)}, 50)

    assert not step.acts
    assert step.blocked == {
        "a": "needs 55.88 GiB on the device, but the models that are kept resident leave 46.57 GiB of 93.13 GiB"
    }


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
