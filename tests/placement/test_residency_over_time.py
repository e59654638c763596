"""The residency policy over time: what no sequence of requests may break, and the cases people ran into."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnimodel.placement.residency import next_step
from omnimodel.placement.state import Constants, Drain, ModelState, wake_seconds
from placement.device import Device, Request

GB = 10**9
FAST = Constants(copy_bytes_per_second=55e9)


def catalogue(*weights: float, **more: object) -> dict[str, ModelState]:
    names = [f"m{index}" for index in range(len(weights))]
    return {
        name: replace(ModelState(name, int(size * GB), int(size * GB / 10)), **more)
        for name, size in zip(names, weights, strict=True)
    }


def swaps_per_minute(device: Device) -> float:
    return len(device.swaps) / max(device.now / 60, 1e-9)


# -- properties --

sizes = st.integers(min_value=1, max_value=10)


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[list[ModelState], list[Drain], int]:
    """A consistent moment: residents and frozen models fit; perhaps a drain is under way."""
    budget = 20
    models: list[ModelState] = []
    held = 0
    for index in range(draw(st.integers(1, 7))):
        weights, working = draw(sizes), draw(st.integers(0, 3))
        freezable = draw(st.booleans())
        resident = draw(st.booleans()) and held + weights + working <= budget
        frozen = (not resident) and freezable and draw(st.booleans()) and held + working <= budget
        held += weights + working if resident else working if frozen else 0
        models.append(
            ModelState(
                f"m{index}",
                weights,
                working,
                valid_bytes=0 if resident else draw(st.integers(0, weights)),
                resident=resident,
                in_flight=draw(st.integers(0, 2)) if resident else int(frozen),
                queue=tuple(sorted(draw(st.lists(st.floats(900, 1000), max_size=4)))),
                owed=draw(st.integers(0, 1)) if resident else 0,
                last_arrival=draw(st.floats(0, 1000)),
                gap=draw(st.floats(0, 1000)),
                priority=draw(st.sampled_from([0, 500, 1000])),
                resident_since=draw(st.floats(900, 1000)),
                min_resident_until=draw(st.sampled_from([0.0, 1010.0])),
                keep_resident=draw(st.integers(0, 5)) == 0,
                freezable=freezable,
                frozen_bytes=working if frozen else 0,
                frozen_since=990.0 if frozen else None,
                loadable=draw(st.integers(0, 5)) != 0,
            )
        )
    drains: list[Drain] = []
    busy = [m for m in models if m.resident and m.in_flight and not m.owed and not m.keep_resident]
    cold = [m for m in models if not m.resident and m.footprint_bytes <= budget]
    if busy and cold and draw(st.booleans()):
        victim, target = draw(st.sampled_from(busy)), draw(st.sampled_from(cold))
        if target.need_bytes <= budget - held + victim.footprint_bytes:
            models[models.index(victim)] = replace(victim, draining=True)
            drains.append(Drain(target.name, (victim.name,)))
            held += target.need_bytes
    return models, drains, budget - held


@given(snapshots())
@settings(max_examples=400, deadline=None)
def test_no_step_gives_up_what_is_protected_or_promises_bytes_that_are_not_there(moment) -> None:
    models, drains, free_bytes = moment
    by_name = {model.name: model for model in models}
    step = next_step(1000.0, models, free_bytes, drains, None, FAST, budget_bytes=20)

    under_way = {name for drain in drains for name in drain.victims}
    goes = (*step.evict, *step.freeze, *step.drain)
    assert len(set(goes)) == len(goes)
    for name in goes:
        model = by_name[name]
        assert model.resident
        assert not model.keep_resident
        if name not in under_way:
            assert not model.owed
            assert model.min_resident_until <= 1000.0
        if name in step.evict:
            assert not model.in_flight
    if step.target and not any(drain.target == step.target for drain in drains):
        target = by_name[step.target]
        assert target.waiters
        assert target.loadable
        assert not target.resident
        given_up = sum(by_name[name].footprint_bytes for name in (*step.evict, *step.drain))
        given_up += sum(by_name[name].weights_bytes for name in step.freeze)
        assert max(0, free_bytes) + given_up >= target.need_bytes
        assert (step.wake is None) == bool(step.drain)
    for name, model in by_name.items():
        waits = model.waiters and not model.resident and model.loadable
        if waits and not step.acts:
            assert step.reasons[name], "a model that waits is told why"


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    requests = draw(
        st.lists(
            st.tuples(
                st.floats(0, 60),
                st.integers(0, 4),
                st.floats(0.01, 5.0),
                st.sampled_from([None, 0.5, 10.0]),
                st.booleans(),
            ),
            min_size=1,
            max_size=60,
        )
    )
    return [
        Request(arrival, f"m{model}", seconds, float("inf") if gone is None else gone, background)
        for arrival, model, seconds, gone, background in requests
    ]


@given(
    traces(),
    st.lists(sizes, min_size=5, max_size=5),
    st.booleans(),
    st.lists(st.sampled_from([0.0, 5.0]), min_size=5, max_size=5),
    st.lists(st.sampled_from([100, 500, 900]), min_size=5, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_every_request_is_served_within_the_bound(requests, weights, freezable, promises, priorities) -> None:
    models = {
        f"m{i}": ModelState(
            f"m{i}", size * GB, size * GB // 10, freezable=freezable, priority=priority, min_resident_seconds=promise
        )
        for i, (size, promise, priority) in enumerate(zip(weights, promises, priorities, strict=True))
    }
    device = Device(models, 12 * GB, Constants(copy_bytes_per_second=2e9, fair_seconds=5.0, patience_seconds=1.0))
    waited = device.run(requests)

    longest_run = max(request.seconds for request in requests)
    longest_wake = max(wake_seconds(model, device.constants) for model in models.values())
    queued = ceil(len(requests) / device.concurrency) * longest_run
    bound = 5.0 + 6 * (queued + longest_run + 2 * longest_wake + max(promises)) + queued
    for request, wait in zip(device.requests, waited, strict=True):
        assert min(wait, request.patience) <= bound


# -- what people ran into --


@pytest.mark.parametrize("freezable", [False, True])
def test_ten_in_turn_where_nine_fit_do_not_miss_always(freezable: bool) -> None:
    """modelmesh-serving#341: cyclic access churns an LRU, which misses every time (here 120 wakes a minute)."""
    models = catalogue(*[1.0] * 10, freezable=freezable)
    requests = [Request(i * 0.5, f"m{i % 10}", 0.1) for i in range(600)]
    device = Device(models, int(9 * 1.1 * GB), FAST)
    waited = device.run(requests)

    assert max(waited) < 0.2
    assert swaps_per_minute(device) < 40


