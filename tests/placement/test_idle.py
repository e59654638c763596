"""Which models go down a tier because nobody uses them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from omnimodel.placement.idle import IdleConstants, IdleModel, idle_steps

NOW = 1000.0
DEFAULTS = IdleConstants()
MIB = 1 << 20


def resident(idle: float, **more: object) -> IdleModel:
    return replace(IdleModel("", resident=True, busy=False, idle_since=NOW - idle, idle_after_seconds=300.0), **more)


def warm(evicted: float, idle: float = 500.0, **more: object) -> IdleModel:
    state = IdleModel("", False, False, NOW - idle, NOW - evicted, private_bytes=30 * MIB)
    return replace(state, **more)


@dataclass(frozen=True)
class Case:
    what: str
    models: dict[str, IdleModel]
    evict: str = ""
    park: str = ""
    stop: str = ""
    again_in: float | None = None
    constants: IdleConstants = DEFAULTS


CASES = [
    Case("used a moment ago: look again when its idleAfter is over", {"a": resident(10)}, again_in=290.0),
    Case("idleAfter over: it goes though nobody wants its room", {"a": resident(300)}, evict="a"),
    Case("never", {"a": resident(9e9, idle_after_seconds=None)}),
    Case("kept", {"a": resident(9e9, keep_resident=True)}),
    Case("a request is in flight, however long", {"a": resident(9e9, busy=True)}),
    Case("minResident is longer", {"a": resident(400, min_resident_until=NOW + 7)}, again_in=7.0),
    Case("straight down to cold", {"a": resident(300, idle_tier="cold")}, evict="a", stop="a"),
    Case("evicted: its process stays for a while", {"a": warm(290)}, again_in=10.0),
    Case("and then goes", {"a": warm(300)}, stop="a"),
    Case("idleTier warm: its process stays", {"a": warm(9e9, idle_tier="warm")}),
    Case("evicted with requests held or frozen: it stays", {"a": warm(600, busy=True)}),
    Case("beside a device it is parked first", {"a": warm(29, parks=True)}, again_in=1.0),
    Case("parked when that time is over", {"a": warm(30, parks=True)}, park="a", again_in=270.0),
    Case("idleTier warm: it is not parked for being idle", {"a": warm(9e9, parks=True, idle_tier="warm")}),
    Case("parked or not, it goes in the end", {"a": warm(300, parks=True)}, stop="a"),
    Case(
        "one that the host has no room for is not parked before it goes",
        {"a": warm(40, parks=True)},
        stop="a",
        again_in=260.0,
        constants=IdleConstants(warm_processes=0),
    ),
    Case(
        "more processes than the host has room for: the longest unused goes",
        {"a": warm(5, idle=70), "b": warm(5, idle=90), "c": warm(5, idle=80)},
        stop="b",
        again_in=295.0,
        constants=IdleConstants(warm_processes=2),
    ),
    Case(
        "more bytes than the host has room for: the least important go until it fits",
        {"a": warm(5, idle=70, priority=400), "b": warm(5, idle=90), "c": warm(5, idle=80), "d": resident(10)},
        stop="ab",
        again_in=290.0,
        constants=IdleConstants(warm_bytes=40 * MIB),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_idle(case: Case) -> None:
    models = [replace(model, name=name) for name, model in case.models.items()]
    step = idle_steps(NOW, models, case.constants)

    assert sorted(step.evict) == sorted(case.evict)
    assert sorted(step.stop) == sorted(case.stop)
    assert step.look_again_at == (None if case.again_in is None else NOW + case.again_in)
    assert sorted(step.park) == sorted(case.park)
    assert set(step.reasons) == {*step.evict, *step.park, *step.stop}


def test_an_answer_longer_than_idle_after_counts_from_its_last_byte() -> None:
    """LocalAI#5221: the timer ran from the start of the request and killed the engine in the middle of it."""
    model = IdleModel("a", True, True, idle_since=0.0, idle_after_seconds=5.0)

    assert not idle_steps(20.0, [model], IdleConstants()).evict
    ended = replace(model, busy=False, idle_since=20.0)
    assert idle_steps(20.0, [ended], IdleConstants()).look_again_at == 25.0
    assert idle_steps(25.0, [ended], IdleConstants()).evict == ("a",)
