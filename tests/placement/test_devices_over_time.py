"""Placement over several devices and the residency policy of each, together over time: nobody starves, and it pays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnimodel.placement.state import Constants, ModelState
from placement.device import Request
from placement.pod import Pod

GB = 10**9
FAST = Constants(copy_bytes_per_second=55e9)


def catalogue(*weights: float, **more: object) -> dict[str, ModelState]:
    return {
        f"m{index}": replace(ModelState(f"m{index}", int(size * GB), int(size * GB / 10)), **more)
        for index, size in enumerate(weights)
    }


def trace(seed: int, names: list[str], seconds: float, every: float, lasts: float = 0.5) -> list[Request]:
    """Requests at random, each model as often as the others."""
    chance = random.Random(seed)
    found, now = [], 0.0
    while (now := now + chance.expovariate(len(names) / every)) < seconds:
        found.append(Request(now, chance.choice(names), chance.expovariate(1 / lasts)))
    return found


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.floats(1, 9), min_size=1, max_size=8),
    budgets=st.lists(st.sampled_from([10, 12, 20]), min_size=1, max_size=3),
    restart=st.floats(0, 20),
    seed=st.integers(0, 1000),
    every=st.floats(0.5, 20),
)
def test_every_request_is_served_and_no_device_holds_more_than_it_has(sizes, budgets, restart, seed, every):
    models = catalogue(*sizes)
    pod = Pod(models, [budget * GB for budget in budgets], FAST, restart_seconds=restart)
    requests = trace(seed, list(models), 60, every)
    waited = pod.run(requests)
    # a wait is at most: the fair age, then each other model once before it, with its wake, its start and its requests
    longest = FAST.fair_seconds + len(models) * (2 * (restart + 0.2) + 30)
    assert max(waited, default=0.0) < longest
    assert len(pod.moved) <= len(requests)


def test_models_that_crowd_one_device_spread_over_two_and_are_not_swapped_any_more():
    models = catalogue(8, 8)
    requests = trace(1, list(models), 600, 5)
    moving = Pod(models, [10 * GB, 10 * GB], FAST, restart_seconds=2.0)
    staying = Pod(models, [10 * GB, 10 * GB], FAST, restart_seconds=2.0, moves=False)
    waited, waited_there = moving.run(requests), staying.run(requests)
    assert len(moving.moved) == 1
    assert max(time for device in moving.devices.values() for time, _ in device.swaps) < 200
    assert max(time for device in staying.devices.values() for time, _ in device.swaps) > 500
    assert sum(waited) < sum(waited_there)


@pytest.mark.parametrize("restart", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("every", [20, 5])
def test_where_no_device_has_room_starts_cost_no_more_than_what_they_were_to_avoid(restart, every):
    models = catalogue(*[6] * 8)  # each device holds two of 6.6 GB
    requests = trace(2, list(models), 600, every)
    waits = {}
    for moves in (False, True):
        pod = Pod(models, [14 * GB, 14 * GB], FAST, restart_seconds=restart, moves=moves)
        for name in list(models)[::2]:
            pod.devices["d1"].models[name] = pod.devices["d0"].models.pop(name)
        waits[moves] = sum(pod.run(requests))
    assert waits[True] < 2 * waits[False]
    assert len(pod.moved) < len(requests) / 20


def test_a_start_that_takes_minutes_is_worth_it_for_nobody():
    models = catalogue(8, 8)
    pod = Pod(models, [10 * GB, 10 * GB], FAST, restart_seconds=300.0)
    pod.run(trace(3, list(models), 300, 30))
    assert pod.moved == []
