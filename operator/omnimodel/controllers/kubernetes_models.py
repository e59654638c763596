"""A model's round of the operator as a decision: its process and its status. Pure.

It can be run again at any time, after any crash, with the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omnimodel.api import GROUP, OmniModel, OmniPool, OmniProcess
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.decisions import rendered
from omnimodel.controllers.kubernetes_pods import is_by
from omnimodel.controllers.kubernetes_snapshot import Assigned, Status
from omnimodel.controllers.status import entry_report, footprint, model_status, spokesman
from omnimodel.errors import Reason
from omnimodel.placement.assignment import Finding
from omnimodel.placement.board import WAS_THERE
from omnimodel.render import Config

WHY_LIMIT = 1024  # characters, of the API
# Refusals after which a process that serves an older generation is left alone. After the others its bytes are needed
# by someone else, or nobody wants it.
_KEEPS_OLD = frozenset(
    {
        Reason.TOO_LARGE,
        Reason.AFFINITY_CONFLICT,
        Reason.SOURCE_NOT_FOUND,
        Reason.INVALID_MANIFEST,
        Reason.NAME_TAKEN,
        Reason.OUTDATED_DEFINITIONS,
        Reason.NOT_ALLOWED,
    }
)


@dataclass(frozen=True)
class ModelSnapshot:
    """Everything that a model's round decides from.

    Args:
        model: as it was written.
        status: its status.
        process: its OmniProcess; None when it has none.
        pool: that it means; None when there is none.
        invalid: why there is a pool and it cannot be used.
        pools: names of the pools that there are, for the message.
        assigned: by the pool.
        names, lost: served names that it may have, and what to say of the others.
        config: what it refers to.
        live: pods that answer: names, and their uids.
        fault: why no process can be written at all; None when it can.
        taken: user ids of other models of the pool.
        unix_seconds: the time of day.
    """

    model: OmniModel
    status: Mapping[str, Any]
    process: Mapping[str, Any] | None
    pool: OmniPool | None
    invalid: Refusal | None
    pools: Sequence[str]
    assigned: Assigned
    names: tuple[str, ...]
    lost: tuple[Finding, ...]
    config: Config
    live: Mapping[str, str]
    fault: Refusal | None
    taken: Collection[int]
    unix_seconds: float


@dataclass(frozen=True)
class ModelDecision:
    """What a model should have.

    Args:
        process: the OmniProcess; None for none.
        keep: leave the OmniProcess that there is as it is, though it is of an older generation.
        status: without residency, which is the agents'.
        refusal: why it has no process of this generation.
        remarks: reason and sentence of what a person should know although the model serves.
    """

    process: dict[str, Any] | None
    keep: bool
    status: Status
    refusal: Refusal | None
    remarks: tuple[tuple[str, str], ...] = ()


def decide_model(snapshot: ModelSnapshot) -> ModelDecision:
    """The process and the status of a model."""
    model, assigned = snapshot.model, snapshot.assigned
    notes = [(str(finding.reason), finding.message) for finding in (*assigned.notes, *snapshot.lost)]
    refusal = _refusal(snapshot)
    process: OmniProcess | None = None
    if refusal is None and not model.spec.suspend:
        assert snapshot.pool is not None
        found = rendered(model, snapshot.pool, snapshot.config, snapshot.names, notes, snapshot.taken)
        if isinstance(found, Refusal):
            refusal = found
        else:
            process = found
    uid = ((snapshot.process or {}).get("spec") or {}).get("model", {}).get("uid")
    keep = refusal is not None and refusal.reason in _KEEPS_OLD and uid == model.metadata.uid
    if keep and refusal is not None:
        refusal = replace(refusal, serves_on=True)
    reports = [
        entry_report(model.metadata.namespace, model.metadata.name, entry)
        for entry in snapshot.status.get("residency") or ()
        if entry["pod"] in snapshot.live
        and is_by(entry, snapshot.live[entry["pod"]])
        and (entry["pod"] in assigned.pods or keep)
    ]
    status = model_status(
        generation=model.metadata.generation,
        pod="",
        report=spokesman(reports, model.metadata.generation),
        refusal=refusal,
        suspended=model.spec.suspend,
        before=snapshot.status,
        now_seconds=snapshot.unix_seconds,
        notes=notes,
        served_names=snapshot.names,
        pending=assigned.waiting,
    )
    del status["residency"]
    status.pop("footprint", None)
    # What was measured before is still the best guess.
    if measured := {**(snapshot.status.get("footprint") or {}), **footprint(reports)}:
        status["footprint"] = measured
    if assigned.pods:
        status["assigned"] = _assigned(assigned, snapshot.status)
    remarks = tuple((str(note.reason), note.message) for note in assigned.notes if note.reason == Reason.TOO_FEW_PODS)
    sentences = [sentence for _, sentence in remarks]
    for condition in status["conditions"]:
        if (condition["type"], condition["status"]) == ("Ready", "True"):
            condition["message"] = "; ".join([condition["message"], *sentences])
    body = None if process is None else process_body(process, snapshot.pool, assigned.pods)
    return ModelDecision(body, keep, status, refusal, remarks)


def _assigned(assigned: Assigned, before: Mapping[str, Any]) -> list[dict[str, str]]:
    """Pods that hold a model, and for what reason each was chosen when it was."""
    known = {entry["pod"]: entry.get("why", "") for entry in before.get("assigned") or ()}
    why = assigned.why or {}
    return [
        {"pod": pod, "why": known.get(pod, WAS_THERE) if why.get(pod, WAS_THERE) == WAS_THERE else why[pod][:WHY_LIMIT]}
        for pod in assigned.pods
    ]


def _refusal(snapshot: ModelSnapshot) -> Refusal | None:
    model = snapshot.model
    if model.spec.suspend:
        return None  # said by its own condition
    if snapshot.fault is not None:
        return snapshot.fault
    if snapshot.invalid is not None:
        return snapshot.invalid
    if snapshot.pool is None:
        known = ", ".join(sorted(set(snapshot.pools))) or "none"
        message = f"asks for pool {model.spec.pool}, which does not exist; pools: {known}"
        return Refusal(Reason.POOL_NOT_FOUND, message)
    finding = snapshot.assigned.refusal
    return None if finding is None else Refusal(finding.reason, finding.problem, finding.cure)


def process_body(process: OmniProcess, pool: OmniPool | None, pods: Sequence[str]) -> dict[str, Any]:
    """An OmniProcess as it is applied."""
    assert pool is not None
    document = process.to_dict()
    metadata = {key: value for key, value in document["metadata"].items() if key != "generation"}
    metadata["labels"] = {**metadata["labels"], f"{GROUP}/pool-namespace": pool.metadata.namespace}
    return {"metadata": metadata, "spec": {**document["spec"], "pods": list(pods)}}