@pytest.mark.parametrize("freezable", [False, True])
def test_two_that_take_turns_where_one_fits_swap_a_bounded_number_of_times(freezable: bool) -> None:
    """llama-swap#19: ping-pong. Under constant load of both, a swap serves all that waited, and is paid by patience."""
    models = catalogue(14.0, 14.0, freezable=freezable)
    requests = [Request(i * 0.05, f"m{i % 2}", 0.4) for i in range(4000)]
    device = Device(models, 16 * GB, FAST, concurrency=16)
    waited = device.run(requests)

    assert swaps_per_minute(device) < 60 / FAST.patience_seconds * 1.2
    assert max(waited) < 2 * FAST.patience_seconds
    assert device.useless_wakes == 0


def test_min_resident_bounds_the_swaps_of_a_ping_pong_that_is_never_busy() -> None:
    """open-webui#530: a second model for titles costs two swaps a turn, unless the manifest says how long one stays."""
    models = catalogue(14.0, 14.0, min_resident_seconds=20.0)
    requests = [Request(i * 1.0, f"m{i % 2}", 0.1) for i in range(600)]
    device = Device(models, 16 * GB, FAST, concurrency=64)
    waited = device.run(requests)

    assert swaps_per_minute(device) <= 3.1
    assert max(waited) < 21.0


def test_titles_in_the_background_do_not_swap_out_the_model_in_use() -> None:
    """open-webui#530: the background class waits while an interactive model was used in the last seconds."""
    chat = [Request(i * 4.0, "m0", 0.5) for i in range(40)]
    titles = [Request(i * 4.0 + 1.0, "m1", 0.1, background=True) for i in range(40)]
    device = Device(catalogue(14.0, 14.0), 16 * GB, FAST, concurrency=64)
    device.run(chat + titles)
    background = len(device.swaps)

    device = Device(catalogue(14.0, 14.0), 16 * GB, FAST, concurrency=64)
    device.run(chat + [replace(title, background=False) for title in titles])

    assert background <= 14
    assert len(device.swaps) >= 60


def test_four_models_at_four_times_the_budget_in_turn_all_succeed() -> None:
    """triton#7279: the oldest is unloaded when the device is full."""
    requests = [Request(i * 1.0, f"m{i % 4}", 0.2) for i in range(40)]
    device = Device(catalogue(*[10.0] * 4), 11 * GB, FAST)

    assert max(device.run(requests)) < 1.0
    assert device.useless_wakes == 0


