"""What a status says in each state of a model: the table a person, kubectl wait and kstatus read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omnimodel.api import ModelStatus, PoolStatus, ProcessStatus
from omnimodel.controllers.agent_kubernetes_status import transition
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.pool_status import pod_entry, pool_report, pool_status
from omnimodel.controllers.status import entry_report, footprint, model_status, process_status, residency_entry
from omnimodel.errors import CURES, OmniError, Reason, advised
from omnimodel.placement.assignment import Finding
from omnimodel.protocol.report import ModelReport, PoolReport, ProcessReport

DRAWING = {"context_bytes": 30, "power_watts": 310.52, "energy_joules": 99.96}
PROCESS = ProcessReport("a-1", 4711, "ready", 1000.0, 20 << 20, 0, "namespaces", ("swap limits",), "/sys/fs/cgroup/a")
SERVING = ModelReport(
    "default", "a", 3, "resident", "serving", ready=True, weights_bytes=100, working_bytes=20, device_bytes=120,
    served=7, wakes=2, last_wake_seconds=0.02, last_request_seconds=1700000000, process=PROCESS,
)  # fmt: skip
POOL = PoolReport(
    "default",
    "node-1",
    "host",
    1000,
    400,
    50,
    100,
    450,
    4000,
    900,
    700,
    3200,
    "namespaces",
    ("swap limits",),
    ready=True,
)


def status_of(report: ModelReport | None = None, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "generation": 3, "pod": "node-1", "report": report, "refusal": None, "suspended": False, "before": {},
        "now_seconds": 2000.0,
    }  # fmt: skip
    return model_status(**{**arguments, **changes})


def verdict(status: dict[str, Any]) -> tuple[str, str, str, str]:
    """Ready, Reconciling, Stalled and the reason of Ready."""
    by_type = {condition["type"]: condition for condition in status["conditions"]}
    return (
        by_type["Ready"]["status"],
        by_type["Reconciling"]["status"],
        by_type["Stalled"]["status"],
        by_type["Ready"]["reason"],
    )


CASES = {
    "resident serves": (SERVING, ("True", "False", "False", "Serving")),
    "warm is ready": (replace(SERVING, tier="warm", phase="idle"), ("True", "False", "False", "Serving")),
    "parked is ready": (replace(SERVING, tier="parked", phase="idle"), ("True", "False", "False", "Serving")),
    "cold is ready": (replace(SERVING, tier="cold", phase="idle", process=None), ("True", "False", "False", "Serving")),
    "a wake changes nothing": (replace(SERVING, tier="warm", phase="waking"), ("True", "False", "False", "Serving")),
    "an evict changes nothing": (replace(SERVING, phase="draining"), ("True", "False", "False", "Serving")),
    "not seen yet": (None, ("Unknown", "True", "False", "Pending")),
    "publishing": (
        replace(SERVING, ready=False, phase="publishing", progress=0.4),
        ("False", "True", "False", "Publishing"),
    ),
    "waits for the slot of unknown sizes": (
        replace(SERVING, ready=False, phase="idle", reason=Reason.SIZE_UNKNOWN),
        ("False", "True", "False", "SizeUnknown"),
    ),
    "bad artifact": (
        replace(SERVING, ready=False, phase="failed", reason=Reason.BAD_ARTIFACT, message="cut off"),
        ("False", "False", "True", "BadArtifact"),
    ),
    "out of memory in a loop": (
        replace(SERVING, ready=False, phase="idle", reason=Reason.OUT_OF_MEMORY),
        ("False", "False", "True", "OutOfMemory"),
    ),
    "new generation is prepared, the old one serves": (
        replace(SERVING, generation=2, phase="serving"),
        ("Unknown", "True", "False", "Pending"),
    ),
    "new generation failed, the old one serves": (
        replace(SERVING, generation=2, phase="failed", reason=Reason.HANDLER_FAILED, message="no such class"),
        ("Unknown", "False", "True", "HandlerFailed"),
    ),
}


@pytest.mark.parametrize(("report", "expected"), CASES.values(), ids=CASES.keys())
def test_conditions(report: ModelReport | None, expected: tuple[str, ...]) -> None:
    status = status_of(report)
    assert verdict(status) == expected
    ModelStatus.model_validate(status)


def test_refusal_is_stalled_with_its_sentence() -> None:
    status = status_of(refusal=Refusal(Reason.TOO_LARGE, "needs 2.00 GiB on the device, but pool default has 1.00 GiB"))
    assert verdict(status) == ("False", "False", "True", "TooLarge")
    assert "2.00 GiB" in status["conditions"][0]["message"]


@pytest.mark.parametrize("reason", list(Reason))
def test_whatever_is_refused_for_a_reason_says_what_to_do(reason: Reason) -> None:
    assert len(CURES[reason].split()) >= 3
    message = Refusal(reason, "It is not there. ").message
    assert message == Finding("default/a", reason, "It is not there. ").message == f"It is not there; {CURES[reason]}"
    assert OmniError("OmniModel a", "it is not there", reason=reason).advice == f"it is not there; {CURES[reason]}"


def test_a_better_cure_is_told_instead_of_the_usual_one() -> None:
    assert Refusal(Reason.TOO_LARGE, "it is", "add a device").message == "it is; add a device"
    assert OmniError("", "it is", "add a device", reason=Reason.TOO_LARGE).advice == "it is; add a device"
    assert Refusal(Reason.TOO_LARGE, "it is: see above", "").message == "it is: see above"
    assert advised("Pending", "it waits") == "it waits"


def test_suspended_is_neither_reconciling_nor_stalled() -> None:
    assert verdict(status_of(suspended=True)) == ("False", "False", "False", "Suspended")


def test_a_lost_alias_is_a_condition_and_the_model_stays_ready() -> None:
    status = status_of(SERVING, notes=[(Reason.NAME_TAKEN, 'served name "gpt" belongs to OmniModel default/b')])
    assert verdict(status)[0] == "True"
    conflict = [condition for condition in status["conditions"] if condition["type"] == "NameConflict"]
    assert [(condition["status"], condition["reason"]) for condition in conflict] == [("True", "NameTaken")]


def test_time_of_a_condition_moves_with_its_status_only() -> None:
    first = status_of(replace(SERVING, ready=False, phase="publishing"), now_seconds=1000.0)
    second = status_of(replace(SERVING, ready=False, phase="starting"), now_seconds=2000.0, before=first)
    third = status_of(SERVING, now_seconds=3000.0, before=second)
    times = [status["conditions"][0]["lastTransitionTime"] for status in (first, second, third)]
    assert times == ["1970-01-01T00:16:40Z", "1970-01-01T00:16:40Z", "1970-01-01T00:50:00Z"]


def test_each_condition_names_the_generation_it_speaks_of() -> None:
    assert {condition["observedGeneration"] for condition in status_of(SERVING)["conditions"]} == {3}


def test_residency_and_footprint_have_what_scripts_rely_on() -> None:
    status = status_of(SERVING)
    assert status["footprint"] == {"weightsBytes": 100, "workingBytes": 20}
    entry = status["residency"][0]
    assert {key: entry[key] for key in ("tier", "deviceBytes", "pid", "wakes", "lastWakeSeconds", "requests")} == {
        "tier": "resident", "deviceBytes": 120, "pid": 4711, "wakes": 2, "lastWakeSeconds": 0.02, "requests": 7,
    }  # fmt: skip


def test_private_memory_is_said_once_somebody_has_seen_the_model_idle() -> None:
    idle = replace(SERVING, idle_bytes=16)
    status = status_of(idle)
    ModelStatus.model_validate(status)
    assert status["footprint"] == {"weightsBytes": 100, "workingBytes": 20, "privateBytes": 16}
    entries = [residency_entry("gpu-0", SERVING), residency_entry("gpu-1", idle)]
    assert "privateBytes" not in entries[0]
    assert footprint([entry_report("default", "a", entry) for entry in entries]) == status["footprint"]
    assert transition(idle) != transition(SERVING), "and it is written"


def test_pool_has_what_scripts_rely_on() -> None:
    status = pool_status(generation=1, report=POOL, models=4, refusal=None, before={}, now_seconds=1.0)
    PoolStatus.model_validate(status)
    assert (status["budgetBytes"], status["residentBytes"], status["overcommitRatio"]) == (1000, 400, 3.2)
    assert status["isolation"] == {"level": "namespaces", "missing": ["swap limits"]}
    assert status["conditions"][0]["status"] == "True"


@pytest.mark.parametrize("refusal", [None, Refusal(Reason.POOL_NOT_FOUND, "this machine serves another one")])
def test_a_pool_that_nobody_serves_has_the_same_fields(refusal: Refusal | None) -> None:
    arguments: dict[str, Any] = {"generation": 1, "models": 0, "refusal": refusal, "before": {}, "now_seconds": 1.0}
    status = pool_status(report=None, **arguments)
    PoolStatus.model_validate(status)
    assert (status["budgetBytes"], status["residentBytes"], status["overcommitRatio"]) == (0, 0, 0.0)
    assert status["isolation"] == {"level": "", "missing": []}
    assert verdict(status)[0] == "False"


def test_a_pool_that_is_refused_while_pods_of_it_run_says_what_they_hold() -> None:
    refusal = Refusal(Reason.NOT_ALLOWED, "may not be read")
    status = pool_status(generation=1, report=POOL, models=0, refusal=refusal, before={}, now_seconds=1.0)
    assert (verdict(status)[0], status["budgetBytes"], status["isolation"]["level"]) == ("False", 1000, "namespaces")


def test_stores_are_told_pod_by_pod_and_in_sum() -> None:
    entries = [
        pod_entry(f"gpu-{number}", replace(POOL, store_path="/stores/own", store_bytes=100, store_free_bytes=free))
        for number, free in enumerate((40, 30))
    ]
    status = pool_status(
        generation=1, report=pool_report("gpu", entries), models=0, refusal=None, before={}, now_seconds=1.0
    )
    PoolStatus.model_validate({**status, "pods": entries})
    assert [entry["store"]["freeBytes"] for entry in entries] == [40, 30]
    assert status["store"] == {"path": "/stores/own", "capacityBytes": 200, "freeBytes": 70}


def test_pool_that_cannot_isolate_is_stalled() -> None:
    report = replace(POOL, ready=False, reason=Reason.ISOLATION_UNAVAILABLE, message="no namespaces here")
    status = pool_status(generation=1, report=report, models=0, refusal=None, before={}, now_seconds=1.0)
    assert verdict(status) == ("False", "False", "True", "IsolationUnavailable")


def test_process_status() -> None:
    status = process_status(SERVING)
    ProcessStatus.model_validate(status)
    assert (status["state"], status["pid"], status["isolationMissing"]) == ("ready", 4711, ["swap limits"])
    assert process_status(None)["state"] == "stopped"


def test_tokens_are_said_where_they_are_counted() -> None:
    status = status_of(replace(SERVING, prompt_tokens=37, generated_tokens=8))
    ModelStatus.model_validate(status)
    (entry,) = status["residency"]
    assert (entry["promptTokens"], entry["generatedTokens"]) == (37, 8)
    assert not [name for name in status_of(SERVING)["residency"][0] if name.endswith("Tokens")]


def test_power_and_energy_are_said_by_who_measured_them_and_by_nobody_of_all_pods() -> None:
    report = replace(POOL, **DRAWING)
    entry = pod_entry("default-0", report)
    assert (entry["contextBytes"], entry["powerWatts"], entry["energyJoules"]) == (30, 310.5, 100.0)
    arguments = {"generation": 1, "models": 1, "refusal": None, "before": {}, "now_seconds": 2000.0}
    alone = pool_status(report=report, **arguments)
    assert (alone["contextBytes"], alone["powerWatts"], alone["energyJoules"]) == (30, 310.5, 100.0)
    composed = pool_status(report=pool_report("default", [entry, entry]), **arguments)
    assert composed["contextBytes"] == 60
    assert "powerWatts" not in composed
    assert "powerWatts" not in pod_entry("default-0", POOL)
    PoolStatus.model_validate({**alone, "pods": [entry]})
