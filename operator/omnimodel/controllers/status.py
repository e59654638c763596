"""Status of models and their processes, composed from what agents report: the same on one machine and in a cluster.

Pure. `residency` entries say what the agent of that pod reported. A model that is warm, parked or cold but can be woken
is Ready: swaps change nothing here but the residency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnimodel.controllers.conditions import Refusal, condition_list, timestamp, verdict
from omnimodel.errors import Reason
from omnimodel.protocol.report import ModelReport

_WORK = {
    "fetching": ("Fetching", "its source is being fetched"),
    "building": ("Building", "its environment is being built"),
    "queued": ("Queued", "it is published when the models before it are"),
    "publishing": ("Publishing", "its weights are being published as an image"),
    "starting": ("Starting", "its process is being started"),
    "probing": ("Probing", "its known answer is being checked"),
    "pending": ("Pending", "the agent has not begun with it yet"),
}
# What does not change by waiting. SizeUnknown does, and so does everything without a reason of its own.
_FINAL = frozenset(Reason) - {Reason.SIZE_UNKNOWN, Reason.DRAINING, Reason.QUEUE_FULL, Reason.DEADLINE_EXCEEDED}


def _model_verdict(
    generation: int,
    report: ModelReport | None,
    refusal: Refusal | None,
    pending: Refusal | None,
    *,
    suspended: bool,
) -> list[tuple[str, str, str, str]]:
    """Ready, Reconciling and Stalled of a model."""
    if suspended:
        return verdict("False", "", Reason.SUSPENDED, "its manifest says suspend: true")
    if refusal is not None:
        if refusal.serves_on and report is not None and report.ready:
            same = report.generation == generation
            serving = "what was started before serves on" if same else f"generation {report.generation} serves on"
            ready = "True" if same else "Unknown"
            return verdict(ready, "Stalled", refusal.reason, f"{refusal.message}; {serving}")
        return verdict("False", "Stalled", refusal.reason, refusal.message)
    if report is None:
        reason, message = (pending.reason, pending.message) if pending else _WORK["pending"]
        return verdict("Unknown", "Reconciling", reason, message)
    failed = report.phase == "failed" or (report.phase not in _WORK and report.reason in _FINAL)
    reason, message = _WORK.get(report.phase, _WORK["pending"])
    if failed or not report.ready:  # otherwise they say why the model has the tier it has
        reason, message = report.reason or reason, report.message or message
    if report.generation != generation:
        serving = f"; generation {report.generation} serves until then" if report.ready else ""
        return verdict("Unknown", "Stalled" if failed else "Reconciling", reason, f"{message}{serving}")
    if report.ready:
        return verdict("True", "", "Serving", "it is resident, or can be woken")
    return verdict("False", "Stalled" if failed else "Reconciling", reason, message)


def model_status(
    *,
    generation: int,
    pod: str,
    report: ModelReport | None,
    refusal: Refusal | None,
    suspended: bool,
    before: Mapping[str, Any],
    now_seconds: float,
    notes: Sequence[tuple[str, str]] = (),
    served_names: Sequence[str] = (),
    pending: Refusal | None = None,
) -> dict[str, Any]:
    """The status of an OmniModel.

    Args:
        generation: metadata.generation, which the controller has acted on.
        pod: key of the residency entry; on one machine the node's name.
        report: of the agent; None while it has none.
        refusal: when placement did not assign the model.
        suspended: whether the manifest suspends it.
        before: the status there was, for the times of its conditions.
        now_seconds: Unix time.
        notes: (reason, sentence) of what placement has to say beside that, such as an alias that another model holds.
        served_names: the names it was granted.
        pending: what an agent that has not reported waits for; None when that is not known.
    """
    wanted = _model_verdict(generation, report, refusal, pending, suspended=suspended)
    taken = [message for reason, message in notes if reason == Reason.NAME_TAKEN]
    if taken:
        wanted.append(("NameConflict", "True", Reason.NAME_TAKEN, "; ".join(taken)))
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "conditions": condition_list(wanted, before.get("conditions", ()), generation, now_seconds),
        "residency": [],
    }
    if served_names:
        status["servedNames"] = list(served_names)
    if report is None:
        return status
    if measured := footprint([report]):
        status["footprint"] = measured
    status["residency"].append(residency_entry(pod, report))
    return status


def footprint(reports: Sequence[ModelReport]) -> dict[str, int]:
    """Measured bytes of a model, the most of any agent; empty while nothing was measured."""
    found = {
        "weightsBytes": max((report.weights_bytes for report in reports), default=0),
        "workingBytes": max((report.working_bytes for report in reports), default=0),
    }
    private = max((report.idle_bytes for report in reports), default=0)
    return {**found, **({"privateBytes": private} if private else {})} if any(found.values()) else {}


def residency_entry(pod: str, report: ModelReport, pod_uid: str = "") -> dict[str, Any]:
    """The entry of one pod in the status of a model."""
    return {
        "pod": pod,
        **({"podUid": pod_uid} if pod_uid else {}),
        "tier": report.tier,
        "phase": report.phase,
        "ready": report.ready,
        "progress": round(report.progress, 3),
        "generation": report.generation,
        "deviceBytes": report.device_bytes,
        "hostBytes": report.host_bytes,
        "weightsBytes": report.weights_bytes,
        "workingBytes": report.working_bytes,
        **({"privateBytes": report.idle_bytes} if report.idle_bytes else {}),
        "pid": report.process.pid if report.process else 0,
        "since": timestamp(report.since_seconds),
        "lastRequest": timestamp(report.last_request_seconds),
        "waiting": report.waiting,
        "inFlight": report.in_flight,
        "requests": report.served,
        "failed": report.failed,
        **_tokens(report),
        "wakes": report.wakes,
        "evictions": report.evictions,
        # Left out when empty: applied over one with causes, an empty map would become null, which is refused.
        **({"swaps": report.swaps} if report.swaps else {}),
        "lastWakeSeconds": report.last_wake_seconds,
        "wakeSeconds": round(report.wake_seconds, 3),
        "lastWakeBytesPerSecond": report.last_wake_bytes_per_second,
        "reason": report.reason,
        "message": report.message,
        "store": report.store,
        **({"device": report.device} if report.device else {}),
    }


def _tokens(report: ModelReport) -> dict[str, int]:
    """Both counts, where tokens are counted."""
    found = {"promptTokens": report.prompt_tokens, "generatedTokens": report.generated_tokens}
    return found if any(found.values()) else {}


def entry_report(namespace: str, name: str, entry: Mapping[str, Any]) -> ModelReport:
    """What `residency_entry` was made from, as far as an entry says it."""
    return ModelReport(
        namespace,
        name,
        generation=int(entry.get("generation", 0)),
        tier=str(entry.get("tier", "cold")),
        phase=str(entry.get("phase", "")),
        ready=bool(entry.get("ready", False)),
        progress=float(entry.get("progress", -1.0)),
        reason=str(entry.get("reason", "")),
        message=str(entry.get("message", "")),
        weights_bytes=int(entry.get("weightsBytes", 0)),
        working_bytes=int(entry.get("workingBytes", 0)),
        idle_bytes=int(entry.get("privateBytes", 0)),
    )


def spokesman(reports: Sequence[ModelReport], generation: int) -> ModelReport | None:
    """The report that decides what is said of a model that several pods hold.

    A pod that still serves an older generation speaks first, for a client may yet reach it; then one that serves,
    one that works, and last one that failed.
    """

    def rank(report: ModelReport) -> tuple[bool, bool, bool]:
        return (
            not (report.ready and report.generation != generation),
            not report.ready,
            report.phase == "failed",
        )

    return min(reports, key=rank, default=None)


def process_status(report: ModelReport | None) -> dict[str, Any]:
    """The status of an OmniProcess."""
    if report is None or report.process is None:
        return {"state": "stopped", "tier": report.tier if report else "cold"}
    process = report.process
    return {
        "state": process.state,
        "tier": report.tier,
        "instance": process.instance,
        "pid": process.pid,
        "started": timestamp(process.started_seconds),
        "privateBytes": process.private_bytes,
        "restarts": process.restarts,
        "isolationLevel": process.isolation_level,
        "isolationMissing": list(process.isolation_missing),
        "cgroup": process.cgroup,
    }
