"""The machine under measurement: one device, model processes forked from a zygote, images, and the report."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnimodel.errors import OmniError
from omnimodel.memory.devices import Frame
from omnimodel.memory.devices.cuda import CudaCopy, CudaDevice
from omnimodel.memory.devices.cuda_copy import Staged
from omnimodel.memory.devices.cuda_driver import call
from omnimodel.memory.devices.cuda_fence import Fence
from omnimodel.memory.devices.cuda_meter import Meter
from omnimodel.memory.devices.cuda_trial_link import Link

GIGA = 1e9
MEBI = 1 << 20
GIBI = 1 << 30


@dataclass
class Row:
    """One line of the table.

    Args:
        name: what was measured.
        measured: the figure, with its unit in `unit`.
        goal: what it is held against; None: for information.
        at_least: whether more is better.
    """

    name: str
    measured: float
    unit: str
    goal: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the goal is met."""
        if self.goal is None:
            return None
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal


@dataclass
class Report:
    """Everything that was measured."""

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, measured: float, unit: str, goal: float | None = None, *, at_least: bool = True) -> None:
        """Add a line, and show it at once."""
        row = Row(name, float(measured), unit, goal, at_least)
        self.rows.append(row)
        print(line_of(row), flush=True)

    def check(self, name: str, holds: bool) -> None:
        """Add a line that says 1 when something holds and 0 when not."""
        self.add(name, float(holds), "holds", 1.0)


def line_of(row: Row) -> str:
    """A row as a line of the table."""
    sign = "" if row.goal is None else f"{'>=' if row.at_least else '<='} {row.goal:g}"
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    return f"{row.name:58} {row.measured:12.4f} {row.unit:6} {sign:>10} {verdict}"


class Process:
    """A model's process, forked from the zygote."""

    def __init__(self, bench: Bench) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bench.zygote.send({}, [theirs.fileno()])
        theirs.close()
        self.pid = int(bench.zygote.answer()["pid"])
        self.link = Link(ours)
        self.fence: Fence | None = None

    def ask(self, op: str, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """A command and its answer."""
        return self.link.ask(op, descriptors, **arguments)

    def build(self, device: CudaDevice, kind: str) -> dict[str, Any]:
        """Bind a skeleton; gives the process its fence."""
        self.fence = device.fence()
        return self.ask("build", [self.fence.descriptor], kind=kind, frame_bytes=device.frame_bytes)

    def kill(self) -> None:
        """End it, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.link.sock.close()
        deadline = time.monotonic() + 30
        while os.path.exists(f"/proc/{self.pid}") and time.monotonic() < deadline:
            time.sleep(0.002)
        if self.fence:
            self.fence.close()


@dataclass
class Model:
    """A process with its image and the frames that it has."""

    process: Process
    staged: Staged
    frames: list[Frame] = field(default_factory=list)

    def start(self, device: CudaDevice, op: str = "wake", **arguments: Any) -> CudaCopy:
        """Start the copy and tell the process; its answer is still to come."""
        copy = device.copy(self.staged, self.frames, fence=self.process.fence)
        descriptors = [frame.descriptor for frame in self.frames]
        self.process.link.send({"op": op, "fence_base": copy.fence_base, **arguments}, descriptors)
        return copy


class Bench:
    """The machine under measurement: one device, one zygote, the 8B image.

    Args:
        folder: where images are written; memory-backed, or a fast disk.
        layers: of the large model; 32 is the 8B shape.
        arena_bytes: pinned.
        vllm: an interpreter that has vLLM; empty for none.
    """

    def __init__(self, folder: Path, layers: int, arena_bytes: int, swaps: int, vllm: str = "") -> None:
        self.report = Report()
        self.folder = folder
        self.layers = layers
        self.vllm = vllm
        self.kind = f"llama:{layers}"
        self.swaps = swaps
        folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.zygote_program = subprocess.Popen(
            [sys.executable, "-m", "omnimodel.memory.devices.cuda_trial", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        began = time.perf_counter()
        self.device = CudaDevice("cuda:0", arena_bytes=arena_bytes)
        self.meter = Meter(self.device.context.bus_id())
        if not self.device.arena.wait(300):
            raise OmniError("arena", "was not pinned in 300 s")
        self.report.add("arena pinned", arena_bytes / (time.perf_counter() - began) / GIGA, "GB/s")
        self.zygote = Link(ours)
        self.zygote.answer()
        self.line = 0.0
        self.model: Model | None = None
        self._tried = False
        self.packed: Staged | None = None
        self.image_sum = 0

    def large(self) -> Model:
        """The 8B model's process, bound, with its image staged and frames made; evicted."""
        if self.model is None:
            if self._tried:
                raise OmniError("large model", "could not be made; see the first row that needed it")
            self._tried = True
            self.model = self._make_large()
        return self.model

    def _make_large(self) -> Model:
        path = str(self.folder / "image")
        maker = Process(self)
        began = time.perf_counter()
        made = maker.ask("generate", path=path, kind=self.kind, seed=1)
        maker.kill()
        print(f"# image of {made['bytes']} bytes written in {time.perf_counter() - began:.1f} s", flush=True)
        self.image_sum = made["sum"]
        self.slots = made["slots"]
        began = time.perf_counter()
        staged = self.device.stage(path, made["bytes"])
        seconds = time.perf_counter() - began
        self.report.add("image read into the arena", made["bytes"] / seconds / GIGA, "GB/s")
        process = Process(self)
        process.ask("ready")
        built = process.build(self.device, self.kind)
        began = time.perf_counter()
        frames = self.device.create(built["frames"])
        self.report.add(
            "frames created", len(frames) * self.device.frame_bytes / (time.perf_counter() - began) / GIGA, "GB/s"
        )
        return Model(process, staged, frames)

    def recover(self) -> None:
        """Give the large model a new process, after a row that failed somewhere between wake and evict."""
        if self.model:
            self.model.process.kill()
            self.model.process = Process(self)
            self.model.process.build(self.device, self.kind)

    def close(self) -> None:
        """End every process and remove every file."""
        if self.model:
            self.model.process.kill()
        self.zygote.sock.close()
        self.zygote_program.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.device.close()

    def poison(self, frames: Sequence[Frame]) -> None:
        """Overwrite frames, so that what a wake finds can only have come with it."""
        for frame in frames:
            call("cuMemsetD8", frame.handle.address, 0xAA, self.device.frame_bytes)
        self.device.context.synchronize()
