"""Process specs as they were seen to be right; with WRITE_GOLDENS=1 in the environment they are written anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from omnimodel.api import OmniProcess, parse
from omnimodel.render import render
from render import manifests

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "device"),
    [("python", "auto"), ("command", "auto"), ("transformers", "auto"), ("vllm", "cuda"), ("sglang", "cuda")],
)
def test_a_model_renders_to_its_golden_file(name: str, device: str) -> None:
    document: dict[str, Any] = getattr(manifests, name.upper())
    process = render(manifests.model(document), manifests.pool(device={"type": device}), manifests.CONFIG)
    text = json.dumps(process.to_dict(), indent=2, sort_keys=True) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("WRITE_GOLDENS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_a_process_reads_back_from_json() -> None:
    process = render(manifests.model(manifests.PYTHON), manifests.pool(), manifests.CONFIG)
    again = parse(json.loads(json.dumps(process.to_dict())))
    assert isinstance(again, OmniProcess)
    assert again.spec == process.spec
    assert again.spec.residency.idle_after_seconds == 900
