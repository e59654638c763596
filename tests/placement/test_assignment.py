"""Which model belongs into which pool, and what is said about those that cannot."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from omnimodel.errors import Reason
from omnimodel.placement.assignment import EXCLUSIVE_SHOWN, ModelDemand, PoolSupply, plan

GIB = 1 << 30
POOL = PoolSupply("default", 10 * GIB)


def model(name: str, gib: float, **more: object) -> ModelDemand:
    demand = ModelDemand("default", name, "default", int(gib * GIB), (name,))
    return replace(demand, **more)


def refusals(*models: ModelDemand, pool: PoolSupply = POOL) -> dict[str, tuple[Reason, str]]:
    return {finding.model: (finding.reason, finding.problem) for finding in plan(models, [pool]).refused}


def test_everything_is_assigned_and_the_ratio_says_how_far_that_over_commits() -> None:
    result = plan([model("a", 6), model("b", 6), model("c", 8)], [POOL])

    assert result.assigned == {f"default/{name}": ("default", "local") for name in "abc"}
    assert result.pods[0].overcommit_ratio == 2.0
    assert result.pods[0].footprint_bytes == 20 * GIB
    assert not result.refused


def test_a_model_larger_than_the_budget_is_told_both_numbers() -> None:
    assert refusals(model("a", 12)) == {
        "default/a": (Reason.TOO_LARGE, "needs 12.00 GiB on the device, but pool default has 10.00 GiB")
    }


def test_a_model_that_shares_the_device_only_with_kept_models_is_told_so() -> None:
    found = refusals(model("a", 6, keep_resident=True, created_seconds=9), model("b", 5))

    assert found["default/b"] == (
        Reason.SHARES_WITH_KEPT,
        "needs 5.00 GiB on the device, but the models that are kept resident (default/a) leave 4.00 GiB of 10.00 GiB",
    )


def test_two_kept_models_over_the_budget_the_more_important_stays() -> None:
    found = refusals(model("a", 6, keep_resident=True), model("b", 6, keep_resident=True, priority=900))

    assert set(found) == {"default/a"}


def test_over_the_limit_the_youngest_is_refused() -> None:
    pool = replace(POOL, overcommit_limit=1.5)
    found = refusals(
        model("a", 6, created_seconds=3), model("b", 6, created_seconds=1), model("c", 3, created_seconds=2), pool=pool
    )

    assert found == {}
    found = refusals(
        model("a", 7, created_seconds=3), model("b", 6, created_seconds=1), model("c", 3, created_seconds=2), pool=pool
    )
    assert found == {
        "default/a": (
            Reason.OVER_COMMIT_LIMIT,
            "would over-commit pool default 1.60-fold (16.00 GiB of 10.00 GiB); its overcommit.limit is 1.5",
        )
    }


def test_a_missing_pool_is_named_with_those_that_exist() -> None:
    assert refusals(model("a", 1, pool="gpu"))["default/a"] == (
        Reason.POOL_NOT_FOUND,
        "asks for pool gpu, which does not exist; pools: default",
    )


def test_a_suspended_model_holds_nothing() -> None:
    result = plan([model("a", 6, suspended=True), model("b", 6)], [POOL])

    assert result.pods[0].models == ("default/b",)
    assert result.refused[0].reason is Reason.SUSPENDED


def test_an_unknown_size_is_assigned_and_said_to_be_unknown() -> None:
    result = plan([model("a", 0)], [POOL])

    assert "default/a" in result.assigned
    assert [finding.reason for finding in result.warnings] == [Reason.SIZE_UNKNOWN]


def test_the_oldest_keeps_a_served_name() -> None:
    result = plan(
        [
            model("young", 1, served_names=("young", "gpt"), created_seconds=5),
            model("old", 1, served_names=("old", "gpt"), created_seconds=1),
        ],
        [POOL],
    )

    assert result.served_names == {"default/old": ("old", "gpt"), "default/young": ("young",)}
    (finding,) = result.warnings
    assert (finding.model, finding.reason) == ("default/young", Reason.NAME_TAKEN)
    assert finding.message == 'served name "gpt" belongs to OmniModel default/old, which is older; choose another name'


def test_models_that_can_never_be_resident_together_are_listed() -> None:
    result = plan([model("a", 7), model("b", 6), model("c", 3.5), model("d", 2)], [POOL])

    assert [exclusive.models for exclusive in result.pods[0].exclusive] == [
        ("default/a", "default/b"),
        ("default/a", "default/c"),
        ("default/b", "default/c", "default/d"),
    ]
    assert result.pods[0].exclusive[0].message == "together they need 13.00 GiB, more than the 10.00 GiB of the budget"
    assert result.pods[0].together == 2


def test_kept_models_take_their_part_of_the_room_that_others_share() -> None:
    result = plan([model("k", 4, keep_resident=True), model("a", 4), model("b", 3)], [POOL])

    (exclusive,) = result.pods[0].exclusive
    assert exclusive.models == ("default/a", "default/b")
    assert (
        exclusive.message
        == "together they need 7.00 GiB, more than the 6.00 GiB that the kept models leave of 10.00 GiB"
    )


def test_a_catalogue_of_hundreds_lists_a_readable_part() -> None:
    pod = plan([model(f"m{i}", 6) for i in range(300)], [POOL]).pods[0]

    assert len(pod.exclusive) == EXCLUSIVE_SHOWN
    assert pod.exclusive_more


def test_models_spread_over_pods_and_stay_where_they_are() -> None:
    pool = PoolSupply("default", 10 * GIB, pods=("p-0", "p-1"))
    first = plan([model("a", 6), model("b", 6)], [pool])
    assert {pod for _, pod in first.assigned.values()} == {"p-0", "p-1"}

    again = plan([model("a", 6, pod="p-1"), model("b", 6, pod="p-1"), model("c", 6)], [pool])
    assert again.assigned["default/a"] == again.assigned["default/b"] == ("default", "p-1")
    assert again.assigned["default/c"] == ("default", "p-0")


def test_no_model_is_placed_on_a_full_pod_while_another_is_idle() -> None:
    """modelmesh-serving#389: models were loaded onto a full device while others idled."""
    pool = PoolSupply("default", 10 * GIB, overcommit_limit=1.0, pods=("p-0", "p-1"))
    result = plan([model("a", 9, pod="p-0"), model("b", 5, pod="p-0")], [pool])

    assert result.assigned == {"default/a": ("default", "p-0"), "default/b": ("default", "p-1")}


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 3)), max_size=12),
    st.sampled_from([0.0, 1.0, 2.0]),
)
@settings(deadline=None)
def test_each_model_is_assigned_or_refused_and_no_limit_is_broken(demands, limit: float) -> None:
    models = [
        model(f"m{i}", gib, keep_resident=kept, created_seconds=age) for i, (gib, kept, age) in enumerate(demands)
    ]
    result = plan(models, [replace(POOL, overcommit_limit=limit)])

    assert sorted([*result.assigned, *(finding.model for finding in result.refused)]) == sorted(m.key for m in models)
    (pod,) = result.pods
    assert pod.kept_bytes <= POOL.budget_bytes
    if limit:
        assert pod.overcommit_ratio <= limit
    footprint = {m.key: m.footprint_bytes for m in models}
    for exclusive in pod.exclusive:
        needs = sorted(footprint[name] for name in exclusive.models)
        assert sum(needs) > POOL.budget_bytes - pod.kept_bytes
        assert sum(needs[1:]) <= POOL.budget_bytes - pod.kept_bytes or len(needs) == 2


def test_the_full_name_of_a_model_is_its_own_however_old_others_are() -> None:
    older = model("a", 1, created_seconds=1.0, served_names=("a", "default/b", "free"))
    younger = model("b", 1, created_seconds=2.0)
    result = plan([older, younger], [POOL])
    assert result.served_names == {"default/a": ("a", "free"), "default/b": ("b",)}
    assert [finding.problem for finding in result.warnings if finding.reason is Reason.NAME_TAKEN] == [
        'served name "default/b" belongs to OmniModel default/b, whose full name it is'
    ]
