"""Which model belongs into which pool, how far that over-commits it, and what can never be resident together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from omnimodel.errors import Reason, advised
from omnimodel.placement.state import bytes_text

EXCLUSIVE_SHOWN = 100  # sets of models that exclude each other; a catalogue of hundreds has too many to read


@dataclass(frozen=True)
class ModelDemand:
    """What one model asks for.

    Args:
        namespace, name: of the OmniModel.
        pool: name of the pool it asks for.
        footprint_bytes: on the device, weights and working memory; 0 while it is unknown.
        served_names: what clients may call it, its own name included.
        created_seconds: the oldest keeps a served name.
        keep_resident, priority, suspended: of the manifest.
        pod: where it is now; it stays there as long as it fits.
        together, apart: groups of its namespace (see `affinity`).
    """

    namespace: str
    name: str
    pool: str
    footprint_bytes: int
    served_names: tuple[str, ...] = ()
    created_seconds: float = 0.0
    keep_resident: bool = False
    priority: int = 500
    suspended: bool = False
    pod: str = ""
    together: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class PoolSupply:
    """What one pool offers: equal pods, each with the same budget.

    Args:
        budget_bytes: of the device of one pod; 0 while it is unknown, which refuses nothing.
        overcommit_limit: largest allowed sum of footprints / budget of one pod; 0 for no limit.
    """

    name: str
    budget_bytes: int
    overcommit_limit: float = 0.0
    pods: tuple[str, ...] = ("local",)


@dataclass(frozen=True)
class Finding:
    """Something to tell about a model: the reason of a condition, and its sentence.

    Args:
        model: its key.
        reason: of the condition.
        problem: what is wrong.
        cure: what to do about it; the usual one of the reason when it is None.
    """

    model: str
    reason: Reason
    problem: str
    cure: str | None = None

    @property
    def message(self) -> str:
        """What is wrong and what to do about it."""
        return advised(self.reason, self.problem, self.cure)


@dataclass(frozen=True)
class Exclusive:
    """Models that can never be resident together, though any fewer of them can."""

    models: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class PodPlan:
    """One pod with the models assigned to it.

    Args:
        models: keys, kept models first, then by age.
        footprint_bytes, kept_bytes: sums over them.
        overcommit_ratio: footprint / budget; 0 when the budget is unknown.
        together: the most models that can be resident at once.
        exclusive: smallest sets that cannot, the largest first; `exclusive_more`: there are more than listed.
    """

    pool: str
    pod: str
    budget_bytes: int
    models: tuple[str, ...]
    footprint_bytes: int
    kept_bytes: int
    overcommit_ratio: float
    together: int
    exclusive: tuple[Exclusive, ...] = ()
    exclusive_more: bool = False


@dataclass(frozen=True)
class Plan:
    """Where everything goes.

    Args:
        pods: of all pools, in the order given.
        assigned: model key -> (pool, pod).
        served_names: model key -> the names it may be called by.
        refused: models that are assigned nowhere.
        warnings: models that are assigned, with something to tell (a name taken, a size unknown).
    """

    pods: tuple[PodPlan, ...]
    assigned: dict[str, tuple[str, str]] = field(default_factory=dict)
    served_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()


def plan(models: Sequence[ModelDemand], pools: Sequence[PoolSupply]) -> Plan:
    """Assign every model to a pod of its pool, or say why not.

    Kept models come first, then the more important ones, then the older ones, so that a new model never pushes out one
    of its own rank that serves. A model goes to the pod it is on, else to the one with the most room.
    """
    served_names, warnings = grant_names(models)
    by_pool = {pool.name: pool for pool in pools}
    loads: dict[tuple[str, str], list[ModelDemand]] = {(pool.name, pod): [] for pool in pools for pod in pool.pods}
    assigned: dict[str, tuple[str, str]] = {}
    refused: list[Finding] = []
    for model in sorted(models, key=precedence):
        pool = by_pool.get(model.pool)
        if model.suspended:
            refused.append(Finding(model.key, Reason.SUSPENDED, "is suspended by its manifest (spec.suspend)"))
            continue
        if pool is None:
            known = ", ".join(sorted(by_pool)) or "none"
            message = f"asks for pool {model.pool}, which does not exist; pools: {known}"
            refused.append(Finding(model.key, Reason.POOL_NOT_FOUND, message))
            continue
        refusals: list[Finding] = []
        for pod in sorted(pool.pods, key=lambda name: (name != model.pod, _sum_bytes(loads[pool.name, name]))):
            refusal = refusal_of(model, pool, loads[pool.name, pod])
            if refusal is None:
                loads[pool.name, pod].append(model)
                assigned[model.key] = (pool.name, pod)
                break
            refusals.append(refusal)
        else:
            refused.append(refusals[0] if refusals else _no_pods(model, pool))
            continue
        if not model.footprint_bytes:
            message = "its size on the device is not known until it was published; it is not counted yet"
            warnings.append(Finding(model.key, Reason.SIZE_UNKNOWN, message))
    return Plan(
        pods=tuple(pod_plan(by_pool[name], pod, load) for (name, pod), load in loads.items()),
        assigned=assigned,
        served_names=served_names,
        refused=tuple(refused),
        warnings=tuple(warnings),
    )


def precedence(model: ModelDemand) -> tuple[bool, int, float, str]:
    """Who is placed first: kept models, then the more important, then the older."""
    return not model.keep_resident, -model.priority, *age(model)


def age(model: ModelDemand) -> tuple[float, str]:
    """Who was there first."""
    return model.created_seconds, model.key


def _sum_bytes(models: Sequence[ModelDemand]) -> int:
    return sum(model.footprint_bytes for model in models)


def grant_names(models: Iterable[ModelDemand]) -> tuple[dict[str, tuple[str, ...]], list[Finding]]:
    """Give each served name to the oldest model that asks for it; `namespace/name` is the model's own, however old."""
    oldest_first = sorted(models, key=age)
    owner = {model.key: model.key for model in oldest_first}
    granted: dict[str, tuple[str, ...]] = {}
    taken: list[Finding] = []
    for model in oldest_first:
        mine: list[str] = []
        for name in dict.fromkeys(model.served_names):
            if owner.setdefault(name, model.key) == model.key:
                mine.append(name)
            else:
                why = "whose full name it is" if owner[name] == name else "which is older"
                problem = f'served name "{name}" belongs to OmniModel {owner[name]}, {why}'
                taken.append(Finding(model.key, Reason.NAME_TAKEN, problem))
        granted[model.key] = tuple(mine)
    return granted, taken


