"""Status of pools, composed from what agents report: the same on one machine and in a cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnimodel.controllers.conditions import Refusal, condition_list, verdict
from omnimodel.errors import Reason
from omnimodel.protocol.report import DeviceReport, PoolReport


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
            wanted = verdict("False", "Stalled", refusal.reason, refusal.message)
        else:
            wanted = verdict("False", "Reconciling", "Starting", "its agent has not reported yet")
        conditions = condition_list(wanted, before.get("conditions", ()), generation, now_seconds)
        return {"observedGeneration": generation, "conditions": conditions, "models": models, **_served(report)}
    if report.ready:
        wanted = verdict("True", "", "Serving", report.message)
    else:
        wanted = verdict("False", "Stalled", report.reason or Reason.INTERNAL, report.message)
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
