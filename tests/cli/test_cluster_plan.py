"""`kubectl omni plan`: where each model is assigned, and why."""

from __future__ import annotations

from typing import Any

import pytest

from omnimodel.cli.cluster_plan import _row

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
