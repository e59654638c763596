"""Status of objects, composed from what agents report: the same on one machine and in a cluster. Pure.

Conditions follow kstatus: `Ready`, and the abnormal-true `Reconciling` and `Stalled`. The controller is the writer of
all three; `residency` entries say what the agent of that pod reported. A model that is warm, parked or cold but can
be woken is Ready: swaps change nothing here but the residency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from omnimodel.errors import CURES, Reason, advised
from omnimodel.protocol.report import DeviceReport, ModelReport, PoolReport

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


@dataclass(frozen=True)
class Refusal:
    """Why a model is not given to the agent at all, or a pod or pool does not serve.

    Args:
        reason: of the condition.
        problem: what is wrong.
        cure: what to do about it; the usual one of the reason when it is None.
        serves_on: of a model only its newest version is refused.
    """

    reason: str
    problem: str
    cure: str | None = None
    serves_on: bool = False

    @property
    def advice(self) -> str:
        """What to do about it."""
        return CURES.get(self.reason, "") if self.cure is None else self.cure

    @property
    def message(self) -> str:
        """Of the condition: what is wrong and what to do about it."""
        return advised(self.reason, self.problem, self.cure)


def timestamp(unix_seconds: float) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes it; empty for never (0)."""
    if not unix_seconds:
        return ""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition_list(
    wanted: Sequence[tuple[str, str, str, str]],
    before: Sequence[Mapping[str, Any]],
    generation: int,
    now_seconds: float,
) -> list[dict[str, Any]]:
    """Conditions, each with the time of its last change of status.

    Args:
        wanted: (type, status, reason, message) of each.
        before: the conditions there were; one whose status stays keeps its time.
        generation: of the spec they speak about.
        now_seconds: Unix time.
    """
    times = {(old["type"], old["status"]): old["lastTransitionTime"] for old in before}
    return [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": generation,
            "lastTransitionTime": times.get((kind, status)) or timestamp(now_seconds),
        }
        for kind, status, reason, message in wanted
    ]


def _verdict(
    generation: int,
    report: ModelReport | None,
    refusal: Refusal | None,
    pending: Refusal | None,
    *,
    suspended: bool,
) -> list[tuple[str, str, str, str]]:
    """Ready, Reconciling and Stalled of a model."""
    if suspended:
        return _conditions("False", "", Reason.SUSPENDED, "its manifest says suspend: true")
    if refusal is not None:
        if refusal.serves_on and report is not None and report.ready:
            same = report.generation == generation
            serving = "what was started before serves on" if same else f"generation {report.generation} serves on"
            ready = "True" if same else "Unknown"
            return _conditions(ready, "Stalled", refusal.reason, f"{refusal.message}; {serving}")
        return _conditions("False", "Stalled", refusal.reason, refusal.message)
    if report is None:
        reason, message = (pending.reason, pending.message) if pending else _WORK["pending"]
        return _conditions("Unknown", "Reconciling", reason, message)
    failed = report.phase == "failed" or (report.phase not in _WORK and report.reason in _FINAL)
    reason, message = _WORK.get(report.phase, _WORK["pending"])
    if failed or not report.ready:  # otherwise they say why the model has the tier it has
        reason, message = report.reason or reason, report.message or message
    if report.generation != generation:
        serving = f"; generation {report.generation} serves until then" if report.ready else ""
        return _conditions("Unknown", "Stalled" if failed else "Reconciling", reason, f"{message}{serving}")
    if report.ready:
        return _conditions("True", "", "Serving", "it is resident, or can be woken")
    return _conditions("False", "Stalled" if failed else "Reconciling", reason, message)


def _conditions(ready: str, abnormal: str, reason: str, message: str) -> list[tuple[str, str, str, str]]:
    """The three conditions, with at most one of `Reconciling` and `Stalled` true."""
    rest = [
        (kind, "True", reason, message) if kind == abnormal else (kind, "False", "Idle", "")
        for kind in ("Reconciling", "Stalled")
    ]
    return [("Ready", ready, reason, message), *rest]


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
    wanted = _verdict(generation, report, refusal, pending, suspended=suspended)
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


def pod_entry(pod: str, report: PoolReport, images: Sequence[str] = (), pod_uid: str = "") -> dict[str, Any]:
    """The entry of one pod in the status of a pool."""
    return {
        "pod": pod,
        **({"podUid": pod_uid} if pod_uid else {}),
        "ready": report.ready,
        "reason": "" if report.ready else report.reason,
        "message": "" if report.ready else report.message,
        "device": report.device,
        "budgetBytes": report.budget_bytes,
        "residentBytes": report.resident_bytes,
        "promisedBytes": report.promised_bytes,
        "workingBytes": report.working_bytes,
        "contextBytes": report.context_bytes,
        "freeBytes": report.free_bytes,
        "footprintBytes": report.footprint_bytes,
        **_drawn(report),
        "hostBudgetBytes": report.host_budget_bytes,
        "hostBytes": report.host_bytes,
        "arenaBytes": report.arena_bytes,
        "isolation": {"level": report.isolation_level, "missing": list(report.isolation_missing)},
        "store": _store(report),
        "images": list(images),
        **_per_device(report),
    }


def _drawn(report: PoolReport | DeviceReport) -> dict[str, Any]:
    """Power and energy, where somebody knows them.

    An agent's entry has them as of when it was written, which is when something else changed. What is said of all pods
    of a cluster has none: it would be made of such entries. Agents themselves tell the latest, in their metrics.
    """
    found = {"powerWatts": round(report.power_watts, 1), "energyJoules": round(report.energy_joules, 1)}
    return found if any(found.values()) else {}


