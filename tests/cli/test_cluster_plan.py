"""`kubectl omni plan`: where each model is assigned, and why."""

from __future__ import annotations

from typing import Any

import pytest

from omnimodel.cli.cluster_plan import _as_json, _models_of, _pods, _row
from omnimodel.cli.plan import never_together

WHY = "gpu-1 had the most room (1.20 GiB assigned)"


def model(ready: str, *, assigned: bool = True, serves: bool = True) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": "Publishing", "message": "its weights are being published"}
    return {
        "metadata": {"name": "m", "namespace": "work"},
        "spec": {"pool": "gpu"},
        "status": {
            "conditions": [condition],
            **({"assigned": [{"pod": "gpu-1", "why": WHY}]} if assigned else {}),
            **({"residency": [{"pod": "gpu-0"}]} if serves else {}),
        },
    }


@pytest.mark.parametrize(
    ("item", "pods", "why"),
    [
        pytest.param(model("True"), ["gpu-0", "gpu-1"], WHY, id="it serves where it was, and is to go elsewhere"),
        pytest.param(model("True", serves=False), ["gpu-1"], WHY, id="no agent has spoken yet"),
        pytest.param(model("True", assigned=False), ["gpu-0"], "", id="an operator that says nothing of it"),
        pytest.param(
            model("False"), ["gpu-0", "gpu-1"], "Publishing: its weights are being published", id="it does not serve"
        ),
    ],
)
def test_a_row_says_where_and_why(item: dict[str, Any], pods: list[str], why: str) -> None:
    row = _row(item)
    assert (row["model"], row["pods"], row["why"]) == ("work/m", pods, why)


def test_a_row_of_a_model_that_serves_on_says_why_it_is_refused() -> None:
    item = model("True", assigned=False)
    refused = {
        "type": "Stalled",
        "status": "True",
        "reason": "AffinityConflict",
        "message": "is to be apart from work/a",
    }
    item["status"]["conditions"].append(refused)
    assert _row(item)["why"] == "AffinityConflict: is to be apart from work/a"


def of_size(name: str, mib: int, *pods: str, namespace: str = "work", **spec: Any) -> dict[str, Any]:
    status = {
        "assigned": [{"pod": pod, "why": WHY} for pod in pods],
        "footprint": {"weightsBytes": mib << 19, "workingBytes": mib << 19},
    }
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"pool": "gpu", **spec}, "status": status}


POOL = {
    "metadata": {"name": "gpu", "namespace": "work"},
    "status": {"pods": [{"pod": f"gpu-{number}", "budgetBytes": 1 << 30} for number in range(2)]},
}
EXCLUSIVE = [
    of_size("large", 700, "gpu-0", "gpu-1"),
    of_size("middle", 500, "gpu-0"),
    of_size("kept", 100, "gpu-1", residency={"keepResident": True}),
    {**of_size("declared", 0, "gpu-1", resources={"deviceMemory": "300Mi"})},
]


def test_what_can_never_be_resident_together_is_told_pod_by_pod() -> None:
    lines = [line for pod in _pods(POOL, EXCLUSIVE) for line in never_together(pod, f" in {pod.pod}")]
    assert lines == [
        "never resident together in gpu-0 (1.0 GiB):",
        "  work/large   not with work/middle",
        "never resident together in gpu-1 (1.0 GiB less 100 MiB for the kept models):",
        "  work/large   not with work/declared",
    ]
    told = _as_json(POOL, EXCLUSIVE)["neverTogether"]
    assert [(group["pod"], group["models"]) for group in told] == [
        ("gpu-0", ["work/large", "work/middle"]),
        ("gpu-1", ["work/large", "work/declared"]),
    ]


def test_a_pool_whose_models_fit_excludes_nothing() -> None:
    assert [line for pod in _pods(POOL, EXCLUSIVE[2:]) for line in never_together(pod)] == []


def test_a_model_means_the_pool_of_its_own_namespace_before_the_common_one() -> None:
    pools = [{"metadata": {"name": name, "namespace": space}} for name, space in (("gpu", "work"), ("gpu", "default"))]
    models = [of_size("a", 1, namespace=space) for space in ("work", "default", "third")]
    models.append(of_size("b", 1) | {"spec": {"pool": "other"}})
    found = [[item["metadata"]["namespace"] for item in _models_of(pool, pools, models)] for pool in pools]
    assert found == [["work"], ["default", "third"]]