@pytest.mark.parametrize("freezable", [False, True])
def test_fifty_at_once_over_three_models_where_one_fits(freezable: bool) -> None:
    """llama-swap#277: concurrent requests raced for the swap."""
    requests = [Request(0.0, f"m{i % 3}", 0.5) for i in range(50)]
    device = Device(catalogue(10.0, 10.0, 10.0, freezable=freezable), 12 * GB, FAST, concurrency=8)
    waited = device.run(requests)

    assert len(device.swaps) <= (6 if freezable else 3), "a wake serves all that wait"
    assert device.useless_wakes == 0
    assert max(waited) < 30.0


def test_alternating_calls_are_each_served_by_the_wake_they_caused() -> None:
    """llama.cpp#28698: a fresh model was evicted before the call that had asked for it."""
    draw = random.Random(3)
    requests = [Request(i * 0.05, f"m{draw.randint(0, 1)}", draw.uniform(0.01, 0.4)) for i in range(200)]
    device = Device(catalogue(10.0, 10.0), 12 * GB, FAST, concurrency=4)
    device.run(requests)

    assert device.useless_wakes == 0


def test_a_client_that_gives_up_leaves_no_orphan_wake_behind() -> None:
    """llama-swap#727: the only waiter of a cold model goes away during its drain; the next model does not wait for it."""
    requests = [Request(0.0, "m0", 10.0), Request(1.0, "m1", 1.0, patience=5.0), Request(7.0, "m2", 1.0)]
    device = Device(catalogue(10.0, 10.0, 2.0), 14 * GB, FAST)
    waited = device.run(requests)

    assert [name for _, name in device.swaps] == ["m0", "m2"]
    assert waited[2] < 0.1


def test_a_hot_model_is_not_slowed_by_sixty_rare_ones() -> None:
    """ollama#14578: calls for the resident model waited in the queue of those that load."""
    draw = random.Random(7)
    hot = [Request(i * 0.1, "m0", 0.05) for i in range(1200)]
    rare = [Request(draw.uniform(0, 120), f"m{draw.randint(1, 60)}", 0.5) for _ in range(240)]
    device = Device(catalogue(4.0, *[2.0] * 60), 13 * GB, FAST)
    device.run(hot + rare)
    waits = sorted(w for r, w in zip(device.requests, device.waited, strict=True) if r.model == "m0")

    assert waits[len(waits) // 2] == 0.0
    assert waits[int(len(waits) * 0.99)] < 0.5


def test_a_large_model_among_small_ones_that_fill_the_link_is_woken_when_it_is_overdue() -> None:
    """Without the fairness limit it waits until the others stop (116 s in the study)."""
    small = [Request(i * 0.02, f"m{1 + i % 60}", 0.01) for i in range(2250)]
    device = Device(catalogue(14.0, *[1.0] * 60), 16 * GB, replace(FAST, copy_bytes_per_second=15e9))
    waited = device.run([*small, Request(5.0, "m0", 0.5)])
    large = next(w for r, w in zip(device.requests, waited, strict=True) if r.model == "m0")

    assert large < FAST.fair_seconds + 5.0


def test_overdue_generations_that_freeze_each_other_all_end() -> None:
    """Many long generations, one fits: without a slice each would be frozen before its first token."""
    models = catalogue(*[10.0] * 6, freezable=True)
    models = {name: replace(model, working_bytes=GB // 10) for name, model in models.items()}
    requests = [Request(0.1 * i, f"m{i % 6}", 20.0) for i in range(24)]
    device = Device(models, 11 * GB, replace(FAST, copy_bytes_per_second=5e9))
    device.run(requests)

    assert device.frozen > 6
    assert device.now < 6 * 20.0 * 3


def test_freezing_shortens_the_wait_behind_long_generations() -> None:
    """The lever the study found to matter most: weights go between two tokens, requests go on after the next wake."""
    requests = [Request(2.0 * i, f"m{i % 3}", 8.0) for i in range(60)]

    def mean_wait(freezable: bool) -> float:
        models = catalogue(10.0, 10.0, 10.0, freezable=freezable)
        waited = Device(models, 22 * GB, FAST, concurrency=8).run(requests)
        return sum(waited) / len(waited)

    assert mean_wait(freezable=True) < 0.7 * mean_wait(freezable=False)
