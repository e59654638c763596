"""`omni up` as a person runs it: a process, a folder that is edited, Ctrl-C, kill -9, and nothing left behind.

The model is a linear layer, but everything around it is the real thing: zygote, sandbox, image, frames, gateway.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.conftest import environment
from cli.linear import POOL, QUESTION, write_linear, write_weights
from omnimodel.protocol.admin import OBJECTS_PATH

pytestmark = pytest.mark.slow
START_SECONDS = 240.0  # a zygote imports torch: 10 s on a quiet machine
DEADLINE_SECONDS = 120.0


class Up:
    """A running `omni up`."""

    def __init__(self, folder: Path, state_dir: Path, *options: str) -> None:
        self.state_dir = state_dir
        self.environment = environment(state_dir)
        command = [sys.executable, "-m", "omnimodel.cli", "up", str(folder), "--listen", "127.0.0.1:0", "-o", "json"]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.messages: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.messages))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line)

    def ready(self) -> dict[str, Any]:
        """The first line, once it is there."""
        until(lambda: self.lines or self.process.poll() is not None, "the first line", START_SECONDS)
        assert self.lines, "".join(self.messages)
        return dict(json.loads(self.lines[0]))

    @property
    def address(self) -> str:
        return str(self.ready()["address"])

    def ask(self, model: str) -> tuple[int, Any]:
        """Status and answer of the question."""
        request = urllib.request.Request(
            f"{self.address}/v2/models/{model}/infer",
            json.dumps(QUESTION).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def value(self, model: str) -> float | None:
        """The first number of the answer; None when there is none."""
        status, answer = self.ask(model)
        return float(answer["outputs"][0]["data"][0]) if status == 200 else None

    def omni(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "omnimodel.cli", *arguments],
            capture_output=True, text=True, env=self.environment, timeout=120, check=False,
        )  # fmt: skip

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, *numbers: int) -> int:
        """Send signals and wait for the end; the exit code."""
        for number in numbers or (signal.SIGINT,):
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_SECONDS)
        for reader in self._readers:
            reader.join(DEADLINE_SECONDS)
        return code


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return found


def leftovers(state_dir: Path, processes: list[psutil.Process]) -> list[str]:
    """Processes, mounts, control groups and sockets that should be gone."""
    found = [str(process) for process in processes if process.is_running() and process.status() != "zombie"]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(state_dir) in line]
    run = state_dir / "run"
    found += [str(path) for path in run.rglob("*")] if run.exists() else []
    if (state_dir / "address").exists():
        found.append("the address file")
    return found


def groups(up: Up) -> list[Path]:
    """Control groups of its models, and the groups above that all of them are in."""
    items = json.loads(up.omni("get", "processes", "-o", "json").stdout)["items"]
    paths = [Path(path) for item in items for path in (item["status"].get("cgroup") or "").split(",") if path]
    return [*paths, *{path.parent for path in paths}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue with one model and a pool, and the weights."""
    root = tmp_path_factory.mktemp("up")
    root.chmod(0o755)
    (root / "catalog").mkdir()
    write_weights(root / "weights.safetensors")
    (root / "catalog" / "pool.yaml").write_text(POOL)
    write_linear(root / "catalog", "one", root / "weights.safetensors")
    return root


@pytest.fixture(scope="module")
def up(place: Path) -> Iterator[Up]:
    running = Up(place / "catalog", place / "state")
    yield running
    if running.process.poll() is None:
        running.stop()


def test_the_first_line_says_ready_and_where(up: Up) -> None:
    first = up.ready()
    assert first["ready"] is True
    assert first["failed"] == []
    assert (up.state_dir / "address").read_text().strip() == first["address"]
    assert up.value("one") == 6.0


def test_every_line_of_stdout_is_a_json_object(up: Up) -> None:
    until(lambda: len(up.lines) > 1, "an event")
    assert all(isinstance(json.loads(line), dict) for line in list(up.lines))


def test_a_second_one_on_the_state_directory_is_refused(up: Up, place: Path) -> None:
    up.ready()
    second = Up(place / "catalog", place / "state")
    assert second.process.wait(DEADLINE_SECONDS) == 1
    message = until(lambda: "".join(second.messages), "its message")
    assert f"pid {up.process.pid}" in message
    assert "--state-dir" in message
    assert not second.lines
    assert up.value("one") == 6.0


