"""A pool's round of the operator as a decision: where its models go, and what its children are. Pure.

It can be run again at any time, after any crash, with the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omnimodel.api import OmniModel, OmniPool
from omnimodel.controllers.conditions import Refusal, condition_list
from omnimodel.controllers.decisions import demand_of
from omnimodel.controllers.kubernetes_children import AgentSettings, Child, build_children, replicas_of, selector_of
from omnimodel.controllers.kubernetes_pods import PodView, is_by, is_steady, problem_of, problems_of, supply_of
from omnimodel.controllers.pool_status import pool_report, pool_status
from omnimodel.placement.assignment import Finding, PoolSupply
from omnimodel.placement.board import PodDemand
from omnimodel.placement.pods import Placement, place

Status = dict[str, Any]


@dataclass(frozen=True)
class ModelView:
    """A model as a pool sees it.

    Args:
        model: as it was written.
        status: its status.
        process: its OmniProcess; None when it has none.
    """

    model: OmniModel
    status: Mapping[str, Any]
    process: Mapping[str, Any] | None


@dataclass(frozen=True)
class PoolSnapshot:
    """Everything that a pool's round decides from.

    Args:
        pool: as it was written.
        status: its status.
        models: that mean this pool.
        pods: that there are, and those that there will be.
        live_replicas: of the StatefulSet; None when there is none.
        hurry: pods that go are not waited for any longer.
        fault: why the children cannot be made; None when they can.
        missing: what its sources refer to and is not there; None when nothing is known to be missing.
        divided: models that are to be together with one of another pool, by their keys.
        now_seconds, unix_seconds: the monotonic clock, and the time of day.
    """

    pool: OmniPool
    status: Mapping[str, Any]
    models: Sequence[ModelView]
    pods: Sequence[PodView]
    live_replicas: int | None
    hurry: bool
    fault: Refusal | None
    missing: Refusal | None
    divided: Mapping[str, Finding]
    now_seconds: float
    unix_seconds: float


@dataclass(frozen=True)
class PoolDecision:
    """What a pool should have.

    Args:
        children: in the order in which they are made.
        placement: of its models.
        status: without the entries of pods, which are the agents'.
        waiting: what models without a report wait for while no pod answers; None when one does.
        away: pods that do not answer, and why.
    """

    children: tuple[Child, ...]
    placement: Placement
    status: Status
    waiting: Refusal | None
    away: Mapping[str, Refusal]


def decide_pool(snapshot: PoolSnapshot, settings: AgentSettings) -> PoolDecision:
    """What a pool should have, where its models go, and what to say of it."""
    pool, now = snapshot.pool, snapshot.now_seconds
    replicas = replicas_of(pool)
    steady = is_steady(snapshot.pods, now)
    supplies = [supply_of(pod, replicas, now, steady=steady) for pod in snapshot.pods]
    serving = {pod.name: pod.uid for pod in snapshot.pods if pod.answers(now)}
    limit = pool.spec.overcommit.limit if pool.spec.overcommit else 0.0
    supply = PoolSupply(pool.metadata.name, 0, limit, tuple(pod.name for pod in supplies))
    demands = [_demand(view, serving, snapshot.divided.get(view.model.key)) for view in snapshot.models]
    placement = place(demands, supply, supplies)
    needed = {name for pods in placement.pods.values() for name in pods}
    keep = replicas
    if not snapshot.hurry:
        last = max((pod.index for pod in snapshot.pods if pod.name in needed), default=-1) + 1
        keep = max(replicas, min(last, snapshot.live_replicas or 0))
    problem = problems_of([pod for pod in snapshot.pods if pod.index < replicas], now)
    return PoolDecision(
        children=build_children(pool, settings, keep),
        placement=placement,
        status=_pool_status(snapshot, placement, replicas, serving, problem),
        waiting=_waiting(pool, serving, problem, snapshot.fault),
        away={pod.name: _why_away(pod, now) for pod in snapshot.pods if pod.name not in serving},
    )


def _why_away(pod: PodView, now_seconds: float) -> Refusal:
    problem = problem_of(pod, now_seconds)
    if problem is not None:
        return problem[0]
    return Refusal("Pending", f"{pod.name} is being replaced" if pod.ending else f"it waits for {pod.name} to answer")


def _demand(view: ModelView, serving: Mapping[str, str], refusal: Finding | None) -> PodDemand:
    model, process = view.model, view.process
    spec: Mapping[str, Any] = (process or {}).get("spec") or {}
    same = spec.get("pool") == model.spec.pool and (spec.get("model") or {}).get("uid") == model.metadata.uid
    entries = view.status.get("residency") or ()
    footprint: Mapping[str, int] = view.status.get("footprint") or {}
    working = int(footprint.get("workingBytes", 0))  # weights alone are known before, and are not the whole
    measured = int(footprint.get("weightsBytes", 0)) + working if working else 0
    replicas = model.spec.replicas.min if model.spec.replicas else None
    return PodDemand(
        model=demand_of(model, measured),
        replicas=1 if replicas is None else max(1, replicas),
        current=tuple(spec.get("pods") or ()) if same else (),
        serving=frozenset(
            e["pod"] for e in entries if e.get("ready") and e["pod"] in serving and is_by(e, serving[e["pod"]])
        ),
        image=str(spec.get("publishHash", "")) if same else "",
        refusal=refusal,
    )


def _waiting(
    pool: OmniPool, serving: Collection[str], problem: tuple[Refusal, bool] | None, fault: Refusal | None
) -> Refusal | None:
    if serving:
        return None
    if fault is not None:
        return replace(fault, problem=f"pool {pool.metadata.name}: {fault.problem}")
    if problem is not None:
        return replace(problem[0], problem=f"pool {pool.metadata.name} does not serve: {problem[0].problem}")
    return Refusal("Pending", f"it waits for a pod of pool {pool.metadata.name} to answer")


def _pool_status(
    snapshot: PoolSnapshot,
    placement: Placement,
    replicas: int,
    serving: Collection[str],
    problem: tuple[Refusal, bool] | None,
) -> Status:
    pool = snapshot.pool
    wanted = [pod for pod in snapshot.pods if pod.index < replicas]
    ready = sum(pod.ready and pod.name in serving and bool(pod.entry.get("ready", True)) for pod in wanted)
    busy = [pod.name for pod in wanted if pod.name in serving and not pod.ready]
    entries = [pod.entry for pod in snapshot.pods if pod.entry and not pod.gone(snapshot.now_seconds)]
    report = pool_report(pool.metadata.name, entries)
    status = pool_status(
        generation=pool.metadata.generation,
        report=report,
        models=len(placement.pods),
        refusal=snapshot.fault,
        before=snapshot.status,
        now_seconds=snapshot.unix_seconds,
        replicas=len([pod for pod in snapshot.pods if pod.item is not None]),
        ready_replicas=ready,
        devices=pool.spec.device.count * replicas,
    )
    if snapshot.fault is None:
        if snapshot.missing is not None and not (problem is not None and problem[1]):
            problem = snapshot.missing, True
        reason, message, abnormal = _pool_verdict(pool, replicas, ready, busy, problem)
        conditions = [
            ("Ready", "False" if abnormal else "True", reason, message),
            *(
                (kind, "True", reason, message) if kind == abnormal else (kind, "False", "Idle", "")
                for kind in ("Reconciling", "Stalled")
            ),
        ]
        before = snapshot.status.get("conditions") or ()
        status["conditions"] = condition_list(conditions, before, pool.metadata.generation, snapshot.unix_seconds)
    status["replicas"] = len([pod for pod in snapshot.pods if pod.item is not None])
    status["readyReplicas"] = ready
    status["selector"] = ",".join(f"{key}={value}" for key, value in sorted(selector_of(pool).items()))
    return status


def _pool_verdict(
    pool: OmniPool, replicas: int, ready: int, busy: Sequence[str], problem: tuple[Refusal, bool] | None
) -> tuple[str, str, str]:
    """Reason, message, and the abnormal condition that is true; empty when none is.

    Args:
        pool: which.
        replicas: pods that it asks for.
        ready: pods that are ready.
        busy: pods that answer, and have models that they are still to make ready.
        problem: of its pods, and whether a person has to solve it.
    """
    if replicas == 0:
        return "ScaledToZero", "it is asked for no pods (spec.replicas: 0)", ""
    if ready >= replicas and not (problem is not None and problem[1]):
        return "Serving", f"{ready} of {replicas} pods are ready", ""
    if problem is not None:
        refusal, stalled = problem
        return refusal.reason, refusal.message, "Stalled" if stalled else "Reconciling"
    first = f"; {', '.join(busy)} makes its first models ready" if busy else ""
    return "Starting", f"{ready} of {replicas} pods of pool {pool.metadata.name} are ready{first}", "Reconciling"


@dataclass(frozen=True)
class Assigned:
    """What a pool's round said about a model."""

    pods: tuple[str, ...] = ()
    why: Mapping[str, str] | None = None
    refusal: Finding | None = None
    notes: tuple[Finding, ...] = ()
    waiting: Refusal | None = None


def assigned_of(decision: PoolDecision, key: str) -> Assigned:
    """The part of a pool's decision that concerns a model."""
    placement = decision.placement
    pods = placement.pods.get(key, ())
    away = [decision.away[pod] for pod in pods if pod in decision.away]
    return Assigned(
        pods=pods,
        why=placement.why.get(key),
        refusal=next((finding for finding in placement.refused if finding.model == key), None),
        notes=tuple(finding for finding in placement.warnings if finding.model == key),
        waiting=decision.waiting or (away[0] if away and len(away) == len(pods) else None),
    )
