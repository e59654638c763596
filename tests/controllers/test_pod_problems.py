"""Why a pod does not serve, and what to do: a table of what kubelets, leases and agents say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omnimodel.controllers.kubernetes_pods import START_SECONDS, PodView, problem_of
from omnimodel.errors import CURES, Reason

NOW = 10_000.0
LONG_AGO = NOW - START_SECONDS - 1.0


def item(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "gpu-0", "uid": "u"}, "status": {"phase": "Running", **status}}


def ended(**terminated: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    return item(containerStatuses=[{"state": state, "lastState": {"terminated": terminated}}])


POD = PodView("gpu-0", 0, item(), {}, heard_seconds=NOW, away_seconds=None)
SILENT = replace(POD, heard_seconds=LONG_AGO, away_seconds=LONG_AGO, renewed="2026-11-30T09:00:00.123456Z")
OWN_WORDS = {"ready": False, "reason": "StoreUnavailable", "message": "its store cannot be written; mount it"}
MEMORY = "raise spec.pod.resources.memory of the pool, or have fewer models in a pod"

PROBLEMS = {
    "never heard of": (
        replace(POD, heard_seconds=None, away_seconds=LONG_AGO),
        (Reason.AGENT_SILENT, "gpu-0: its agent was never heard of", CURES[Reason.AGENT_SILENT], False),
    ),
    "silent": (
        SILENT,
        (
            Reason.AGENT_SILENT,
            "gpu-0: its agent has not been heard of since 2026-11-30T09:00:00Z",
            CURES[Reason.AGENT_SILENT],
            False,
        ),
    ),
    "silent on a node that is gone": (
        replace(SILENT, lost_node="n1"),
        (
            Reason.AGENT_SILENT,
            "gpu-0: its agent has not been heard of since 2026-11-30T09:00:00Z, and node n1 does not answer",
            CURES[Reason.NODE_SILENT],
            False,
        ),
    ),
    "its kubelet is gone": (
        replace(POD, lost_node="n1"),
        (
            Reason.NODE_SILENT,
            "gpu-0 serves, but cannot be told ready: node n1 does not answer",
            CURES[Reason.NODE_SILENT],
            False,
        ),
    ),
    "its agent says it itself": (
        replace(POD, entry=OWN_WORDS),
        (Reason.STORE_UNAVAILABLE, "gpu-0: its store cannot be written", "mount it", True),
    ),
    "out of memory again and again": (
        replace(POD, item=ended(reason="OOMKilled", exitCode=137)),
        (Reason.OUT_OF_MEMORY, "gpu-0: its container ran out of memory and was killed: back-off 40s", MEMORY, True),
    ),
    "ends with last words": (
        replace(POD, item=ended(reason="Error", exitCode=1, message="no device\n")),
        (Reason.POD_FAILED, "gpu-0: back-off 40s (no device)", CURES[Reason.POD_FAILED], True),
    ),
    "ends without a word": (
        replace(POD, item=ended(reason="Error", exitCode=1)),
        (Reason.POD_FAILED, "gpu-0: back-off 40s (exit code 1)", CURES[Reason.POD_FAILED], True),
    ),
}


@pytest.mark.parametrize("case", list(PROBLEMS))
def test_a_pod_that_does_not_serve_says_why_and_what_to_do(case: str) -> None:
    pod, (reason, problem, cure, by_hand) = PROBLEMS[case]
    found = problem_of(pod, NOW)
    assert found is not None
    assert (found[0].reason, found[0].message, found[1]) == (reason, f"{problem}; {cure}", by_hand)


def test_a_pod_that_serves_has_no_problem() -> None:
    assert problem_of(POD, NOW) is None
