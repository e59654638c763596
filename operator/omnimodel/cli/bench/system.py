"""A running system to measure: the one at an address, or one that is started for the benchmark and stopped after it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import psutil
import yaml

from omnimodel.agent.supply import supply
from omnimodel.catalog import load
from omnimodel.cli import output
from omnimodel.cli.check import addressed
from omnimodel.cli.client import Answer, Client
from omnimodel.cli.target import state_dir_option
from omnimodel.controllers.local_snapshot import Snapshot, decide
from omnimodel.errors import OmniError, Reason
from omnimodel.protocol import probe as known_answer

Function = TypeVar("Function", bound=Callable[..., Any])
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class System:
    """What a benchmark measures.

    Args:
        client: to talk to it.
        state_dir: where it keeps its state; None for one on another machine.
        pid: of its main process; 0 when it is not of this machine.
    """

    client: Client
    state_dir: Path | None
    pid: int

    def models(self) -> list[dict[str, Any]]:
        """Models that are Ready and have a probe."""
        return [
            item
            for item in self.client.objects("omnimodels")
            if output.condition(item, "Ready").get("status") == "True" and item.get("spec", {}).get("probe")
        ]

    def evictable(self) -> list[dict[str, Any]]:
        """Those of the models that are not kept resident."""
        return [item for item in self.models() if not (item["spec"].get("residency") or {}).get("keepResident")]

    def ask(self, item: dict[str, Any], timeout_seconds: float = 300.0) -> Answer:
        """Send a model its probe."""
        asked = known_answer.request(addressed(item["spec"]["probe"], output.full_name(item)))
        return self.client.request(asked.method, asked.path, asked.body, asked.headers, timeout_seconds)

    def wrong(self, item: dict[str, Any], answer: Answer) -> list[str]:
        """What is wrong with an answer to the probe."""
        return known_answer.failures(item["spec"]["probe"], answer.status, answer.headers, answer.body)

    def wakes(self) -> int:
        """How many wakes there have been, of all models."""
        return sum(
            int(entry.get("wakes", 0))
            for item in self.client.objects("omnimodels")
            for entry in item["status"].get("residency", ())
        )

    def footprint(self) -> tuple[int, int]:
        """Anonymous bytes and open descriptors of the main process and all that it started; zeros elsewhere.

        Frames are in neither: how many there are follows from the budget, and is in the ledger.
        """
        if not self.pid:
            return 0, 0
        anonymous_bytes = descriptors = 0
        root = psutil.Process(self.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                anonymous_bytes += _anonymous_bytes(process.pid)
                descriptors += sum(1 for name in _open_files(process.pid) if not name.startswith("/memfd:"))
        return anonymous_bytes, descriptors


def _anonymous_bytes(pid: int) -> int:
    """Memory without a file behind it, what is shared after a fork in equal parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield str(descriptor.readlink())


def system_options(function: Function) -> Function:
    """Add `--address`, `--catalog` and `--state-dir`."""
    address = click.option("--address", envvar="OMNI_ADDRESS", metavar="URL", help="Measure the system there.")
    catalog = click.option(
        "--catalog",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        default=Path("examples/catalog"),
        show_default=True,
        help="Without an address: start a system on these manifests.",
    )
    return address(catalog(state_dir_option(function)))


def frame_bytes(catalog: Path) -> int:
    """The size of a frame in the pool that a folder of manifests is served from."""
    return supply(decide(Snapshot(load(catalog), {}, {}, "", None)).pool).frame_bytes


@contextlib.contextmanager
def on_one_thread(catalog: Path) -> Iterator[Path]:
    """A copy of a folder of manifests, for as long as the context lasts, whose chat models compute on one thread."""
    with tempfile.TemporaryDirectory() as name:
        for number, file in enumerate(sorted(catalog.rglob("*.y*ml"))):
            documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
            for document in documents:
                runtime = ((document or {}).get("spec") or {}).get("runtime") or {}
                if runtime.get("task") == "text-generation":
                    runtime["threads"] = 1
            (Path(name) / f"{number}.yaml").write_text(yaml.safe_dump_all(documents), encoding="utf-8")
        yield Path(name)


@contextlib.contextmanager
def running(address: str | None, catalog: Path, state_dir: Path) -> Iterator[System]:
    """The system at an address, or one of its own on the state directory for as long as the context lasts.

    Raises:
        OmniError: it did not become ready.
    """
    if address:
        yield System(Client(address), None, 0)
        return
    command = [sys.executable, "-m", "omnimodel.cli"]
    command += ["up", str(catalog), "--listen", "127.0.0.1:0", "--state-dir", str(state_dir), "-o", "json"]
    click.echo(f"starting a system on {catalog} (the first time it fetches and publishes every model)", err=True)
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, start_new_session=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                messages.seek(0)
                said = messages.read().decode(errors="replace").strip()
                raise OmniError("the measured system", f"it did not start: {said}", reason=Reason.CRASHED)
            ready = json.loads(line)
            for failure in ready.get("failed", ()):
                click.echo(f"not measured: {failure['model']}: {failure['message']}", err=True)
            yield System(Client(ready["address"]), state_dir, process.pid)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a system and everything that it started."""
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    if process.stdout is not None:
        process.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
        return
    process.kill()
    process.wait()