def test_check_passes(up: Up) -> None:
    up.ready()
    done = up.omni("check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_file_is_a_new_model(up: Up, place: Path) -> None:
    up.ready()
    path = write_linear(place / "catalog", "two", place / "weights.safetensors", shift=1.0)
    until(lambda: up.value("two") == 7.0, "the new model's answer")
    path.unlink()
    until(lambda: up.ask("two")[0] == 404, "the deleted model to be unknown")
    assert up.value("one") == 6.0


def test_an_edit_is_rolled_without_an_error_in_between(up: Up, place: Path) -> None:
    up.ready()
    write_linear(place / "catalog", "three", place / "weights.safetensors")
    until(lambda: up.value("three") == 6.0, "the first version")
    write_linear(place / "catalog", "three", place / "weights.safetensors", shift=10.0)
    seen: list[float | None] = []

    def rolled() -> bool:
        seen.append(up.value("three"))
        return seen[-1] == 16.0

    until(rolled, "the second version")
    assert set(seen) <= {6.0, 16.0}, "every request must be answered while a model is rolled"


def test_a_broken_file_changes_nothing(up: Up, place: Path) -> None:
    up.ready()
    path = place / "catalog" / "one.yaml"
    good = path.read_text()
    path.write_text(good.replace("engine: python", "engine: pyhton"))
    shown = until(lambda: "one.yaml" in (text := up.omni("get", "models").stderr) and text, "the error")
    assert "python" in shown
    assert up.value("one") == 6.0
    path.write_text(good)
    until(lambda: "one.yaml" not in up.omni("get", "models").stderr, "the error to go")


def test_objects_have_what_scripts_rely_on(up: Up) -> None:
    up.value("one")
    (pool,) = json.loads(up.omni("get", "pools", "-o", "json").stdout)["items"]
    assert pool["status"]["budgetBytes"] == 512 << 20
    assert pool["status"]["residentBytes"] > 0
    assert pool["status"]["isolation"]["level"] in {"namespaces", "landlock", "process"}
    (model,) = json.loads(up.omni("get", "models", "one", "-o", "json").stdout)["items"]
    (entry,) = model["status"]["residency"]
    assert entry["tier"] == "resident"
    assert psutil.pid_exists(entry["pid"])
    assert entry["wakes"] >= 1
    assert model["status"]["footprint"]["weightsBytes"] > 0
    assert model["status"]["footprint"]["workingBytes"] > 0


def test_wake_and_evict_move_the_tier(up: Up) -> None:
    up.value("one")
    assert json.loads(up.omni("evict", "one", "-o", "json").stdout)["tier"] in {"warm", "cold"}
    assert json.loads(up.omni("wake", "one", "-o", "json").stdout)["tier"] == "resident"


def test_ctrl_c_lets_a_request_finish_and_leaves_nothing(place: Path, up: Up) -> None:
    if up.process.poll() is None:
        up.ready()
        write_linear(place / "catalog", "slow", place / "weights.safetensors", sleep_seconds=3.0)
        until(lambda: up.value("slow") == 6.0, "the slow model")
        control_groups = groups(up)
        answers: list[float | None] = []
        asking = threading.Thread(target=lambda: answers.append(up.value("slow")))
        asking.start()
        until(lambda: _in_flight(up, "slow"), "the request to be computed")
        processes = up.descendants()
        assert processes
        assert up.stop(signal.SIGINT) == 0, "".join(up.messages)
        asking.join(DEADLINE_SECONDS)
        assert answers == [6.0]
        assert leftovers(up.state_dir, processes) == []
        assert [path for path in control_groups if path.exists()] == []
        assert "Traceback" not in "".join(up.messages)
        (place / "catalog" / "slow.yaml").unlink()


def _in_flight(up: Up, model: str) -> int:
    """Asked of the address itself: a command would take longer to start than the request to be computed."""
    url = f"{up.address}{OBJECTS_PATH}/omnimodels/default/{model}"
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as response:
        return int(json.load(response)["status"]["residency"][0]["inFlight"])


def test_after_kill_everything_it_serves_again_without_publishing_anew(place: Path) -> None:
    first = Up(place / "catalog", place / "state")
    assert first.value("one") == 6.0
    images = {path: path.stat().st_ino for path in (place / "state" / "store").rglob("image")}
    assert images
    processes = [psutil.Process(first.process.pid), *first.descendants()]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    first.process.wait(DEADLINE_SECONDS)
    again = Up(place / "catalog", place / "state")
    try:
        assert again.value("one") == 6.0
        assert {path: path.stat().st_ino for path in (place / "state" / "store").rglob("image")} == images
        children = again.descendants()
        assert again.stop(signal.SIGINT) == 0
        assert leftovers(place / "state", [*processes, *children]) == []
    finally:
        if again.process.poll() is None:
            again.stop(signal.SIGINT, signal.SIGINT)


def test_three_ctrl_c_end_it_at_once_even_while_it_starts(place: Path) -> None:
    write_linear(place / "catalog", "slow", place / "weights.safetensors", sleep_seconds=30.0)
    running = Up(place / "catalog", place / "state", "--drain", "600")
    until(lambda: (running.state_dir / "address").exists() and running.descendants(), "its first process")
    processes = running.descendants()
    for stage in ("stopping", "hurrying", "killing"):  # signals that are sent together would arrive as one
        running.process.send_signal(signal.SIGINT)
        until(lambda stage=stage: running.process.poll() is not None or stage in "".join(running.messages), stage)
    assert running.process.wait(DEADLINE_SECONDS) in {0, 1}
    until(lambda: leftovers(running.state_dir, processes) == [], "everything to be gone")


def test_a_taken_port_is_refused_before_anything_starts(place: Path, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "omnimodel.cli", "up", str(place / "catalog"), "--listen", f"127.0.0.1:{port}"],
            capture_output=True, text=True, env=environment(tmp_path / "state"), timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "--listen" in done.stderr
    assert done.stdout == ""
