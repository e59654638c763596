"""`omni up` as a person runs it: a process, a folder that is edited, Ctrl-C, kill -9, and nothing left behind.

The model is a linear layer, but everything around it is the real thing: zygote, sandbox, image, frames, gateway.
"""

from __future__ import annotations

import fcntl
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.conftest import environment
from cli.linear import POOL, QUESTION, write_linear, write_weights
from running import DEADLINE_SECONDS, Up, UpOnTerminal, groups, leftovers, until

pytestmark = pytest.mark.slow


def ask(up: Up, model: str) -> tuple[int, Any]:
    """Status and answer of the question."""
    return up.infer(model, QUESTION)


def value(up: Up, model: str) -> float | None:
    """The first number of the answer; None when there is none."""
    status, answer = ask(up, model)
    return float(answer["outputs"][0]["data"][0]) if status == 200 else None


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
    assert value(up, "one") == 6.0


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_nothing_of_cuda_is_loaded_while_it_serves(up: Up) -> None:
    up.ready()
    assert value(up, "one") == 6.0
    mapped = Path(f"/proc/{up.process.pid}/maps").read_text()
    assert "libpython" in mapped or "python3" in mapped
    assert "/cuda/bindings/" not in mapped
    for pid in (up.process.pid, *(process.pid for process in up.descendants())):
        assert "libcuda.so" not in Path(f"/proc/{pid}/maps").read_text()


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
    assert value(up, "one") == 6.0


def test_a_pool_that_is_not_there_is_all_that_is_told(place: Path) -> None:
    wrong = Up(place / "catalog", place / "state-of-no-pool", "--pool", "nope")
    assert wrong.process.wait(DEADLINE_SECONDS) == 3
    (message,) = until(lambda: wrong.messages, "its message")
    assert "nope" in message
    assert not wrong.lines


def test_check_passes(up: Up) -> None:
    up.ready()
    done = up.omni("check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_plan_knows_what_was_measured(up: Up, place: Path) -> None:
    value(up, "one")
    (pool,) = up.client.objects("omnipools")
    done = up.omni("plan", str(place / "catalog"), "-o", "json")
    (planned,) = json.loads(done.stdout)["pools"]
    assert planned["overcommitRatio"] == pool["status"]["overcommitRatio"] > 0


def test_a_new_file_is_a_new_model(up: Up, place: Path) -> None:
    up.ready()
    path = write_linear(place / "catalog", "two", place / "weights.safetensors", shift=1.0)
    until(lambda: value(up, "two") == 7.0, "the new model's answer")
    path.unlink()
    until(lambda: ask(up, "two")[0] == 404, "the deleted model to be unknown")
    assert value(up, "one") == 6.0


def test_an_edit_is_rolled_without_an_error_in_between(up: Up, place: Path) -> None:
    up.ready()
    write_linear(place / "catalog", "three", place / "weights.safetensors")
    until(lambda: value(up, "three") == 6.0, "the first version")
    write_linear(place / "catalog", "three", place / "weights.safetensors", shift=10.0)
    seen: list[float | None] = []

    def rolled() -> bool:
        seen.append(value(up, "three"))
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
    assert value(up, "one") == 6.0
    path.write_text(good)
    until(lambda: "one.yaml" not in up.omni("get", "models").stderr, "the error to go")


def test_objects_have_what_scripts_rely_on(up: Up) -> None:
    value(up, "one")
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
    until(lambda: up.client.model("default", "one")["status"]["footprint"].get("privateBytes"), "it to be seen idle")


def test_wake_and_evict_move_the_tier(up: Up) -> None:
    value(up, "one")
    assert json.loads(up.omni("evict", "one", "-o", "json").stdout)["tier"] == "warm"
    (entry,) = until(lambda: on_the_host(up, "one"), "its process to be counted on the host")
    assert (entry["tier"], entry["deviceBytes"]) == ("warm", 0)
    assert json.loads(up.omni("wake", "one", "-o", "json").stdout)["tier"] == "resident"


def on_the_host(up: Up, model: str) -> list[dict[str, Any]]:
    """Where a model holds host memory."""
    return [entry for entry in up.client.model("default", model)["status"]["residency"] if entry["hostBytes"] > 0]


EDITS = 3


def test_edits_are_reconciled_within_two_seconds(up: Up, place: Path) -> None:
    """Measured from just before a file is replaced to what the system says it did, by the clock of both.

    How often this test looks does not count, and of each kind of edit the median does: a machine may be busy once.
    """
    up.ready()
    folder = place / "catalog"
    write_linear(folder, "edited", place / "weights.safetensors")
    good = (folder / "edited.yaml").read_text()
    until(lambda: value(up, "edited") == 6.0, "the model")
    weights = place / "weights.safetensors"
    texts = {
        "broken": good.replace("engine: python", "engine: pyhton"),
        "moved to a pool that is not there": good.replace("spec:", "spec:\n  pool: none", 1),
        "deleted": None,
    }
    edits: dict[str, Callable[[int], object]] = {
        **{kind: lambda _, text=text: replace(folder / "edited.yaml", text) for kind, text in texts.items()},
        # With code of its own, so that it is published: that this begins is the first that is told of it.
        "changed": lambda number: write_linear(folder, "edited", weights, shift=100.0 + number),
        "added": lambda number: write_linear(folder, "added", weights, shift=200.0 + number),
    }
    told = {
        "broken": {"kind": "Manifest"},
        "moved to a pool that is not there": {"name": "edited", "reason": "PoolNotFound"},
        "deleted": {"name": "edited", "reason": "Removed"},
        "changed": {"name": "edited", "reason": "Publishing"},
        "added": {"name": "added", "reason": "Publishing"},
    }
    taken: dict[str, list[float]] = {kind: [] for kind in edits}
    for number in range(EDITS):
        for kind, edit in edits.items():
            about = told[kind]
            before = len(up.events(**about))
            began = time.time()
            edit(number)
            until(lambda about=about, before=before: len(up.events(**about)) > before, f"an event: {kind}")
            taken[kind].append(up.events(**about)[before]["time_seconds"] - began)
            replace(folder / "edited.yaml", good)
            until(lambda: serves_as_written(up, "edited"), f"the good file after it was {kind}")
        replace(folder / "added.yaml", None)
    replace(folder / "edited.yaml", None)
    assert all(0 < statistics.median(seconds) < 2 for seconds in taken.values()), taken


def replace(path: Path, text: str | None) -> None:
    """Put a file into the place of another in one step; without a text, remove it."""
    if text is None:
        path.unlink()
        return
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def serves_as_written(up: Up, name: str) -> bool:
    """Whether a model is ready and none of its files is broken."""
    if up.client.status()["errors"]:
        return False
    found = [item for item in up.client.objects("omnimodels") if item["metadata"]["name"] == name]
    return bool(found) and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in found[0]["status"]["conditions"]
    )


