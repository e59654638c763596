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
STARTED = subprocess.Popen


@pytest.fixture
def bench(tmp_path, monkeypatch):
    driver = rehearsal.RehearsalDriver(capacity_bytes=2 << 30)
    install(monkeypatch, driver)
    monkeypatch.setattr(gpu_bench, "Meter", rehearsal.RehearsalMeter)
    monkeypatch.setattr(gpu_rows, "ROUNDS", 2)
    monkeypatch.setattr(gpu_rows, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(gpu_rows, "GIBI", 20 << 20)
    monkeypatch.setattr(gpu_rows, "FRAME_SIZES", [16 << 20, 64 << 20])

    def zygote(arguments, **options):
        options["env"] |= {"PYTHONPATH": f"{ROOT / 'operator'}{os.pathsep}{ROOT / 'tests'}"}
        return STARTED([sys.executable, "-m", "gpu.rehearsal", arguments[-1]], **options)

    monkeypatch.setattr(gpu_bench.subprocess, "Popen", zygote)
    driver.run()
    bench = gpu_bench.Bench(tmp_path / "images", layers=1, arena_bytes=768 << 20, swaps=40)
    yield bench
    bench.close()
    assert driver.left() == {}


VLLM = """
import json, pathlib

class LLM:
    def __init__(self, model, load_format, dtype, enable_sleep_mode, **options):
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        assert (config["architectures"], config["num_hidden_layers"], config["vocab_size"]) == (["LlamaForCausalLM"], 1, 128256)
        assert (load_format, dtype, enable_sleep_mode) == ("dummy", "bfloat16", True)
        print("a line of its own")

    def sleep(self, level):
        assert level == 1

    def wake_up(self):
        pass
"""


def test_vllm_is_measured_beside_where_there_is_one(bench, tmp_path, monkeypatch, capsys):
    gpu_rows.ROWS["vllm"](bench)
    assert "not measured" in capsys.readouterr().out
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_rows.subprocess, "Popen", STARTED)
    bench.vllm = sys.executable
    gpu_rows.ROWS["vllm"](bench)
    names = [row.name for row in bench.report.rows if row.name.startswith("vLLM")]
    assert names == ["vLLM, first sleep (it pins memory)", "vLLM, sleep", "vLLM, wake"]


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
