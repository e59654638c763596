"""One round of the local controller as a decision: what the folder says and the agent reports -> desired processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnimodel.api import OmniModel, OmniPool, OmniProcess
from omnimodel.catalog import Catalog
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.decisions import demand_of, rendered
from omnimodel.errors import OmniError, Reason
from omnimodel.placement.affinity import divided, on_one_pod
from omnimodel.placement.assignment import Finding, ModelDemand, Plan, PoolSupply, plan, precedence

DEFAULT_POOL = "default"


@dataclass(frozen=True)
class Snapshot:
    """Everything a round decides from.

    Args:
        catalog: the last good version of every manifest.
        budgets: device budget in bytes by name of the pool; 0 or missing while it is unknown.
        footprints: measured footprints in bytes by `namespace/name@generation`.
        pool: the pool this machine was told to serve; empty for the only one, or `default`.
        memory: device budget that replaces the pool's own.
    """

    catalog: Catalog
    budgets: Mapping[str, int]
    footprints: Mapping[str, int]
    pool: str
    memory: int | str | None


@dataclass(frozen=True)
class Desired:
    """What there should be.

    Args:
        models, pools: all objects, with uid, generation and creation time.
        pool: the one this machine serves.
        processes: to be kept available.
        refused: model key -> why it has no process here.
        notes: model key -> (reason, sentence) of what to know beside that.
        plan: the placement, for `omni plan`.
        sizes: model key -> footprint in bytes that it was made with; 0 for unknown.
    """

    models: tuple[OmniModel, ...]
    pools: tuple[OmniPool, ...]
    pool: OmniPool
    processes: tuple[OmniProcess, ...]
    refused: Mapping[str, Refusal]
    notes: Mapping[str, Sequence[tuple[str, str]]]
    plan: Plan
    sizes: Mapping[str, int]

    @property
    def fingerprint(self) -> object:
        """Differs when there is something to apply."""
        processes = tuple((p.key, p.metadata.uid, p.metadata.generation, p.spec) for p in self.processes)
        return processes, self.pool.to_dict()["spec"], self.pool.metadata.name


def default_pool() -> OmniPool:
    """The pool of this machine when no manifest describes one: `auto` in everything (docs/memory.md says how much)."""
    pool = OmniPool.model_validate({"metadata": {"name": DEFAULT_POOL}, "spec": {}})
    return pool.with_metadata(generation=1)


def decide(snapshot: Snapshot) -> Desired:
    """Turn a snapshot into what there should be."""
    catalog = snapshot.catalog
    models = catalog.models
    pools = catalog.pools or (default_pool(),)
    chosen = _chosen(pools, snapshot.pool)
    pool = _with_memory(chosen, snapshot.memory)
    demands = [
        demand_of(model, snapshot.footprints.get(f"{model.key}@{model.metadata.generation}", 0)) for model in models
    ]
    placed = plan(demands, [_supply(pool, snapshot.budgets)])
    refused = {finding.model: Refusal(finding.reason, finding.problem, finding.cure) for finding in placed.refused}
    notes: dict[str, list[tuple[str, str]]] = {}
    for finding in (*placed.warnings, *_affinity(demands, placed)):
        notes.setdefault(finding.model, []).append((str(finding.reason), finding.message))
    for model in models:
        wished = model.spec.replicas
        if wished is not None and (wished.min or 1) > 1:
            sentence = f"replicas.min {wished.min} asks for as many pods, and one machine holds one copy of a model"
            notes.setdefault(model.key, []).append((str(Reason.TOO_FEW_PODS), sentence))
        named = catalog.pool_of(model)
        if named is not None and named.key != pool.key:
            refused[model.key] = other_pool(named.metadata.name, pool)

    processes = []
    for model in models:
        if model.key in refused:
            continue
        names = placed.served_names.get(model.key, ())
        found = rendered(model, pool, catalog.config(model.metadata.namespace), names, notes.get(model.key, ()))
        if isinstance(found, Refusal):
            refused[model.key] = found
        else:
            processes.append(found)
    sizes = {demand.key: demand.footprint_bytes for demand in demands}
    return Desired(models, pools, pool, tuple(processes), refused, notes, placed, sizes)


def _affinity(demands: Sequence[ModelDemand], placed: Plan) -> list[Finding]:
    """What of the models' affinity one machine does not keep; it refuses nobody for that, as replicas.min does not."""
    here = [demand for demand in sorted(demands, key=precedence) if demand.key in placed.assigned]
    elsewhere = divided(demands)
    return [*on_one_pod(here), *(finding for key, finding in elsewhere.items() if key in placed.assigned)]


def _chosen(pools: Sequence[OmniPool], name: str) -> OmniPool:
    """The pool this machine serves: the one it was told to, else the only one, else `default`, else the first."""
    by_name = {pool.metadata.name: pool for pool in pools}
    if name:
        if name not in by_name:
            raise OmniError(
                f"OmniPool {name}",
                "no manifest of the folder describes it",
                f"there are: {', '.join(sorted(by_name))}",
                reason=Reason.POOL_NOT_FOUND,
            )
        return by_name[name]
    return by_name.get(DEFAULT_POOL) or by_name[min(by_name)]


def _with_memory(pool: OmniPool, memory: int | str | None) -> OmniPool:
    """The pool with another device budget."""
    if memory is None:
        return pool
    body = pool.to_dict()
    body["spec"].setdefault("device", {})["memory"] = memory
    return OmniPool.model_validate(body)


def _supply(pool: OmniPool, budgets: Mapping[str, int]) -> PoolSupply:
    return PoolSupply(
        name=pool.metadata.name,
        budget_bytes=budgets.get(pool.metadata.name, 0),
        overcommit_limit=pool.spec.overcommit.limit if pool.spec.overcommit else 0.0,
    )


def other_pool(name: str, served: OmniPool) -> Refusal:
    """What to say of a pool that another system has to serve."""
    problem = f"pool {name} is not served here but {served.metadata.name} is"
    return Refusal(Reason.POOL_NOT_FOUND, problem, f"start another system with --pool {name}")