def test_logs_are_followed(up: Up) -> None:
    value(up, "one")
    following = subprocess.Popen(
        [sys.executable, "-m", "omnimodel.cli", "logs", "-f", "--tail", "1", "one"],
        stdout=subprocess.PIPE, text=True, env=up.environment,
    )  # fmt: skip
    try:
        assert following.stdout is not None
        assert following.stdout.readline() == "asked\n"
        value(up, "one")
        assert following.stdout.readline() == "asked\n"
    finally:
        following.kill()
        following.wait()


def test_ctrl_c_lets_a_request_finish_and_leaves_nothing(place: Path, up: Up) -> None:
    up.ready()
    write_linear(place / "catalog", "slow", place / "weights.safetensors", sleep_seconds=3.0)
    until(lambda: value(up, "slow") == 6.0, "the slow model")
    control_groups = groups(up)
    answers: list[float | None] = []
    asking = threading.Thread(target=lambda: answers.append(value(up, "slow")))
    asking.start()
    until(lambda: in_flight(up, "slow"), "the request to be computed")
    processes = up.descendants()
    assert processes
    assert up.stop(signal.SIGINT) == 0, "".join(up.messages)
    asking.join(DEADLINE_SECONDS)
    assert answers == [6.0]
    assert leftovers(up.state_dir, processes) == []
    assert [path for path in control_groups if path.exists()] == []
    assert "Traceback" not in "".join(up.messages)
    (place / "catalog" / "slow.yaml").unlink()


def in_flight(up: Up, model: str) -> int:
    """Asked of the address itself: a command would take longer to start than the request to be computed."""
    return int(up.client.model("default", model)["status"]["residency"][0]["inFlight"])


@dataclass(frozen=True)
class Restarted:
    """A system that was started on what one left that was killed, with a model beside it that cannot serve.

    Args:
        up: the system.
        address, seen, pools: of the first one, which was on a terminal, served the other pool, and had half its memory.
        images: that the first one had published.
        killed: its processes.
    """

    up: Up
    address: str
    seen: str
    pools: dict[str, dict[str, Any]]
    images: dict[Path, int]
    killed: list[psutil.Process]


