"""Which pods hold which models: limits, spread, locality, and that little moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from omnimodel.errors import Reason
from omnimodel.placement.assignment import ModelDemand, PoolSupply
from omnimodel.placement.board import PodDemand, PodSupply
from omnimodel.placement.pods import MOVES, Placement, place

GIB = 1 << 30
POOL = PoolSupply("gpu", 0)


def pod(index: int, gib: float = 10, **more: Any) -> PodSupply:
    return replace(PodSupply(f"gpu-{index}", budget_bytes=int(gib * GIB)), **more)


def ask(
    name: str, gib: float = 1, *on: str, serves: bool = True, replicas: int = 1, image: str = "", **more: Any
) -> PodDemand:
    model = replace(ModelDemand("default", name, "gpu", int(gib * GIB), (name,)), **more)
    return PodDemand(model, replicas, on, frozenset(on) if serves else frozenset(), image)


def where(placement: Placement) -> dict[str, tuple[str, ...]]:
    return {key.removeprefix("default/"): pods for key, pods in placement.pods.items()}


def reasons(placement: Placement) -> dict[str, Reason]:
    return {finding.model.removeprefix("default/"): finding.reason for finding in placement.refused}


def after(demands: list[PodDemand], placement: Placement) -> list[PodDemand]:
    """The same models once everything is where it was placed, and serves."""
    return [
        replace(demand, current=pods, serving=frozenset(pods))
        for demand in demands
        for pods in [placement.pods.get(demand.model.key, ())]
    ]


def settle(demands: list[PodDemand], pods: list[PodSupply], pool: PoolSupply = POOL) -> tuple[list[PodDemand], int]:
    """Place until nothing changes; the models then, and how many rounds it took."""
    for round_number in range(60):
        result = place(demands, pool, pods)
        again = after(demands, result)
        if again == demands:
            return demands, round_number
        demands = again
    raise AssertionError("never settles")


def test_models_go_where_the_most_room_is() -> None:
    result = place([ask("a", 6), ask("b", 6), ask("c", 3)], POOL, [pod(0), pod(1)])
    assert where(result) == {"a": ("gpu-0",), "b": ("gpu-1",), "c": ("gpu-0",)}
    assert result.footprint_bytes == {"gpu-0": 9 * GIB, "gpu-1": 6 * GIB}


def test_models_of_unknown_size_are_dealt_out_and_said_to_be_unknown() -> None:
    result = place([ask("a", 0), ask("b", 0)], POOL, [pod(0), pod(1)])
    assert where(result) == {"a": ("gpu-0",), "b": ("gpu-1",)}
    assert {finding.reason for finding in result.warnings} == {Reason.SIZE_UNKNOWN}


def test_a_pod_with_the_image_is_preferred_to_an_emptier_one() -> None:
    result = place([ask("a", 1, image="3fb0")], POOL, [pod(0), pod(1, images=frozenset({"3fb0"}))])
    assert where(result) == {"a": ("gpu-1",)}
    assert result.why["default/a"]["gpu-1"] == "gpu-1 has its image"


def test_but_not_to_one_where_everything_fits_at_once() -> None:
    full = ask("b", 9.5, "gpu-1")
    result = place([full, ask("a", 1, image="3fb0")], POOL, [pod(0), pod(1, images=frozenset({"3fb0"}))])
    assert where(result)["a"] == ("gpu-0",)


def test_replicas_are_spread_over_zones() -> None:
    pods = [pod(0, zone="a"), pod(1, zone="a"), pod(2, zone="b")]
    assert where(place([ask("m", 1, replicas=2)], POOL, pods)) == {"m": ("gpu-0", "gpu-2")}


def test_too_few_pods_for_the_replicas_serves_from_those_there_are() -> None:
    result = place([ask("m", 1, replicas=3)], POOL, [pod(0), pod(1)])
    assert where(result) == {"m": ("gpu-0", "gpu-1")}
    (warning,) = result.warnings
    assert (warning.reason, warning.problem) == (
        Reason.TOO_FEW_PODS,
        "asks for 3 pods and has 2: pool gpu has no other pod",
    )


def test_each_refusal_has_the_reason_that_is_nearest_to_being_solved() -> None:
    assert reasons(place([ask("m", 20)], POOL, [pod(0)])) == {"m": Reason.TOO_LARGE}
    assert reasons(place([ask("m", 20)], POOL, [])) == {"m": Reason.NO_PODS}
    kept = ask("k", 8, "gpu-0", keep_resident=True)
    assert reasons(place([kept, ask("m", 5)], POOL, [pod(0)])) == {"m": Reason.SHARES_WITH_KEPT}
    limited = replace(POOL, overcommit_limit=1.0)
    result = place([ask("a", 8, "gpu-0"), kept, ask("m", 5)], limited, [pod(0), pod(1, 4)])
    assert reasons(result)["m"] == Reason.SHARES_WITH_KEPT


def test_a_model_refused_by_a_small_pod_goes_to_a_large_one() -> None:
    """aibrix#2744: retried for ever on the pod where it does not fit."""
    assert where(place([ask("m", 8, "gpu-0")], POOL, [pod(0, 4), pod(1, 10)])) == {"m": ("gpu-1",)}


