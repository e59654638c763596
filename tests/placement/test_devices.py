"""Where a model is woken of several devices: one row a decision, small enough to check by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnimodel.placement.devices import DeviceState, Stay, choose_device, choose_devices
from omnimodel.placement.state import ModelState
from placement.deciding import CONSTANTS, GB, NOW, cold, hot

BUDGET = 100
WARM = Stay("one", warm=True, seconds=60.0, restart_seconds=1.0)


@dataclass(frozen=True)
class Case:
    """A model, and two devices of 100 GB, of which the residents hold a part."""

    what: str
    model: ModelState
    one: dict[str, ModelState]
    two: dict[str, ModelState]
    chosen: str
    stay: Stay = field(default_factory=Stay)
    valid: dict[str, float] = field(default_factory=dict)  # GB of it that still lie on a device
    coming: dict[str, float] = field(default_factory=dict)  # GB that others wait for, by device
    why: str = ""


def device(name: str, models: dict[str, ModelState], **more: object) -> DeviceState:
    named = {key: replace(model, name=key) for key, model in models.items()}
    held = sum(model.footprint_bytes for model in named.values() if model.resident)
    return DeviceState(name, NOW, BUDGET * GB, BUDGET * GB - held, named, constants=CONSTANTS, **more)


def choose(case: Case):
    states = [
        device(
            name,
            models,
            coming={"x": int(case.coming.get(name, 0) * GB)},
            valid_bytes={"m": int(case.valid.get(name, 0) * GB)},
        )
        for name, models in (("one", case.one), ("two", case.two))
    ]
    return choose_device(replace(case.model, name="m"), case.stay, states)


CASES = [
    # -- without a process --
    Case("both empty: the first by name", cold(11, 0.0), {}, {}, "one", why="there is room for it"),
    Case("where the fewest bytes are placed", cold(11, 0.0), {"a": cold(11)}, {"b": cold(5.5)}, "two"),
    Case("where it was, though elsewhere fewer are", cold(11, 0.0), {"a": hot(22)}, {}, "one", stay=Stay("one")),
    Case(
        "not where it was, if one has to leave for it there",
        cold(5.5, 0.0),
        {"a": hot(99)},
        {"b": hot(22)},
        "two",
        stay=Stay("one"),
        why="there is room for it",
    ),
    Case(
        "its frames are there still: 0 s beat a copy of 1 s",
        cold(55, 0.0),
        {"a": hot(22)},
        {},
        "one",
        valid={"one": 55},
        why="51.22 GiB of it still lie there",
    ),
    Case(
        "5.5 GB that lie there are a tenth of a second: the emptier one",
        cold(55, 0.0),
        {"a": hot(22)},
        {},
        "two",
        valid={"one": 5.5},
    ),
    Case("others wait for the room already", cold(55, 0.0), {}, {}, "two", coming={"one": 60}),
    Case(
        "one to be waited for is worse than one that goes at once",
        cold(55, 0.0),
        {"a": hot(60, min_resident_until=NOW + 9)},
        {"b": hot(60, silent=500)},
        "two",
        why="who leaves for it there is missed least",
    ),
    # -- with a process on the first, whose start takes 1 s --
    Case("a victim that goes at once is no reason to go", cold(55, 0.0), {"a": hot(60)}, {}, "one", stay=WARM),
    Case(
        "nor are wakes that have taken 0.9 s",
        cold(55, 0.0),
        {"a": hot(60)},
        {},
        "one",
        stay=replace(WARM, paid_seconds=0.9),
    ),
    Case(
        "those that have taken 1.2 s are: there is room",
        cold(55, 0.0),
        {"a": hot(60)},
        {},
        "two",
        stay=replace(WARM, paid_seconds=1.2),
        why="there is room for it",
    ),
    Case(
        "but not where another would have had to come back 6 times in its minute, 1.1 s each",
        cold(55, 0.0),
        {"a": hot(60)},
        {"b": hot(60, silent=10)},
        "one",
        stay=replace(WARM, paid_seconds=1.2),
    ),
    Case(
        "one that nobody asked for in that minute may go",
        cold(55, 0.0),
        {"a": hot(60)},
        {"b": hot(60, silent=61, gap=5)},
        "two",
        stay=replace(WARM, paid_seconds=1.2),
    ),
    Case("requests in its way, for 0.9 s", cold(55, 0.9), {"a": hot(60, n=1)}, {}, "one", stay=WARM),
    Case("requests in its way, for 1.2 s", cold(55, 1.2), {"a": hot(60, n=1)}, {}, "two", stay=WARM),
    Case(
        "requests in its way on both: where it is",
        cold(55, 9.0),
        {"a": hot(60, n=1)},
        {"b": hot(60, n=1)},
        "one",
        stay=WARM,
        why="there is room for it the soonest",
    ),
    Case(
        "an age of 9 s of its waiter is nothing to one whose victim goes at once",
        cold(55, 9.0),
        {"a": hot(60)},
        {},
        "one",
        stay=WARM,
    ),
    # -- where it can never be --
    Case(
        "what is kept resident leaves too little",
        cold(55, 0.0),
        {"a": hot(60, keep_resident=True)},
        {"b": hot(60, n=9)},
        "two",
        stay=WARM,
    ),
    Case(
        "it is kept itself, and does not stand in its own way",
        cold(55, 0.0, keep_resident=True),
        {"m": cold(55, 0.0, keep_resident=True), "a": hot(44, keep_resident=True)},
        {"b": hot(60, n=9)},
        "one",
        stay=WARM,
    ),
    # -- where there was less memory than there should be --
    Case(
        "where there was none, though its frames are there and others wait elsewhere",
        cold(55, 0.0),
        {},
        {"b": hot(60, n=9)},
        "two",
        stay=replace(WARM, shunned=frozenset({"one"})),
        valid={"one": 55},
    ),
    Case(
        "where there was none, and no other can ever hold it",
        cold(55, 0.0),
        {},
        {"b": hot(60, keep_resident=True)},
        "one",
        stay=replace(WARM, shunned=frozenset({"one"})),
    ),
    Case(
        "there was none on either",
        cold(55, 0.0),
        {},
        {},
        "one",
        stay=replace(WARM, shunned=frozenset({"one", "two"})),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_where_a_model_is_woken(case):
    found = choose(case)
    assert found.device == case.chosen
    if case.why:
        assert found.why == case.why


MODELS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.one_of(
        st.builds(cold, st.floats(0.1, 120), st.floats(0, 60), keep_resident=st.booleans()),
        st.builds(hot, st.floats(0.1, 60), st.integers(0, 2), st.floats(0, 1e4), keep_resident=st.booleans()),
    ),
)


@given(
    st.builds(cold, st.floats(0.1, 120), st.floats(0, 60)),
    st.lists(MODELS, min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_the_choice_can_hold_it_where_any_can_and_stays_when_nothing_changes(model, loads, warm, data):
    model = replace(model, name="m")
    states = [device(f"d{number}", models) for number, models in enumerate(loads)]
    here = data.draw(st.sampled_from([state.name for state in states]))
    stay = Stay(here, warm, seconds=60.0, paid_seconds=data.draw(st.floats(0, 9)) if warm else 0.0, restart_seconds=1.0)
    found = choose_device(model, stay, states)
    able = {s.name for s in states if model.footprint_bytes + s.kept_bytes <= s.budget_bytes}
    assert found.device in (able or {state.name for state in states})
    if not warm:
        assert choose_device(model, replace(stay, device=found.device), states).device == found.device


def several(model: ModelState, loads: dict[str, dict[str, ModelState]], count: int, here: tuple[str, ...] = ()) -> str:
    states = [device(name, models) for name, models in loads.items()]
    return " ".join(choice.device for choice in choose_devices(replace(model, name="m"), here, states, count))


def test_a_model_over_several_devices_takes_the_best_ones_in_their_order():
    loads = {"a": {"x": hot(60, 1)}, "b": {"y": hot(20)}, "c": {"z": hot(60, 1)}, "d": {"w": hot(10)}}
    assert several(cold(50, 0.0), loads, 1) == "d"
    assert several(cold(50, 0.0), loads, 2) == "b d"
    assert several(cold(50, 0.0), loads, 4) == "a b c d"


def test_of_devices_that_are_alike_it_stays_on_those_that_it_is_on():
    loads = {"a": {}, "b": {}, "c": {}}
    assert several(cold(50, 0.0), loads, 2) == "a b"
    assert several(cold(50, 0.0), loads, 2, here=("b", "c")) == "b c"


def test_a_device_whose_kept_models_leave_no_room_is_the_last_to_be_taken():
    loads = {"a": {"x": cold(60, keep_resident=True)}, "b": {"y": hot(99, 1)}, "c": {"z": hot(99, 1)}}
    assert several(cold(50, 0.0), loads, 2) == "b c"
    assert several(cold(50, 0.0), loads, 3) == "a b c"
