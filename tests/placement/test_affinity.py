"""Models that share pods and models that must not: what comes of each, who is refused, and that little moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnimodel.errors import Reason
from omnimodel.placement.affinity import apart_group, divided, on_one_pod, sets_together
from omnimodel.placement.assignment import ModelDemand
from omnimodel.placement.board import PodDemand, PodSupply
from omnimodel.placement.pods import MOVES, Placement, place
from placement.test_pods import POOL, after, ask, pod, reasons, settle, where

RAG: dict[str, Any] = {"together": ("rag",)}
LARGE: dict[str, Any] = {"apart": ("large",)}


def said(placement: Placement) -> dict[str, tuple[Reason, str]]:
    return {finding.model.removeprefix("default/"): (finding.reason, finding.problem) for finding in placement.refused}


def test_models_to_be_together_go_where_all_of_them_have_room() -> None:
    limited = replace(POOL, overcommit_limit=1.0)
    result = place([ask("a", 4, **RAG), ask("b", 4, **RAG), ask("c", 1)], limited, [pod(0, 6), pod(1, 8)])
    assert where(result) == {"a": ("gpu-1",), "b": ("gpu-1",), "c": ("gpu-0",)}


def test_a_model_follows_the_one_that_is_there() -> None:
    result = place([ask("b", 1, "gpu-1", **RAG), ask("a", 1, priority=900, **RAG)], POOL, [pod(0), pod(1)])
    assert where(result) == {"a": ("gpu-1",), "b": ("gpu-1",)}
    assert result.why["default/a"]["gpu-1"] == "it goes with default/b (group rag)"


def test_models_to_be_apart_get_a_pod_each() -> None:
    pods = [pod(0), pod(1), pod(2)]
    result = place([ask(name, 1, **LARGE) for name in "abc"], POOL, pods)
    assert where(result) == {"a": ("gpu-0",), "b": ("gpu-1",), "c": ("gpu-2",)}


def test_groups_of_two_namespaces_are_two_groups() -> None:
    other = replace(ask("b", 1, **LARGE, **RAG).model, namespace="search")
    result = place([ask("a", 1, **LARGE, **RAG), PodDemand(other)], POOL, [pod(0)])
    assert set(result.pods) == {"default/a", "search/b"}


def test_a_set_is_on_as_many_pods_as_the_model_that_asks_for_most() -> None:
    pods = [pod(0, zone="a"), pod(1, zone="a"), pod(2, zone="b")]
    result = place([ask("a", 1, **RAG), ask("b", 1, replicas=2, **RAG)], POOL, pods)
    assert where(result) == {"a": ("gpu-0", "gpu-2"), "b": ("gpu-0", "gpu-2")}
    short = place([ask("a", 1, **RAG), ask("b", 1, replicas=2, **RAG)], POOL, pods[:1])
    assert [finding.reason for finding in short.warnings] == [Reason.TOO_FEW_PODS]


def test_groups_with_a_model_in_common_are_one_set() -> None:
    models = [ask("a", together=("x",)).model, ask("b", together=("y",)).model, ask("c", together=("x", "y")).model]
    found = sets_together([*models, ask("d").model])
    assert sorted(sorted(model.name for model in members) for members in found) == [["a", "b", "c"], ["d"]]


B, A = "default/b", "default/a"
CONFLICTS: list[tuple[str, list[PodDemand], list[PodSupply], float, str]] = [
    (
        "more models than pods",
        [ask("a", 1, "gpu-0", **LARGE), ask("b", 1, **LARGE)], [pod(0)], 0,
        f"is to be apart from {A} (group large), which is on gpu-0",
    ),
    (
        "the pod of the other is too small",
        [ask("a", 1, "gpu-0", **RAG), ask("b", 8, **RAG)], [pod(0, 4), pod(1, 10, lost=True)], 0,
        (f"is to be together with {A} (group rag) on gpu-0, where it cannot be: it needs 8.00 GiB on the device, but"
         " pool gpu has 4.00 GiB"),
    ),
    (
        "no room left beside the other",
        [ask("a", 6, "gpu-0", **RAG), ask("b", 6, **RAG)], [pod(0), pod(1)], 1.0,
        (f"is to be together with {A} (group rag) on gpu-0, where it cannot be: it would over-commit pool gpu 1.20-fold"
         " (12.00 GiB of 10.00 GiB); its overcommit.limit is 1"),
    ),
    (
        "the pod of the other holds a model to be apart from",
        [ask("a", 1, "gpu-0", **RAG), ask("c", 1, "gpu-0", **LARGE), ask("b", 1, **RAG, **LARGE)], [pod(0)], 0,
        (f"is to be together with {A} (group rag) on gpu-0, where it cannot be: it is to be apart from default/c"
         " (group large), which is on gpu-0"),
    ),
    (
        "together by one group, apart by another",
        [ask("a", 1, **RAG, **LARGE), ask("b", 1, **RAG, **LARGE)], [pod(0), pod(1)], 0,
        (f"is to be together with {A} (group rag) on gpu-0, where it cannot be: it is to be apart from {A}"
         " (group large), which is on gpu-0"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("demands", "pods", "limit", "problem"), [c[1:] for c in CONFLICTS], ids=[c[0] for c in CONFLICTS]
)
def test_each_conflict_names_the_other_model_and_the_group(
    demands: list[PodDemand], pods: list[PodSupply], limit: float, problem: str
) -> None:
    result = place(demands, replace(POOL, overcommit_limit=limit), pods)
    assert said(result) == {"b": (Reason.AFFINITY_CONFLICT, problem)}
    assert A in result.pods


def test_a_model_too_large_for_every_pod_is_told_that_and_binds_nobody() -> None:
    result = place([ask("a", 20, priority=900, **RAG), ask("b", 1, **RAG)], POOL, [pod(0)])
    assert reasons(result) == {"a": Reason.TOO_LARGE}
    assert where(result) == {"b": ("gpu-0",)}


def test_nobody_is_driven_out_by_who_must_not_be_beside_it() -> None:
    result = place([ask("a", 1, "gpu-0", **LARGE), ask("b", 1, priority=900, **LARGE)], POOL, [pod(0)])
    assert where(result) == {"a": ("gpu-0",)}


def test_of_two_newcomers_the_more_important_gets_the_pod() -> None:
    result = place([ask("a", 1, **LARGE), ask("b", 1, priority=900, **LARGE)], POOL, [pod(0)])
    assert where(result) == {"b": ("gpu-0",)}


def test_put_together_by_an_edit_one_comes_to_the_other_before_it_leaves() -> None:
    pods = [pod(0), pod(1)]
    begun = place([ask("a", 1, "gpu-0", **RAG), ask("b", 1, "gpu-1", **RAG)], POOL, pods)
    assert where(begun) == {"a": ("gpu-0",), "b": ("gpu-0", "gpu-1")}
    waiting = replace(ask("b", 1, "gpu-0", "gpu-1", **RAG), serving=frozenset({"gpu-1"}))
    assert where(place([ask("a", 1, "gpu-0", **RAG), waiting], POOL, pods)) == where(begun)
    done = [ask("a", 1, "gpu-0", **RAG), ask("b", 1, "gpu-0", "gpu-1", **RAG)]
    assert where(place(done, POOL, pods)) == {"a": ("gpu-0",), "b": ("gpu-0",)}


def test_put_apart_by_an_edit_one_serves_until_it_does_elsewhere() -> None:
    pods = [pod(0), pod(1)]
    begun = place([ask("a", 1, "gpu-0", **LARGE), ask("b", 1, "gpu-0", **LARGE)], POOL, pods)
    assert where(begun) == {"a": ("gpu-0",), "b": ("gpu-0", "gpu-1")}
    done = [ask("a", 1, "gpu-0", **LARGE), ask("b", 1, "gpu-0", "gpu-1", **LARGE)]
    assert where(place(done, POOL, pods)) == {"a": ("gpu-0",), "b": ("gpu-1",)}


def test_nobody_comes_to_a_pod_before_who_must_not_be_beside_it_has_left() -> None:
    going = [ask("a", 1, "gpu-0", **LARGE)]
    pods = [pod(0, leaving=True), pod(1), pod(2, 0.5)]
    assert where(place([*going, ask("b", 1, **LARGE)], POOL, pods)) == {"a": ("gpu-0", "gpu-1")}
    refused = ask("a", 9, "gpu-1", **LARGE)  # serves on, though nothing is assigned
    small = [pod(1, 4)]
    assert reasons(place([refused, ask("b", 1, **LARGE)], POOL, small)) == {
        "a": Reason.TOO_LARGE,
        "b": Reason.AFFINITY_CONFLICT,
    }


def test_a_set_that_outgrows_its_pod_moves_as_one_and_serves_meanwhile() -> None:
    limited = replace(POOL, overcommit_limit=1.0)
    pods = [pod(0, 6), pod(1, 12)]
    demands = [ask("a", 3, "gpu-0", **RAG), ask("b", 3, "gpu-0", **RAG), ask("c", 3, **RAG)]
    begun = place(demands, limited, pods)
    assert where(begun) == {"a": ("gpu-0", "gpu-1"), "b": ("gpu-0", "gpu-1"), "c": ("gpu-1",)}
    half = [replace(d, serving=frozenset({"gpu-0"})) for d in after(demands, begun)[:2]]
    assert where(place([*half, replace(demands[2], current=("gpu-1",))], limited, pods)) == where(begun)
    settled, _ = settle(after(demands, begun), pods, limited)
    assert {d.current for d in settled} == {("gpu-1",)}


def test_a_set_leaves_a_pod_that_goes_as_one_and_a_lost_one_at_once() -> None:
    demands = [ask("a", 1, "gpu-0", **RAG), ask("b", 1, "gpu-0", **RAG)]
    leaving = place(demands, POOL, [pod(0, leaving=True), pod(1), pod(2)])
    assert where(leaving) == {"a": ("gpu-0", "gpu-1"), "b": ("gpu-0", "gpu-1")}
    waiting = replace(ask("b", 1, "gpu-0", "gpu-1", **RAG), serving=frozenset({"gpu-0"}))
    one_serves = [ask("a", 1, "gpu-0", "gpu-1", **RAG), waiting]
    assert where(place(one_serves, POOL, [pod(0, leaving=True), pod(1), pod(2)])) == where(leaving)
    lost = place(demands, POOL, [pod(0, lost=True, ready=False), pod(1), pod(2)])
    assert where(lost) == {"a": ("gpu-1",), "b": ("gpu-1",)}


def test_a_set_moves_for_evenness_as_one() -> None:
    demands = [ask(name, 2, "gpu-0", **(RAG if name in "cd" else {})) for name in "abcdef"]
    begun = place(demands, POOL, [pod(0, 8), pod(1, 8)])
    assert {move.model for move in begun.moves} == {"default/c", "default/d"}
    assert where(begun)["c"] == where(begun)["d"] == ("gpu-0", "gpu-1")


def test_a_set_is_displaced_as_one() -> None:
    limited = replace(POOL, overcommit_limit=1.0)
    held = [ask("a", 3, "gpu-0", priority=100, **RAG), ask("b", 3, "gpu-0", priority=100, **RAG)]
    high = ask("high", 8, priority=900)
    assert where(place([*held, high], limited, [pod(0), pod(1, 6)])) == {
        "high": ("gpu-0",), "a": ("gpu-1",), "b": ("gpu-1",)
    }  # fmt: skip
    alone = place([*held, high], limited, [pod(0)])
    assert where(alone) == {"high": ("gpu-0",)}
    assert reasons(alone) == {"a": Reason.OVER_COMMIT_LIMIT, "b": Reason.OVER_COMMIT_LIMIT}


def test_what_is_left_of_a_set_is_displaced_although_it_had_its_turn_before() -> None:
    limited = replace(POOL, overcommit_limit=1.0)
    demands = [
        ask("a", 1, "gpu-0", priority=600, **LARGE),
        ask("b", 1, priority=550, **RAG, **LARGE),  # goes before c, and must not be beside a
        ask("rest", 9, priority=100, **RAG),
        ask("c", 1, priority=500),
    ]
    result = place(demands, limited, [pod(0)])
    assert where(result) == {"a": ("gpu-0",), "c": ("gpu-0",)}
    assert reasons(result) == {"b": Reason.AFFINITY_CONFLICT, "rest": Reason.OVER_COMMIT_LIMIT}
    room = place(demands, limited, [pod(0), pod(1, 9)])
    assert where(room) == {"a": ("gpu-0",), "b": ("gpu-1",), "c": ("gpu-0",)}


def test_the_reason_says_how_much_a_pod_had() -> None:
    result = place([ask("a", 4), ask("b", 2)], POOL, [pod(0), pod(1)])
    assert result.why["default/b"]["gpu-1"] == "gpu-1 had the most room (0 bytes assigned)"


def test_a_group_of_two_pools_belongs_to_that_of_its_oldest_model() -> None:
    old = ask("a", created_seconds=1, **RAG).model
    new = replace(ask("b", created_seconds=2, **RAG).model, pool="cpu")
    assert {key: finding.problem for key, finding in divided([new, old]).items()} == {
        B: f"is to be together with {A} (group rag), which is older and asks for pool gpu, not cpu"
    }
    assert not divided([new, replace(old, suspended=True)])
    assert not divided([replace(new, namespace="search"), old])


def test_on_one_machine_models_to_be_apart_are_told_that_they_take_turns() -> None:
    models = [ask("a", **LARGE).model, ask("c").model, ask("b", **LARGE).model]
    (finding,) = on_one_pod(models)
    assert (finding.model, finding.reason) == (B, Reason.AFFINITY_CONFLICT)
    assert "apart from default/a (group large), and one machine is one pod" in finding.message


def test_a_set_that_a_kept_model_has_driven_out_leaves_the_old_pod_though_one_of_it_has_no_place_at_all() -> None:
    together = {"together": ("t",)}
    models = [
        ask("a", 0, created_seconds=5, apart=("x",), **together),
        ask("nowhere", 0, created_seconds=6, apart=("x",), **together),
        ask("kept", 0, created_seconds=7, keep_resident=True, **together),
        ask("b", 1, created_seconds=8, **together),
        ask("large", 5, created_seconds=9, keep_resident=True),
    ]
    demands, _ = settle(models, [pod(0, 5), pod(1, 4)])
    found = {demand.model.name: demand.current for demand in demands}
    assert found == {"a": ("gpu-1",), "nowhere": (), "kept": ("gpu-1",), "b": ("gpu-1",), "large": ("gpu-0",)}


GROUPS = st.sampled_from([(), (), ("x",), ("y",), ("x", "y")])
MODELS = st.lists(
    st.tuples(st.integers(0, 8), st.booleans(), st.integers(1, 2), st.sampled_from([100, 500, 900]), GROUPS, GROUPS),
    min_size=1,
    max_size=10,
)
PODS = st.lists(st.tuples(st.integers(4, 16), st.sampled_from(["", "a", "b"])), min_size=1, max_size=4)
LIMITS = st.sampled_from([0.0, 1.0, 2.0])
EXAMPLES = 150


def asked(models: list[tuple[Any, ...]]) -> list[PodDemand]:
    return [
        ask(f"m{i}", gib, replicas=count, keep_resident=kept, priority=rank, created_seconds=i,
            together=tuple(f"t{g}" for g in together), apart=apart)
        for i, (gib, kept, count, rank, together, apart) in enumerate(models)
    ]  # fmt: skip


def supplied(sizes: list[tuple[int, str]]) -> list[PodSupply]:
    return [pod(i, gib, zone=zone) for i, (gib, zone) in enumerate(sizes)]


def beside(demands: list[PodDemand], placed: dict[str, tuple[str, ...]]) -> set[tuple[str, str, str]]:
    """Two models of one group to be apart, and the pod that both are on."""
    return {
        (one.model.key, other.model.key, name)
        for one, other in combinations(demands, 2)
        if apart_group(one.model, other.model)
        for name in set(placed.get(one.model.key, ())) & set(placed.get(other.model.key, ()))
    }


def torn(demands: list[PodDemand], placed: dict[str, tuple[str, ...]]) -> list[list[ModelDemand]]:
    """Sets that are to be together whose placed models are not all on the same pods."""
    sets = sets_together(demand.model for demand in demands)
    return [members for members in sets if len({placed[m.key] for m in members if m.key in placed}) > 1]


def disturbed(demands: list[PodDemand], result: Placement) -> list[list[ModelDemand]]:
    """Sets, and models alone, that have other pods than before although they had all that they asked for."""
    before = {demand.model.key: demand for demand in demands}

    def other_pods(members: list[ModelDemand]) -> bool:
        wanted = max(before[model.key].replicas for model in members)
        had = [set(before[model.key].current) for model in members]
        now = [set(result.pods.get(model.key, ())) for model in members]
        lost = any(pods - later for pods, later in zip(had, now, strict=True))
        return had != now and (lost or all(len(pods) >= wanted for pods in had))

    return [members for members in sets_together(demand.model for demand in demands) if other_pods(members)]


@given(MODELS, PODS, LIMITS)
@settings(deadline=None, max_examples=EXAMPLES)
def test_from_nothing_groups_hold_and_no_limit_is_broken(models, sizes, limit: float) -> None:
    pool, pods, demands = replace(POOL, overcommit_limit=limit), supplied(sizes), asked(models)
    for _ in range(5):
        result = place(demands, pool, pods)
        assert not beside(demands, dict(result.pods))
        # Beside a model that is kept resident, its bytes may be another's before all of its set serve elsewhere.
        assert not torn(demands, dict(result.pods)) or any(demand.model.keep_resident for demand in demands)
        assert {*result.pods, *(finding.model for finding in result.refused)} == {d.model.key for d in demands}
        assert len(result.pods) + len(result.refused) == len(demands)
        if limit:
            for supply in pods:
                assert result.footprint_bytes[supply.name] <= limit * supply.budget_bytes
        demands = after(demands, result)
    demands, _ = settle(demands, pods, pool)
    assert not torn(demands, {demand.model.key: demand.current for demand in demands if demand.current})
    assert all(len(demand.current) <= max(d.replicas for d in demands) for demand in demands)
    assert after(demands, place(demands, pool, pods)) == demands


@given(MODELS, MODELS, PODS, LIMITS)
@settings(deadline=None, max_examples=EXAMPLES)
def test_after_an_edit_nobody_stops_serving_who_has_a_place_and_groups_hold_in_the_end(
    before, edits, sizes, limit: float
) -> None:
    pool, pods = replace(POOL, overcommit_limit=limit), supplied(sizes)
    demands, _ = settle(asked(before), pods, pool)
    new = {demand.model.key: demand.model for demand in asked(edits)}
    demands = [
        replace(d, model=replace(d.model, together=new[d.model.key].together, apart=new[d.model.key].apart))
        if d.model.key in new
        else d
        for d in demands
    ]
    for _ in range(20):
        result = place(demands, pool, pods)
        placed = dict(result.pods)
        assert beside(demands, placed) <= beside(demands, {d.model.key: d.current for d in demands})
        # Under a limit, or beside a model that is kept resident, its bytes may be another's before it has left.
        if not limit and not any(demand.model.keep_resident for demand in demands):
            for demand in demands:
                if demand.current and demand.model.key in placed:
                    assert set(placed[demand.model.key]) & demand.serving
        demands = after(demands, result)
    demands, _ = settle(demands, pods, pool)
    placed = {d.model.key: d.current for d in demands if d.current}
    assert not beside(demands, placed)
    assert not torn(demands, placed)


@given(MODELS, PODS, st.tuples(st.integers(0, 8), GROUPS, GROUPS))
@settings(deadline=None, max_examples=EXAMPLES)
def test_one_more_model_moves_its_own_set_and_no_more_than_a_move(models, sizes, fresh) -> None:
    pods = supplied(sizes)
    demands, _ = settle(asked(models), pods)
    gib, together, apart = fresh
    new = ask("new", gib, created_seconds=99, together=tuple(f"t{g}" for g in together), apart=apart)
    sets = disturbed([*demands, new], place([*demands, new], POOL, pods))
    assert len([members for members in sets if new.model not in members]) <= MOVES


@given(MODELS, PODS, st.integers(0, 3))
@settings(deadline=None, max_examples=EXAMPLES)
def test_a_lost_pod_moves_only_sets_that_were_on_it(models, sizes, index: int) -> None:
    pods = supplied(sizes)
    demands, _ = settle(asked(models), pods)
    lost = pods[index % len(pods)]
    result = place(demands, POOL, [replace(p, lost=p == lost, ready=p != lost) for p in pods])
    current = {demand.model.key: demand.current for demand in demands}
    elsewhere = [s for s in disturbed(demands, result) if all(lost.name not in current[m.key] for m in s)]
    assert len(elsewhere) <= MOVES