def test_a_newcomer_drives_nobody_of_its_rank_out() -> None:
    limited = replace(POOL, overcommit_limit=1.0)
    result = place([ask("old", 8, "gpu-0", created_seconds=9), ask("new", 8, created_seconds=1)], limited, [pod(0)])
    assert where(result) == {"old": ("gpu-0",)}
    assert reasons(result) == {"new": Reason.OVER_COMMIT_LIMIT}


def test_a_more_important_newcomer_drives_out_the_least_important() -> None:
    limited = replace(POOL, overcommit_limit=1.0)
    held = [ask("low", 4, "gpu-0", priority=100), ask("mid", 4, "gpu-0", priority=400)]
    result = place([*held, ask("high", 5, priority=900)], limited, [pod(0)])
    assert where(result) == {"mid": ("gpu-0",), "high": ("gpu-0",)}
    assert reasons(result) == {"low": Reason.OVER_COMMIT_LIMIT}
    assert result.why["default/high"]["gpu-0"] == "it is more important than default/low"


def test_a_displaced_model_goes_to_another_pod_where_there_is_room() -> None:
    limited = replace(POOL, overcommit_limit=1.0)
    result = place([ask("low", 4, "gpu-0", priority=100), ask("high", 8, priority=900)], limited, [pod(0), pod(1, 6)])
    assert where(result) == {"high": ("gpu-0",), "low": ("gpu-1",)}


def test_a_lost_pod_gives_its_models_away_and_a_pod_that_is_only_not_ready_keeps_them() -> None:
    demands = [ask("a", 1, "gpu-0"), ask("b", 1, "gpu-1")]
    away = place(demands, POOL, [pod(0, ready=False, lost=True), pod(1)])
    assert where(away) == {"a": ("gpu-1",), "b": ("gpu-1",)}
    stays = place(demands, POOL, [pod(0, ready=False), pod(1)])
    assert where(stays) == {"a": ("gpu-0",), "b": ("gpu-1",)}


def test_the_only_pod_keeps_its_models_when_it_is_lost() -> None:
    assert where(place([ask("a", 1, "gpu-0")], POOL, [pod(0, ready=False, lost=True)])) == {"a": ("gpu-0",)}


def test_when_no_pod_answers_everything_stays_where_it_was() -> None:
    """seldon#5032: all servers were away for a while."""
    pods = [pod(index, ready=False, lost=True) for index in range(3)]
    demands = [ask("a", 1, "gpu-2"), ask("b", 9, "gpu-2"), ask("c", 1, "gpu-0", "gpu-2", replicas=2)]
    everything = {"a": ("gpu-2",), "b": ("gpu-2",), "c": ("gpu-0", "gpu-2")}
    assert where(place(demands, POOL, pods)) == everything
    one_after_the_other = [*pods[:1], pod(1, ready=False), *pods[2:]]
    assert where(place(demands, POOL, one_after_the_other)) == everything


def test_a_pod_that_will_go_gives_its_models_away() -> None:
    pods = [pod(0), pod(1, leaving=True)]
    assert where(place([ask("a", 1, "gpu-1")], POOL, pods)) == {"a": ("gpu-0", "gpu-1")}  # until gpu-0 serves it
    assert where(place([ask("a", 1, "gpu-0", "gpu-1")], POOL, pods)) == {"a": ("gpu-0",)}
    assert where(place([ask("a", 1, "gpu-1", serves=False)], POOL, pods)) == {"a": ("gpu-0",)}


def test_a_move_is_made_before_it_is_broken() -> None:
    pods = [pod(0, 4), pod(1, 4)]
    demands = [ask(name, 2, "gpu-0") for name in "abcd"]
    begun = place(demands, POOL, pods)
    assert where(begun)["d"] == ("gpu-0", "gpu-1")
    assert [(move.model, move.source, move.target) for move in begun.moves] == [("default/d", "gpu-0", "gpu-1")]

    waiting = [
        replace(ask("d", 2, "gpu-0", "gpu-1"), serving=frozenset({"gpu-0"})) if d.model.name == "d" else d
        for d in demands
    ]
    assert where(place(waiting, POOL, pods)) == where(begun)  # nothing else moves meanwhile

    done = [ask("d", 2, "gpu-0", "gpu-1") if d.model.name == "d" else d for d in demands]
    assert where(place(done, POOL, pods))["d"] == ("gpu-1",)


