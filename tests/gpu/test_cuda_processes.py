"""Model processes on a real GPU: swaps, fences, graphs, parking and faults, between an agent and forked processes."""

from __future__ import annotations

import os

import pytest

from omnimodel.memory.devices.cuda_driver import available

if not available():
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

from omnimodel.cli.bench.gpu_bench import Bench, Model, Process
from omnimodel.memory.devices.cuda_checkpoint import park, unpark

pytestmark = pytest.mark.gpu
KIND = "stack:15"  # 120 MiB: two frames


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("images"), layers=1, arena_bytes=2 << 30, swaps=0)
    yield bench
    bench.close()


@pytest.fixture
def model(bench):
    process = Process(bench)
    path = str(bench.folder / "image")
    made = process.ask("generate", path=path, kind=KIND, seed=1)
    model = Model(process, bench.device.stage(path, made["bytes"]))
    process.build(bench.device, KIND)
    model.frames = bench.device.create(2)
    model.sum = made["sum"]
    yield model
    if os.path.exists(f"/proc/{model.process.pid}"):
        model.process.kill()
    bench.device.destroy(model.frames)
    bench.device.unstage(model.staged)


def wake(bench, model, op="wake"):
    copy = model.start(bench.device, op)
    reply = model.process.link.answer()
    copy.wait(30)
    return reply


def test_a_graph_replays_right_after_a_swap_behind_the_copy(bench, model):
    wake(bench, model)
    digest = model.process.ask("capture")["digest"]
    for _turn in range(20):
        model.process.ask("evict")
        bench.poison(model.frames)
        assert wake(bench, model, "cycle")["digest"] == digest


def test_park_leaves_nothing_and_unpark_goes_on(bench, model):
    wake(bench, model)
    digest = model.process.ask("capture")["digest"]
    model.process.ask("evict")
    park(model.process.pid, frames_mapped=False)
    assert bench.meter.process_bytes().get(model.process.pid, 0) == 0
    unpark(model.process.pid)
    bench.poison(model.frames)
    assert wake(bench, model, "cycle")["digest"] == digest


def test_writing_into_a_frame_ends_the_process_that_does_and_nobody_else(bench, model):
    wake(bench, model)
    with pytest.raises((RuntimeError, EOFError)):
        model.process.ask("write")
    model.process.kill()
    model.process = Process(bench)
    model.process.build(bench.device, KIND)
    wake(bench, model)
    assert model.process.ask("sum")["sum"] == model.sum


def test_a_process_killed_while_its_stream_waits_is_gone_and_its_frames_are_good(bench, model):
    wake(bench, model)
    model.process.ask("stuck")
    model.process.kill()
    model.process = Process(bench)
    model.process.build(bench.device, KIND)
    bench.poison(model.frames)
    wake(bench, model)
    assert model.process.ask("sum")["sum"] == model.sum
