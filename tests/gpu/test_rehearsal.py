"""The GPU benchmark, rehearsed: so that a GPU's time, when there is one, is not spent on finding out that it is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from gpu import rehearsal
from gpu.emulated import install
from omnimodel.cli.bench import gpu_bench, gpu_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    driver = rehearsal.RehearsalDriver(capacity_bytes=2 << 30)
    install(monkeypatch, driver)
    monkeypatch.setattr(gpu_bench, "Meter", rehearsal.RehearsalMeter)
    monkeypatch.setattr(gpu_rows, "ROUNDS", 2)
    monkeypatch.setattr(gpu_rows, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(gpu_rows, "GIBI", 20 << 20)
    monkeypatch.setattr(gpu_rows, "FRAME_SIZES", [16 << 20, 64 << 20])
    started = subprocess.Popen

    def zygote(arguments, **options):
        options["env"] |= {"PYTHONPATH": f"{ROOT / 'operator'}{os.pathsep}{ROOT / 'tests'}"}
        return started([sys.executable, "-m", "gpu.rehearsal", arguments[-1]], **options)

    monkeypatch.setattr(gpu_bench.subprocess, "Popen", zygote)
    driver.run()
    bench = gpu_bench.Bench(tmp_path / "images", layers=1, arena_bytes=768 << 20, swaps=40)
    yield bench
    bench.close()
    assert driver.left() == {}


@pytest.mark.slow
def test_every_row_can_be_measured_and_every_byte_is_right(bench):
    for name in ("line", "spawn", "frames", "wake", "compressed", "first_token", "park", "faults", "many"):
        gpu_rows.ROWS[name](bench)
    found = {row.name: row for row in bench.report.rows}
    assert [row.name for row in found.values() if row.unit == "holds" and row.measured != 1] == []
    assert found["outputs that differ from the first"].measured == 0
    assert found["models on one budget"].met
    assert 10 < found["bits a weight"].measured < 12
    assert found["first token after wake, compressed"].measured > 0