def _per_device(report: PoolReport) -> dict[str, Any]:
    """Each device where there are several; left out where not, as an entry of one device says all of it."""
    entries = [
        {
            "name": device.name,
            "budgetBytes": device.budget_bytes,
            "residentBytes": device.resident_bytes,
            "promisedBytes": device.promised_bytes,
            "workingBytes": device.working_bytes,
            "contextBytes": device.context_bytes,
            "freeBytes": device.free_bytes,
            **_drawn(device),
            **({"problem": device.problem} if device.problem else {}),
        }
        for device in report.devices
    ]
    return {"perDevice": entries} if entries else {}


def _store(report: PoolReport) -> dict[str, Any]:
    return {
        "path": report.store_path,
        "capacityBytes": report.store_bytes,
        "freeBytes": report.store_free_bytes,
    }


def pool_report(pool: str, entries: Sequence[Mapping[str, Any]]) -> PoolReport | None:
    """One report over all pods of a pool: bytes in sum, the least isolation, and the first fault. None without pods."""
    if not entries:
        return None

    def total(name: str) -> int:
        return sum(int(entry.get(name, 0)) for entry in entries)

    faults = [entry for entry in entries if not entry.get("ready")]
    levels = [entry.get("isolation") or {} for entry in entries]
    stores = [entry.get("store") or {} for entry in entries]
    least = max(levels, key=lambda found: len(found.get("missing", ())))
    fault: Mapping[str, Any] = faults[0] if faults else {}
    return PoolReport(
        pool=pool,
        node="",
        device=", ".join(sorted({str(entry.get("device", "")) for entry in entries} - {""})),
        budget_bytes=total("budgetBytes"),
        resident_bytes=total("residentBytes"),
        promised_bytes=total("promisedBytes"),
        working_bytes=total("workingBytes"),
        free_bytes=total("freeBytes"),
        host_budget_bytes=total("hostBudgetBytes"),
        host_bytes=total("hostBytes"),
        arena_bytes=total("arenaBytes"),
        context_bytes=total("contextBytes"),
        footprint_bytes=total("footprintBytes"),
        isolation_level=str(least.get("level", "")),
        isolation_missing=tuple(least.get("missing", ())),
        ready=not faults,
        reason=str(fault.get("reason", "")),
        message=f"{fault['pod']}: {fault.get('message') or 'is not ready'}" if faults else _lost_devices(entries),
        store_path=next((str(store["path"]) for store in stores if store.get("path")), ""),
        store_bytes=sum(int(store.get("capacityBytes", 0)) for store in stores),
        store_free_bytes=sum(int(store.get("freeBytes", 0)) for store in stores),
    )


def _lost_devices(entries: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with devices of pods that serve from their others."""
    devices = [(entry["pod"], device) for entry in entries for device in entry.get("perDevice") or ()]
    return "; ".join(
        f"{pod}: {device['name']}: {device['problem']}" for pod, device in devices if device.get("problem")
    )


def pool_status(
    *,
    generation: int,
    report: PoolReport | None,
    models: int,
    refusal: Refusal | None,
    before: Mapping[str, Any],
    now_seconds: float,
    replicas: int = 1,
    ready_replicas: int | None = None,
    devices: int = 1,
) -> dict[str, Any]:
    """The status of an OmniPool.

    Args:
        generation: metadata.generation.
        report: of the agent, or all agents, that serve the pool; None when none does.
        models: how many are assigned to it.
        refusal: why it is not served.
        before: the status there was.
        now_seconds: Unix time.
        replicas, ready_replicas: pods there are, and those that serve; one machine is one replica.
        devices: of all pods.
    """
    if refusal is not None or report is None:
        if refusal is not None:
            wanted = _conditions("False", "Stalled", refusal.reason, refusal.message)
        else:
            wanted = _conditions("False", "Reconciling", "Starting", "its agent has not reported yet")
        conditions = condition_list(wanted, before.get("conditions", ()), generation, now_seconds)
        return {"observedGeneration": generation, "conditions": conditions, "models": models, **_served(report)}
    if report.ready:
        wanted = _conditions("True", "", "Serving", report.message)
    else:
        wanted = _conditions("False", "Stalled", report.reason or Reason.INTERNAL, report.message)
    return {
        "observedGeneration": generation,
        "conditions": condition_list(wanted, before.get("conditions", ()), generation, now_seconds),
        "replicas": replicas,
        "readyReplicas": int(report.ready) if ready_replicas is None else ready_replicas,
        "devices": devices,
        "device": report.device,
        "models": models,
        **_served(report),
        "promisedBytes": report.promised_bytes,
        "workingBytes": report.working_bytes,
        "contextBytes": report.context_bytes,
        "freeBytes": report.free_bytes,
        **_drawn(report),
        "hostBudgetBytes": report.host_budget_bytes,
        "hostBytes": report.host_bytes,
        "arenaBytes": report.arena_bytes,
        "footprintBytes": report.footprint_bytes,
        "store": _store(report),
        **_per_device(report),
    }


def _served(report: PoolReport | None) -> dict[str, Any]:
    """What a script finds in the status of every pool; one that nobody serves has no bytes, and no level."""
    if report is None:
        return {
            "budgetBytes": 0,
            "residentBytes": 0,
            "overcommitRatio": 0.0,
            "isolation": {"level": "", "missing": []},
        }
    return {
        "budgetBytes": report.budget_bytes,
        "residentBytes": report.resident_bytes,
        "overcommitRatio": round(report.footprint_bytes / report.budget_bytes, 3) if report.budget_bytes else 0.0,
        "isolation": {"level": report.isolation_level, "missing": list(report.isolation_missing)},
    }


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
