"""What a pool means on a machine with a GPU, on one without, and what a process of a model is given of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from agent.world import World
from gpu.emulated import EmulatedDriver
from omnimodel.agent.agent import Agent
from omnimodel.agent.confinement import serving_request
from omnimodel.agent.layout import Layout
from omnimodel.agent.preparation import Prepared
from omnimodel.agent.supply import Machine, supply
from omnimodel.api import OmniPool
from omnimodel.errors import LedgerError, OmniError
from omnimodel.memory.arena import Arena
from omnimodel.memory.devices import cuda_driver
from omnimodel.memory.ledger import Account, Kind

GIB = 1 << 30
MACHINE = Machine(total_bytes=16 * GIB, available_bytes=12 * GIB)


def pool(**device) -> OmniPool:
    return OmniPool.model_validate({"metadata": {"name": "default"}, "spec": {"device": device}})


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU of 40 GiB, the third of its node."""
    monkeypatch.setattr(cuda_driver, "_loaded", [EmulatedDriver(capacity_bytes=40 * GIB)])
    monkeypatch.setattr(cuda_driver, "CONTROL_NODE", "/dev/null")
    information = tmp_path / "0000:00:00.0" / "information"
    information.parent.mkdir()
    information.write_text("Model: \t\t Emulated\nDevice Minor: \t 2\n")
    monkeypatch.setattr(cuda_driver, "GPUS", tmp_path)
    return information