def test_a_new_pod_takes_its_share_model_by_model() -> None:
    """modelmesh-serving#389: everything on one device, the others idle."""
    demands = [ask(f"m{index}", 2, "gpu-0") for index in range(10)]
    settled, rounds = settle(demands, [pod(0, 8), pod(1, 8)])
    on_new = [demand for demand in settled if demand.current == ("gpu-1",)]
    assert len(on_new) == 5
    assert rounds >= 5


def test_pods_that_are_not_over_committed_are_left_uneven() -> None:
    demands = [ask(f"m{index}", 1, "gpu-0") for index in range(8)]
    assert not place(demands, POOL, [pod(0), pod(1)]).moves


MODELS = st.lists(
    st.tuples(st.integers(0, 12), st.booleans(), st.integers(1, 3), st.sampled_from([100, 500, 900])),
    min_size=1,
    max_size=14,
)
PODS = st.lists(st.tuples(st.integers(4, 16), st.sampled_from(["", "a", "b"])), min_size=1, max_size=4)
LIMITS = st.sampled_from([0.0, 1.0, 2.0])


def asked(models: list[tuple[int, bool, int, int]]) -> list[PodDemand]:
    return [
        ask(f"m{i}", gib, replicas=replicas, keep_resident=kept, priority=priority, created_seconds=i)
        for i, (gib, kept, replicas, priority) in enumerate(models)
    ]


def changed(before: list[PodDemand], result: Placement, but: str = "") -> list[str]:
    """Models whose pods differ."""
    return [
        d.model.key for d in before if set(result.pods.get(d.model.key, ())) != set(d.current) and d.model.name != but
    ]


@given(MODELS, PODS, LIMITS)
@settings(deadline=None, max_examples=60)
def test_no_limit_is_ever_broken_and_everyone_is_placed_or_refused(models, sizes, limit: float) -> None:
    pool = replace(POOL, overcommit_limit=limit)
    pods = [pod(i, gib, zone=zone) for i, (gib, zone) in enumerate(sizes)]
    demands = asked(models)
    for _ in range(4):
        result = place(demands, pool, pods)
        assert set(result.pods) | {finding.model for finding in result.refused} == {d.model.key for d in demands}
        assert not set(result.pods) & {finding.model for finding in result.refused}
        by_key = {d.model.key: d.model for d in demands}
        for supply in pods:
            there = [by_key[key] for key, names in result.pods.items() if supply.name in names]
            assert sum(m.footprint_bytes for m in there if m.keep_resident) <= supply.budget_bytes
            assert all(m.footprint_bytes <= supply.budget_bytes for m in there)
            if limit:
                assert sum(m.footprint_bytes for m in there) <= limit * supply.budget_bytes
        demands = after(demands, result)


@given(MODELS, PODS, LIMITS)
@settings(deadline=None, max_examples=60)
def test_what_has_settled_stays(models, sizes, limit: float) -> None:
    pods = [pod(i, gib, zone=zone) for i, (gib, zone) in enumerate(sizes)]
    pool = replace(POOL, overcommit_limit=limit)
    demands, _ = settle(asked(models), pods, pool)
    assert changed(demands, place(demands, pool, pods)) == []


@given(MODELS, PODS, st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_one_more_model_moves_no_more_than_a_move(models, sizes, gib: int) -> None:
    pods = [pod(i, size, zone=zone) for i, (size, zone) in enumerate(sizes)]
    demands, _ = settle(asked(models), pods)
    result = place([*demands, ask("new", gib, created_seconds=99)], POOL, pods)
    assert len(changed(demands, result)) <= MOVES


@given(MODELS, PODS, st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_a_lost_pod_moves_only_its_own_models(models, sizes, index: int) -> None:
    pods = [pod(i, size, zone=zone) for i, (size, zone) in enumerate(sizes)]
    demands, _ = settle(asked(models), pods)
    lost = pods[index % len(pods)]
    result = place(demands, POOL, [replace(p, lost=p == lost, ready=p != lost) for p in pods])
    elsewhere = [
        key
        for key in changed(demands, result)
        if lost.name not in next(d for d in demands if d.model.key == key).current
    ]
    refused_before = {d.model.key for d in demands if not d.current}
    assert len(set(elsewhere) - refused_before) <= MOVES


@given(MODELS, PODS, st.integers(0, 13), st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_a_size_that_changes_moves_that_model_and_no_more_than_a_move(models, sizes, index: int, gib: int) -> None:
    pods = [pod(i, size, zone=zone) for i, (size, zone) in enumerate(sizes)]
    demands, _ = settle(asked([(size, False, replicas, rank) for size, _, replicas, rank in models]), pods)
    at = index % len(demands)
    grown = replace(demands[at], model=replace(demands[at].model, footprint_bytes=gib * GIB))
    result = place([*demands[:at], grown, *demands[at + 1 :]], POOL, pods)
    assert len(changed(demands, result, but=grown.model.name)) <= MOVES
