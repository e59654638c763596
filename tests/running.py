"""`omni up` as a process of its own, and what is asked of it and of the machine while it runs and after."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from cli.conftest import environment
from omnimodel.cli.client import Client

START_SECONDS = 240.0  # a zygote imports torch: 10 s on a quiet machine
DEADLINE_SECONDS = 120.0


class Up:
    """A running `omni up`.

    Args:
        folder: of the manifests.
        state_dir: its state directory.
        options: further arguments.
        variables: added to its environment.
        start_seconds: how long its first line may take.
    """

    def __init__(
        self,
        folder: Path,
        state_dir: Path,
        *options: str,
        variables: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.state_dir = state_dir
        self.environment = {**environment(state_dir), **(variables or {})}
        self._start_seconds = start_seconds
        self.lines: list[str] = []
        self.messages: list[str] = []
        self._readers: list[threading.Thread] = []
        self.process = self._start("up", str(folder), "--listen", "127.0.0.1:0", *options)

    def _start(self, *arguments: str) -> subprocess.Popen[Any]:
        process = subprocess.Popen(
            [sys.executable, "-m", "omnimodel.cli", *arguments, "-o", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((process.stdout, self.lines), (process.stderr, self.messages))
        ]
        for reader in self._readers:
            reader.start()
        return process

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line)

    def ready(self) -> dict[str, Any]:
        """The first line, once it is there."""
        until(lambda: self.lines or self.process.poll() is not None, "the first line", self._start_seconds)
        assert self.lines, "".join(self.messages)
        return dict(json.loads(self.lines[0]))

    @property
    def address(self) -> str:
        return str(self.ready()["address"])

    @property
    def client(self) -> Client:
        return Client(self.address)

    def events(self, **wanted: str) -> list[dict[str, Any]]:
        """Its events so far whose fields are these."""
        found = [json.loads(line) for line in list(self.lines)[1:]]
        return [event for event in found if all(event[field] == value for field, value in wanted.items())]

    def infer(self, model: str, question: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer of a question of the inference protocol."""
        request = urllib.request.Request(
            f"{self.address}/v2/models/{model}/infer",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def omni(self, *arguments: str, timeout: float = DEADLINE_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a command against it."""
        return subprocess.run(
            [sys.executable, "-m", "omnimodel.cli", *arguments],
            capture_output=True, text=True, env=self.environment, timeout=timeout, check=False,
        )  # fmt: skip

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, *numbers: int) -> int:
        """Send signals and wait for the end; the exit code."""
        for number in numbers or (signal.SIGINT,):
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end, and for all it said; the exit code."""
        code = self.process.wait(DEADLINE_SECONDS)
        for reader in self._readers:
            reader.join(DEADLINE_SECONDS)
        return code

    def kill_all(self) -> list[psutil.Process]:
        """SIGKILL for it and everything that it started; who they were."""
        processes = [psutil.Process(self.process.pid), *self.descendants()]
        for process in processes:
            process.kill()
        self.process.wait(DEADLINE_SECONDS)
        return processes


class Terminal:
    """A command on a terminal of its own, and all that it wrote there."""

    COLUMNS, ROWS = 120, 40

    def __init__(self, *arguments: str, environment: Mapping[str, str]) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self.ROWS, self.COLUMNS, 0, 0))
        kept = {name: value for name, value in environment.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omnimodel.cli", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**kept, "TERM": "xterm"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._ours, 65536):
                self.written += chunk
        except OSError:  # how the end of a terminal is told
            pass
        os.close(self._ours)

    @property
    def text(self) -> str:
        """What was written, one picture below the other, without colours and moves of the cursor."""
        apart = re.sub(r"(\r?\x1b\[(2K|1A))+", "\n", self.written.decode(errors="replace"))  # one is wiped for the next
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", apart)

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end, and for all it wrote; the exit code."""
        code = self.process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        return code


class UpOnTerminal(Up):
    """A running `omni up` that a person looks at."""

    def _start(self, *arguments: str) -> subprocess.Popen[Any]:
        self.terminal = Terminal(*arguments, environment=self.environment)
        return self.terminal.process

    def ready(self) -> dict[str, Any]:
        """Its address, once it is told."""
        said = "\nReady at "
        until(lambda: said in self.terminal.text or self.process.poll() is not None, said, self._start_seconds)
        assert said in self.terminal.text, self.terminal.text
        return {"address": (self.state_dir / "address").read_text().strip()}


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Wait until a condition gives something true, which is returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return found


def leftovers(state_dir: Path, processes: list[psutil.Process]) -> list[str]:
    """Processes, mounts and sockets that should be gone."""
    found = [str(process) for process in processes if process.is_running() and process.status() != "zombie"]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(state_dir) in line]
    run = state_dir / "run"
    found += [str(path) for path in run.rglob("*")] if run.exists() else []
    if (state_dir / "address").exists():
        found.append("the address file")
    return found


def groups(up: Up) -> list[Path]:
    """Control groups of its models, and the groups above that all of them are in."""
    items = up.client.objects("omniprocesses")
    paths = [Path(path) for item in items for path in (item["status"].get("cgroup") or "").split(",") if path]
    return [*paths, *{path.parent for path in paths}]
