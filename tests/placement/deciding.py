"""One decision of the residency policy: builders of models, and a row of a table of decisions.

Sizes in GB, copies at 55 GB/s, so that a wake takes 0.010 s + missing / 55: 0.55 GB 0.02 s, 1.1 GB 0.03 s,
5.5 GB 0.11 s, 11 GB 0.21 s. `free` is what is left of a budget of 100 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """One decision: what there is, and what is to be done."""

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


def check(case: Case) -> None:
    """Decide, and compare all that the step does."""
    step = decide(case.models, case.free, case.drains, copying=case.copying, budget_bytes=int(case.budget * GB))

    assert step.wake == case.wake
    assert sorted(step.evict) == sorted(case.evict)
    assert sorted(step.drain) == sorted(case.drain)
    assert sorted(step.freeze) == sorted(case.freeze)
    if case.again_in is None:
        assert step.look_again_at is None
    else:
        assert step.look_again_at == pytest.approx(NOW + case.again_in)