def _no_pods(model: ModelDemand, pool: PoolSupply) -> Finding:
    return Finding(model.key, Reason.NO_PODS, f"pool {pool.name} has no pods")


def refusal_of(model: ModelDemand, pool: PoolSupply, load: Sequence[ModelDemand]) -> Finding | None:
    """Why a model cannot be assigned to a pod that has this load already; None if it can."""
    need, budget = model.footprint_bytes, pool.budget_bytes
    if not budget:
        return None
    if need > budget:
        message = f"needs {bytes_text(need)} on the device, but pool {pool.name} has {bytes_text(budget)}"
        return Finding(model.key, Reason.TOO_LARGE, message)
    kept = [other for other in load if other.keep_resident]
    left = budget - _sum_bytes(kept)
    if need > left:
        message = (
            f"needs {bytes_text(need)} on the device, but the models that are kept resident"
            f" ({', '.join(other.key for other in kept)}) leave {bytes_text(left)} of {bytes_text(budget)}"
        )
        return Finding(model.key, Reason.SHARES_WITH_KEPT, message)
    total = _sum_bytes(load) + need
    if pool.overcommit_limit and total > pool.overcommit_limit * budget:
        message = (
            f"would over-commit pool {pool.name} {total / budget:.2f}-fold ({bytes_text(total)} of"
            f" {bytes_text(budget)}); its overcommit.limit is {pool.overcommit_limit:g}"
        )
        return Finding(model.key, Reason.OVER_COMMIT_LIMIT, message)
    return None


def pod_plan(pool: PoolSupply, pod: str, load: Sequence[ModelDemand]) -> PodPlan:
    """What a pod of a pool is to hold, with these models assigned to it."""
    kept_bytes = _sum_bytes([model for model in load if model.keep_resident])
    exclusive, more = _exclusive(load, pool.budget_bytes, kept_bytes)
    footprint = _sum_bytes(load)
    return PodPlan(
        pool=pool.name,
        pod=pod,
        budget_bytes=pool.budget_bytes,
        models=tuple(model.key for model in load),
        footprint_bytes=footprint,
        kept_bytes=kept_bytes,
        overcommit_ratio=footprint / pool.budget_bytes if pool.budget_bytes else 0.0,
        together=_together(load, pool.budget_bytes),
        exclusive=exclusive,
        exclusive_more=more,
    )


def _together(load: Sequence[ModelDemand], budget_bytes: int) -> int:
    count = 0
    left = budget_bytes
    for model in sorted(load, key=lambda m: (not m.keep_resident, m.footprint_bytes)):
        left -= model.footprint_bytes
        if budget_bytes and left < 0:
            break
        count += 1
    return count


def _exclusive(load: Sequence[ModelDemand], budget_bytes: int, kept_bytes: int) -> tuple[tuple[Exclusive, ...], bool]:
    """Pairs, and triples without such a pair, that do not fit beside the kept models, the largest first."""
    left = budget_bytes - kept_bytes
    free = sorted((m for m in load if not m.keep_resident), key=lambda m: (-m.footprint_bytes, m.key))
    beside = f" that the kept models leave of {bytes_text(budget_bytes)}" if kept_bytes else " of the budget"
    found: list[Exclusive] = []
    for group in chain(_pairs(free, left), _triples(free, left)) if budget_bytes else ():
        if len(found) == EXCLUSIVE_SHOWN:
            return tuple(found), True
        message = f"together they need {bytes_text(_sum_bytes(group))}, more than the {bytes_text(left)}{beside}"
        found.append(Exclusive(tuple(model.key for model in group), message))
    return tuple(found), False


def _pairs(largest_first: Sequence[ModelDemand], left_bytes: int) -> Iterator[tuple[ModelDemand, ...]]:
    for index, first in enumerate(largest_first):
        for second in largest_first[index + 1 :]:
            if first.footprint_bytes + second.footprint_bytes <= left_bytes:
                break  # all that follow are smaller
            yield first, second


def _triples(largest_first: Sequence[ModelDemand], left_bytes: int) -> Iterator[tuple[ModelDemand, ...]]:
    for index, first in enumerate(largest_first):
        for at, second in enumerate(largest_first[index + 1 :], index + 1):
            pair_bytes = first.footprint_bytes + second.footprint_bytes
            if pair_bytes > left_bytes:
                continue  # they exclude each other already
            for third in largest_first[at + 1 :]:
                if pair_bytes + third.footprint_bytes <= left_bytes:
                    break
                yield first, second, third
