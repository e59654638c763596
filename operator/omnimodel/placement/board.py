"""The board on which a pool's models are placed: pods with what they hold, and models that move as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from omnimodel.placement.affinity import exclusion, sets_together, together_group
from omnimodel.placement.assignment import Finding, ModelDemand, PoolSupply, precedence, refusal_of

WAS_THERE = "it was there already"  # why a model is on a pod: it was put there for a reason that was told then


@dataclass(frozen=True)
class PodSupply:
    """One pod.

    Args:
        name: stable over restarts.
        zone: empty when unknown.
        budget_bytes: of its device; 0 while unknown, which refuses nothing.
        ready: its agent serves.
        lost: its agent has been silent for so long that its models should go elsewhere.
        leaving: it will be removed.
        images: publish hashes of the images in its store.
    """

    name: str
    zone: str = ""
    budget_bytes: int = 0
    ready: bool = True
    lost: bool = False
    leaving: bool = False
    images: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PodDemand:
    """One model that asks for pods.

    Args:
        model: what it is.
        replicas: pods that should hold it.
        current: pods that hold it now.
        serving: pods that serve it, or can wake it.
        image: publish hash of its image; empty when unknown.
        refusal: why it can have no pod of this pool at all; None when it can.
    """

    model: ModelDemand
    replicas: int = 1
    current: tuple[str, ...] = ()
    serving: frozenset[str] = frozenset()
    image: str = ""
    refusal: Finding | None = None


class Unit:
    """Models that go to the same pods: a set that is to be together, or one model.

    Args:
        demands: in the order in which they get what room there is.
    """

    def __init__(self, demands: Sequence[PodDemand]) -> None:
        self.demands = tuple(demands)
        self.models = [demand.model for demand in demands]
        self.keys = frozenset(model.key for model in self.models)
        self.footprint_bytes = sum(model.footprint_bytes for model in self.models)
        self.images = [demand.image for demand in demands]
        self.bound = any(model.together or model.apart for model in self.models)

    @property
    def first(self) -> ModelDemand:
        """Who speaks for it."""
        return self.models[0]

    @cached_property
    def wanted(self) -> int:
        """Pods that it needs: as many as the model that asks for most."""
        return max(1, *(demand.replicas for demand in self.demands))

    @cached_property
    def precedence(self) -> tuple[bool, int, float, str]:
        """Of its first model: who has a stake in a pod comes first within a unit, the most important among all."""
        return min(precedence(model) for model in self.models)

    @cached_property
    def current(self) -> tuple[str, ...]:
        """Pods that hold most of its models."""
        if len(self.demands) == 1:
            return self.demands[0].current
        held = Counter(demand.current for demand in self.demands if demand.current)
        return held.most_common(1)[0][0] if held else ()

    @cached_property
    def serving(self) -> frozenset[str]:
        """Pods that serve all of its models."""
        return frozenset.intersection(*(demand.serving for demand in self.demands))

    def only(self, keys: Collection[str]) -> Unit:
        """The part of it with these models."""
        return Unit([demand for demand in self.demands if demand.model.key in keys])


def units_of(demands: Sequence[PodDemand]) -> list[Unit]:
    """The units of a pool's models, the most important first."""
    by_key = {demand.model.key: demand for demand in demands}
    order = sorted((demand.model for demand in demands), key=precedence)
    units = []
    for models in sets_together(order):
        members = sorted((by_key[model.key] for model in models), key=lambda demand: precedence(demand.model))
        pods = set(Unit(members).current)
        units.append(Unit(sorted(members, key=lambda demand: pods.isdisjoint(demand.current))))
    return sorted(units, key=lambda unit: unit.precedence)


class Board:
    """The placement while it is being made."""

    def __init__(self, pool: PoolSupply, pods: Sequence[PodSupply], demands: Sequence[PodDemand]) -> None:
        self.pool = pool
        self.pods = {pod.name: pod for pod in pods}
        self.loads: dict[str, list[ModelDemand]] = {pod.name: [] for pod in pods}
        self.units: dict[str, list[Unit]] = {pod.name: [] for pod in pods}
        self.bytes: dict[str, int] = dict.fromkeys(self.loads, 0)
        self.displaced: list[Unit] = []  # by who had its turn last
        self.chosen: dict[str, list[str]] = {}
        self.why: dict[str, dict[str, str]] = {}
        self.guarded: dict[str, list[ModelDemand]] = {pod.name: [] for pod in pods}
        for demand in demands:
            for name in demand.serving.intersection(demand.current, self.pods) if demand.model.apart else ():
                self.guarded[name].append(demand.model)

    def fits(self, model: ModelDemand, pod: PodSupply, load: Sequence[ModelDemand]) -> Finding | None:
        """Why a model finds no room beside these; None when it does."""
        return refusal_of(model, replace(self.pool, budget_bytes=pod.budget_bytes, pods=(pod.name,)), load)

    def refusals(self, unit: Unit, pod: PodSupply, load: Sequence[ModelDemand] | None = None) -> dict[str, Finding]:
        """Why models of a unit cannot be on a pod with what it has (or another load); empty when all can."""
        taken = list(self.loads[pod.name] if load is None else load)
        found: dict[str, Finding] = {}
        for demand in unit.demands:
            model = demand.model
            # Who goes from a pod may serve there until it does elsewhere; nobody comes to meet it.
            there = taken if pod.name in demand.current else [*taken, *self.guarded[pod.name]]
            finding = exclusion(model, pod.name, there) or self.fits(model, pod, taken)
            if finding is None:
                taken.append(model)
            else:
                found[model.key] = finding
        return found

    def placed(self, unit: Unit) -> list[str]:
        """Pods of a unit."""
        return self.chosen.get(unit.first.key, [])

    def put(self, unit: Unit, pod: PodSupply, why: str) -> None:
        """A unit gets a pod."""
        self.units[pod.name].append(unit)
        for demand in unit.demands:
            new = why == WAS_THERE and pod.name not in demand.current
            self.hold(demand.model, pod, _beside(unit, demand.model) if new else why)

    def hold(self, model: ModelDemand, pod: PodSupply, why: str) -> None:
        """One model is on a pod, whoever else of its unit is."""
        self.chosen.setdefault(model.key, []).append(pod.name)
        self.why.setdefault(model.key, {})[pod.name] = why
        self.loads[pod.name].append(model)
        self.bytes[pod.name] += model.footprint_bytes

    def take(self, unit: Unit, pod: PodSupply) -> None:
        """A unit gives a pod up."""
        self.units[pod.name].remove(unit)
        for model in unit.models:
            self.chosen[model.key].remove(pod.name)
            del self.why[model.key][pod.name]
            self.loads[pod.name].remove(model)
        self.bytes[pod.name] -= unit.footprint_bytes


def _beside(unit: Unit, model: ModelDemand) -> str:
    others = [other for other in unit.models if other is not model]
    if not others:
        return "it goes where its group was"
    other, group = together_group(model, others)
    return f"it goes with {other.key} (group {group})"