@pytest.fixture(scope="module")
def restarted(place: Path) -> Iterator[Restarted]:
    catalog, state_dir = place / "pools", place / "state-of-pools"
    catalog.mkdir()
    (catalog / "pools.yaml").write_text(f"{POOL}---\n{POOL.replace('default', 'other')}")
    of_other(write_linear(catalog, "one", place / "weights.safetensors"))
    first = UpOnTerminal(catalog, state_dir, "--pool", "other", "--memory", "256Mi")
    assert value(first, "one") == 6.0
    pools = {item["metadata"]["name"]: item["status"] for item in first.client.objects("omnipools")}
    found = images(state_dir)
    assert found
    until(lambda: re.search(r"\ncurl (.*\n)+one +resident ", first.terminal.text), "a picture after the line to paste")
    seen, address = first.terminal.text, first.address
    killed = first.kill_all()
    of_other(write_linear(catalog, "missing", place / "nowhere.safetensors"))
    of_other(write_linear(catalog, "hangs", place / "weights.safetensors", sleep_seconds=600.0, probe=False))
    again = Up(catalog, state_dir, "--pool", "other", "--drain", "600")
    yield Restarted(again, address, seen, pools, found, killed)
    if again.process.poll() is None:
        again.stop(signal.SIGINT, signal.SIGINT)


def of_other(path: Path) -> None:
    """Let a model be of the other pool."""
    replace(path, path.read_text().replace("spec:", "spec:\n  pool: other", 1))


def images(state_dir: Path) -> dict[Path, int]:
    """The images of a store, with what tells whether one was written anew."""
    return {path: path.stat().st_ino for path in (state_dir / "store").rglob("image")}


def test_a_person_sees_the_table_then_the_address_and_a_line_to_paste(restarted: Restarted) -> None:
    before, ready, after = restarted.seen.partition(f"\nReady at {restarted.address}\n")
    assert ready
    assert "pool other" in before
    assert re.search(r"\nmodel +tier +bytes +requests +last wake", before)
    assert re.search(r"\none +(cold|warm) ", before), "it was shown while it was brought up"
    assert f"\ncurl -s {restarted.address}/v1/models\n" in after
    assert re.search(r"\none +resident ", after)


def test_the_pool_that_is_named_is_served_with_the_memory_that_is_named(restarted: Restarted) -> None:
    assert restarted.pools["other"]["budgetBytes"] == 256 << 20
    assert restarted.pools["default"].get("budgetBytes", 0) == 0


def test_after_kill_everything_it_serves_again_without_publishing_anew(restarted: Restarted) -> None:
    assert value(restarted.up, "one") == 6.0
    assert restarted.images.items() <= images(restarted.up.state_dir).items()
    assert [process for process in restarted.killed if process.is_running()] == []


def test_the_first_line_names_what_cannot_serve(restarted: Restarted) -> None:
    (failed,) = restarted.up.ready()["failed"]
    assert failed["model"] == "missing"
    assert failed["reason"] == "SourceNotFound"
    assert "nowhere.safetensors" in failed["message"]
    assert value(restarted.up, "one") == 6.0


def test_a_second_signal_hurries_and_none_is_worse_than_ctrl_c(restarted: Restarted) -> None:
    up, statuses = restarted.up, []
    asking = threading.Thread(target=lambda: statuses.append(ask(up, "hangs")[0]))
    asking.start()
    until(lambda: in_flight(up, "hangs"), "the request to be computed")
    processes = up.descendants()
    up.process.send_signal(signal.SIGTERM)
    until(lambda: "stopping" in "".join(up.messages), "the first stage")
    assert up.process.poll() is None, "the request has ten minutes left"
    assert up.client.request("GET", "/readyz").status == 503, "nobody new is sent to it"
    assert up.stop(signal.SIGHUP) == 0, "".join(up.messages)
    asking.join(DEADLINE_SECONDS)
    assert statuses[0] in {502, 503, 504}, "who was cut off is told so"
    assert leftovers(up.state_dir, [*restarted.killed, *processes]) == []


class ReadOnce(Up):
    """One whose output nobody reads after the first line of each."""

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, 4096)
        lines.append(stream.readline())


def test_who_reads_no_more_than_the_first_line_stops_nothing(place: Path) -> None:
    running = ReadOnce(place / "catalog", place / "state", "--drain", "0")
    assert running.ready()["ready"]
    for _ in range(50):  # three events each, more than the pipe and its reader's buffer hold
        assert value(running, "one") == 6.0
        running.client.evict("default", "one", DEADLINE_SECONDS)
    assert len(list(running.client.events(follow=False))) > 100
    processes = running.descendants()
    assert running.stop() == 0
    assert leftovers(running.state_dir, processes) == []


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