@pytest.mark.parametrize(
    ("device", "budget_bytes", "frame_bytes"),
    [
        pytest.param({"type": "cuda"}, 36 * GIB, 64 << 20, id="left to the machine"),
        pytest.param({"type": "cuda", "memory": "50%"}, 20 * GIB, 64 << 20, id="a share of the device"),
        pytest.param({"type": "cuda", "memory": "3Gi", "frameSize": "32Mi"}, 3 * GIB, 32 << 20, id="quantities"),
        pytest.param({"type": "cuda", "memory": 100 << 20}, 64 << 20, 64 << 20, id="whole frames"),
    ],
)
def test_a_pool_on_a_gpu(gpu, device, budget_bytes, frame_bytes):
    found = supply(pool(**device), MACHINE)
    assert (found.device, found.budget_bytes, found.frame_bytes) == ("cuda:0", budget_bytes, frame_bytes)
    assert (found.host_bytes, found.arena_bytes) == (6 * GIB, 6 * GIB * 3 // 4)
    assert found.auto_dtype == "bfloat16"


@pytest.mark.parametrize(("asked", "served"), [(None, 1), (1, 1), (2, 2), (3, 3), (8, 3)])
def test_a_pool_on_as_many_gpus_as_it_asks_for_and_there_are(gpu, monkeypatch, asked, served):
    monkeypatch.setattr(cuda_driver, "_loaded", [EmulatedDriver(capacity_bytes=40 * GIB, devices=3)])
    wished = {"type": "cuda", "memory": "50%"} | ({} if asked is None else {"count": asked})
    found = supply(pool(**wished), MACHINE)
    assert found.budgets == {f"cuda:{number}": 20 * GIB for number in range(served)}
    assert (found.device, found.budget_bytes) == ("cuda:0", served * 20 * GIB)


@pytest.mark.parametrize("wished", ["cpu", "auto"])
def test_beside_a_gpu_the_cpu_serves_unless_cuda_is_wished(gpu, wished):
    found = supply(pool(type=wished), MACHINE)
    assert (found.device, found.arena_bytes, found.auto_dtype) == ("host", 0, "")


async def test_without_a_gpu_cuda_is_refused_and_the_pool_says_why(tmp_path):
    world = World(tmp_path)
    wished = pool(type="cuda")
    agent = Agent(tmp_path / "state")
    await agent.start()
    try:
        with pytest.raises(OmniError, match="no NVIDIA GPU that can be used"):
            await agent.apply([], wished)
        report = agent.report().pool
        assert not report.ready
        assert "no NVIDIA GPU" in report.message
        await agent.apply([], world.pool)
        assert agent.report().pool.ready
    finally:
        await agent.stop(0.0)


def test_without_a_gpu_auto_is_the_host_and_loads_nothing_of_cuda():
    code = """
import sys
from omnimodel.agent.supply import Machine, supply
from omnimodel.api import OmniPool
found = supply(OmniPool.model_validate({"metadata": {"name": "p"}, "spec": {}}), Machine(8 << 30, 8 << 30))
assert found.device == "host"
loaded = [name for name in sys.modules if name.split(".")[0] in {"torch", "triton", "cuda", "pynvml"}]
assert not loaded, loaded
parts = [name for name in sys.modules if name.startswith("omnimodel.memory.devices.cuda")]
assert parts == ["omnimodel.memory.devices.cuda_driver"], parts
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": "operator"})


def test_on_a_machine_without_a_driver_omni_up_imports_nothing_of_cuda():
    code = """
import os, sys
import omnimodel.cli

from omnimodel.cli import up
import omnimodel.agent.agent, omnimodel.controllers.local, omnimodel.gateway.app, omnimodel.runtime.zygote
from omnimodel.runtime.preload import PRELOAD
if not os.path.exists("/dev/nvidiactl"):
    loaded = {name for name in sys.modules if name.split(".")[0] in {"torch", "triton", "cuda", "pynvml"}}
    assert not loaded, loaded
    assert not [name for name in PRELOAD if "cuda" in name], PRELOAD
    parts = {name for name in sys.modules if name.startswith("omnimodel.memory.devices.cuda")}
    assert parts == {"omnimodel.memory.devices.cuda_driver"}, parts
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": "operator"})


SPEC = {
    "model": {"namespace": "default", "name": "m"}, "generation": 1, "engine": "python", "workingDir": "",
    "limits": {"tmpBytes": 1, "shmBytes": 1, "processes": 1, "cpuMillis": 0}, "isolationLevel": "process",
    "identity": {"uid": 1, "hostname": "m"}, "network": False, "mounts": [], "env": {"A": "b"},
    "environment": {"paths": []},
}  # fmt: skip
ON_GPU = Prepared(None, None, None, 64 << 20, "cuda:0", 1)


def request(tmp_path: Path, prepared: Prepared):
    return serving_request(
        "model", SPEC, Layout(tmp_path), prepared, devices=(prepared.device,), memory_bytes=1, number=1
    )


def test_a_process_is_shown_its_gpu_and_no_other(gpu, tmp_path):
    made = request(tmp_path, ON_GPU)
    assert made.plan.devices == ("/dev/null", "/dev/nvidia-uvm", "/dev/nvidia2")
    assert made.env["CUDA_VISIBLE_DEVICES"] == "GPU-00000000-0000-0000-0000-000000000000"
    assert made.env["A"] == "b"
    made = request(tmp_path, replace(ON_GPU, device="host"))
    assert made.plan.devices == ()
    assert "CUDA_VISIBLE_DEVICES" not in made.env


def test_a_process_over_two_gpus_is_shown_both_in_order_and_each_node_once(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_driver, "_loaded", [EmulatedDriver(capacity_bytes=40 * GIB, devices=3)])
    other = gpu.parents[1] / "0000:02:00.0"
    other.mkdir()
    (other / "information").write_text("Device Minor: \t 5\n")
    devices = ("cuda:0", "cuda:2")
    made = serving_request("model", SPEC, Layout(tmp_path), ON_GPU, devices=devices, memory_bytes=1, number=1)
    assert made.plan.devices == ("/dev/null", "/dev/nvidia-uvm", "/dev/nvidia2", "/dev/nvidia5")
    assert made.env["CUDA_VISIBLE_DEVICES"].split(",") == [
        "GPU-00000000-0000-0000-0000-000000000000",
        "GPU-00000000-0000-0000-0000-000000000002",
    ]


def test_a_gpu_whose_node_nobody_knows_is_not_given_away(gpu, tmp_path):
    gpu.write_text("Model: \t\t Emulated\n")
    with pytest.raises(OmniError, match="does not say its minor number"):
        request(tmp_path, ON_GPU)


class Pinning:
    """A device that pins memory for images."""

    pinned_bytes, page_bytes, stream_bytes = 6 << 20, 2 << 20, 0

    def stage(self, path: str, image_bytes: int, *, whole: bool) -> str:
        return path if whole else f"{path} in parts"

    def unstage(self, staged: str) -> None:
        pass


def image(name: str, stored_bytes: int) -> SimpleNamespace:
    """An image that is packed to two thirds."""
    return SimpleNamespace(digest=name, bytes=stored_bytes * 3 // 2, stored_bytes=stored_bytes, image=name)


async def test_an_image_larger_than_what_is_pinned_goes_through_parts_of_it_and_stays_nowhere():
    host = Account("host", 10 << 20, measured=True)
    device = Pinning()
    device.stream_bytes = 4 << 20
    arena = Arena(device, host)
    worth = {"a": 1.0, "b": 2.0}.get
    for name in "ab":
        await arena.stage(image(name, 2 << 20), worth)
    async with arena.staged(image("c", 7 << 20), worth) as staged:
        assert staged == "c in parts"
        assert (arena.holds("a"), arena.holds("b"), arena.holds("c")) == (False, True, False)
        assert arena.held_bytes == 6 << 20  # the least worth has gone, for the parts and no more
        async with arena.staged(image("b", 2 << 20), worth):
            with pytest.raises(LedgerError, match="needs 8388608 bytes of the arena, 0 could be free"):
                await arena.stage(image("d", 7 << 20), worth)
    assert arena.held_bytes == 2 << 20
    await arena.stage(image("a", 4 << 20), worth)  # the parts are free for others
    assert host.held_bytes(kind=Kind.ARENA) == 6 << 20
    await arena.close()
    assert arena.held_bytes == 0


async def test_an_image_that_has_room_only_beside_those_in_use_is_read_on_the_way():
    device = Pinning()
    device.stream_bytes = 2 << 20
    arena = Arena(device, Account("host", 10 << 20, measured=True))
    async with arena.staged(image("a", 4 << 20), lambda _: 0.0) as first:
        assert first == "a"
        async with arena.staged(image("b", 4 << 20), lambda _: 0.0) as second:
            assert second == "b in parts"
    async with arena.staged(image("b", 4 << 20), lambda _: 0.0) as second:
        assert second == "b"
    await arena.close()


async def test_an_arena_that_could_not_be_pinned_whole_has_what_there_is_and_the_host_has_the_rest():
    host, device = Account("host", 10 << 20, measured=True), Pinning()
    arena = Arena(device, host)
    await arena.stage(image("a", 4 << 20), lambda _: 0.0)
    device.pinned_bytes = 4 << 20
    await arena.stage(image("b", 2 << 20), lambda _: 0.0)
    assert (arena.holds("a"), arena.holds("b")) == (False, True)
    assert host.held_bytes(kind=Kind.ARENA) == 4 << 20
    with pytest.raises(LedgerError, match="needs 6291456 bytes of the arena, 4194304 could be free"):
        await arena.stage(image("c", 6 << 20), lambda _: 0.0)
    device.pinned_bytes = 0
    with pytest.raises(LedgerError, match="0 could be free"):
        await arena.stage(image("d", 2 << 20), lambda _: 0.0)
    assert arena.short_bytes(image("d", 2 << 20)) == 0  # no process that ends would make room for it
    assert host.held_bytes() == 0
    await arena.close()


async def test_what_is_pinned_for_images_is_held_from_the_start_and_lent_to_nobody():
    host = Account("host", 10 << 20, measured=True)
    arena = Arena(Pinning(), host)
    assert host.held_bytes(kind=Kind.ARENA) == 6 << 20
    one, two = (image(name, (2 << 20) + 1) for name in "ab")
    await arena.stage(one, lambda _: 0.0)
    assert arena.held_bytes == 4 << 20  # an image takes whole pages
    await arena.stage(two, lambda _: 0.0)  # the first goes for it
    assert (arena.holds("a"), arena.holds("b")) == (False, True)
    assert arena.give_up(1, lambda _: 0.0) == 0
    large = image("c", 7 << 20)
    assert arena.short_bytes(large) == 0  # no process that ends would make room for it
    with pytest.raises(LedgerError, match="needs 8388608 bytes of the arena"):
        await arena.stage(large, lambda _: 0.0)
    assert host.held_bytes() == 6 << 20
    await arena.close()
