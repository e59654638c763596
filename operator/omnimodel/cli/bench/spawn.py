"""`omni bench spawn`: from the fork request to a bound process in its sandbox, against a fresh interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from omnimodel.agent.confinement import serving_request
from omnimodel.agent.layout import Layout
from omnimodel.agent.preparation import FOREIGN_ENGINES, Preparation, Prepared
from omnimodel.agent.process import ModelProcess
from omnimodel.agent.spawner import Spawner
from omnimodel.agent.supply import supply
from omnimodel.catalog import load
from omnimodel.cli.bench.report import Report, json_option, median
from omnimodel.cli.target import state_dir_option
from omnimodel.controllers.local_snapshot import Snapshot, decide
from omnimodel.controllers.local_state import StateLock
from omnimodel.errors import OmniError
from omnimodel.memory.image import ASSETS_FOLDER
from omnimodel.protocol.channel import AsyncChannel, socket_pair
from omnimodel.protocol.process import Envelope, Reply, Start, decode

READY_SECONDS = 300.0
QUIET_SECONDS = 0.5  # before a spawn, in which the zygote makes its spare as it does on an agent at rest
MEMORY_BYTES = 2 << 30  # limit of a measured process: enough for every example
IMPORTS = "from omnimodel.runtime.preload import PRELOAD, preload\npreload(PRELOAD, lambda *_: None)\n"
FRESH = (
    "import socket, sys\n"
    "from omnimodel.protocol.channel import Channel\n"
    "from omnimodel.runtime.serve import run\n"
    "run(Channel(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2], {})\n"
)
# What the zygote's environment has too, so that both do the same.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Subject:
    """A model to be measured."""

    name: str
    spec: dict[str, Any]
    prepared: Prepared

    @property
    def has_tokenizer(self) -> bool:
        """Whether a vocabulary was published with its weights, which a process holds for itself."""
        image = self.prepared.image
        return image is not None and any((image.path / ASSETS_FOLDER).glob("*token*"))


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Spawns of each model.")
@click.option("--fresh", type=click.IntRange(min=1), default=1000, help="Models that are also started in a fresh "
              "interpreter, all by default; each takes 3 to 15 s.")  # fmt: skip
@click.option("--catalog", type=click.Path(exists=True, file_okay=False, path_type=Path),
              default=Path("examples/catalog"), show_default=True, help="The models.")  # fmt: skip
@json_option
@state_dir_option
def command(rounds: int, fresh: int, catalog: Path, json_path: Path | None, state_dir: Path) -> None:
    """Measure how fast processes are made, and what an idle one holds."""
    report = Report("spawn")
    with StateLock(state_dir):
        asyncio.run(_measure(report, catalog, state_dir.resolve(), rounds, fresh))
    report.finish(json_path)


async def _measure(report: Report, catalog: Path, state_dir: Path, rounds: int, fresh: int) -> None:
    layout = Layout(state_dir)
    layout.make()
    spawner = await Spawner.open(layout.root)
    try:
        began = time.perf_counter()
        zygote = await spawner.zygotes.start()
        report.add("start of the zygote, once", time.perf_counter() - began, "s", note="imports torch and transformers")
        report.add("private memory of the zygote, once", zygote.private_bytes / (1 << 20), "MiB")
        subjects = await _prepared(report, catalog, layout, spawner)
        forks: list[float] = []
        hurried: list[float] = []
        idle: list[float] = []
        untokenized: list[float] = []
        by_model: dict[str, float] = {}
        for subject in subjects:
            try:
                spawns, private_bytes = await _spawns(subject, layout, spawner, rounds, QUIET_SECONDS)
                hurried += (await _spawns(subject, layout, spawner, rounds + 1, 0.0))[0][1:]
            except OmniError as error:
                report.failures.append(str(error))
                continue
            by_model[subject.name] = median(spawns)
            forks += spawns
            idle.append(private_bytes)
            if not subject.has_tokenizer:
                untokenized.append(private_bytes)
            report.add(f"fork to ready {subject.name}", median(spawns) * 1000, "ms")
            report.add(f"idle private memory {subject.name}", private_bytes / (1 << 20), "MiB")
        report.add("idle private memory, median", median(idle) / (1 << 20), "MiB", note=f"{len(idle)} models")
        report.add(
            "idle private memory without a tokenizer, median",
            median(untokenized) / (1 << 20),
            "MiB",
            goal=30.0,
            note=f"{len(untokenized)} models",
        )
        ratios: list[float] = []
        bare_ratios: list[float] = []
        for subject in [subject for subject in subjects if subject.name in by_model][:fresh]:
            seconds, bare_seconds = await _fresh(subject, IMPORTS + FRESH), await _fresh(subject, FRESH)
            ratios.append(seconds / by_model[subject.name])
            bare_ratios.append(bare_seconds / by_model[subject.name])
            note = (
                f"{ratios[-1]:.0f} times; {bare_seconds:.3g} s and {bare_ratios[-1]:.0f} times with what it needs only"
            )
            report.add(f"fresh interpreter {subject.name}", seconds, "s", note=note)
        report.add(
            "fork to ready, median",
            median(forks) * 1000,
            "ms",
            note=f"{len(forks)} spawns, isolation {spawner.reached.level}",
        )
        report.add("the same, one right after another", median(hurried) * 1000, "ms", note=f"{len(hurried)} spawns")
        report.add(
            "times faster than a fresh interpreter",
            median(ratios) if ratios else 0.0,
            goal=50.0,
            at_least=True,
            note=f"with the same libraries, no sandbox; median of {len(ratios)} models",
        )
        report.add(
            "times faster than with what a model needs only",
            median(bare_ratios) if bare_ratios else 0.0,
            goal=50.0,
            at_least=True,
            note="a program as one would write it for this model alone",
        )
    finally:
        await spawner.close()


async def _prepared(report: Report, catalog: Path, layout: Layout, spawner: Spawner) -> list[Subject]:
    """The models of a catalogue that use frames, published where they are not yet."""
    desired = decide(Snapshot(load(catalog), {}, {}, "", None))
    found = supply(desired.pool)
    preparation = Preparation(layout, spawner, found.device, found.frame_bytes, found.threads)
    subjects = []
    for process in desired.processes:
        spec = process.spec.to_dict()
        if spec["engine"] in FOREIGN_ENGINES:
            continue
        click.echo(f"preparing {process.key}", err=True)
        try:
            prepared = await preparation.prepare(f"OmniModel {process.key}", spec, _unheard)
        except OmniError as error:
            report.failures.append(str(error))
            continue
        subjects.append(Subject(spec["model"]["name"], spec, prepared))
    return subjects


def _unheard(phase: str, progress: float) -> None:
    """Progress that nobody is shown."""
    del phase, progress


async def _spawns(
    subject: Subject, layout: Layout, spawner: Spawner, rounds: int, quiet_seconds: float
) -> tuple[list[float], float]:
    """Seconds of each spawn until ready, and the median of the private bytes then."""
    seconds, private_bytes = [], []
    for number in range(rounds):
        await asyncio.sleep(quiet_seconds)
        began = time.perf_counter()
        async with _process(subject, layout, spawner, number) as process:
            seconds.append(time.perf_counter() - began)
            private_bytes.append(float(psutil.Process(process.pid).memory_full_info().uss))
    return seconds, median(private_bytes)


@contextlib.asynccontextmanager
async def _process(subject: Subject, layout: Layout, spawner: Spawner, number: int) -> AsyncIterator[ModelProcess]:
    """A process of a model, bound and ready; killed at the end."""
    request = serving_request(
        f"OmniModel {subject.name}",
        subject.spec,
        layout,
        subject.prepared,
        devices=(subject.prepared.device,),
        memory_bytes=MEMORY_BYTES,
        number=number,
    )
    process = await spawner.spawn(request)
    try:
        await process.command(_start(subject, subject.prepared.inside(process)), (), READY_SECONDS)
        yield process
    finally:
        process.kill()
        await process.released


def _start(subject: Subject, image: str) -> Start:
    prepared = subject.prepared
    return Start(subject.spec, image, prepared.image_bytes, prepared.frame_bytes, prepared.device, prepared.threads)


async def _fresh(subject: Subject, program: str) -> float:
    """Seconds that a new interpreter takes for the same: imports, module, binding; without fork, sandbox and limits."""
    ours, theirs = socket_pair()
    channel = AsyncChannel(ours)
    folder = await asyncio.to_thread(tempfile.mkdtemp)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.path.join(folder, "socket"))
    listener.listen()
    paths = [str(subject.prepared.environment)] if subject.prepared.environment else []
    paths += [path for path in sys.path if path]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(theirs.fileno()), "fresh", pass_fds=(theirs.fileno(),), env=environment
    )
    theirs.close()
    image = str(subject.prepared.image.path) if subject.prepared.image else ""
    envelope = Envelope(1, subject.spec["generation"], "fresh", _start(subject, image))
    try:
        await channel.send(envelope.to_message(), (listener.fileno(),))
        async with asyncio.timeout(READY_SECONDS):
            while not isinstance(reply := decode((await channel.receive())[0]), Reply):
                pass
        if not reply.ok:
            raise OmniError(f"OmniModel {subject.name}", f"a fresh interpreter could not build it: {reply.message}")
        return time.perf_counter() - began
    finally:
        process.kill()
        await process.wait()
        channel.close()
        listener.close()
        os.unlink(os.path.join(folder, "socket"))
        os.rmdir(folder)
