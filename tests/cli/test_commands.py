"""Every command in a process of its own, against a running system: exit codes, and stdout for results alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from cli.conftest import Running, environment
from omnimodel.cli import COMMANDS, describe, omni
from omnimodel.cli.target import default_state_dir
from running import Terminal, until

EXIT_CODES = {
    "done": (("get", "models"), 0),
    "a model serves": (("check", "words"), 0),
    "an answer is wrong": (("check", "wrong"), 1),
    "no such command": (("gett", "models"), 2),
    "no such kind": (("get", "pods"), 2),
    "no such option": (("get", "models", "--wide"), 2),
    "no such model to get": (("get", "models", "nobody"), 3),
    "no such model to describe": (("describe", "nobody"), 3),
    "no such model to wake": (("wake", "nobody"), 3),
    "not woken in time": (("wake", "slow"), 4),
    "not evicted in time": (("evict", "slow"), 4),
    "nothing at the address": (("get", "models", "--address", "http://127.0.0.1:9"), 5),
    "nothing on the state directory": (("get", "models", "--state-dir", "/nonexistent/omni"), 5),
    "no address at all": (("get", "models", "--address", "ftp://x"), 1),
}


@pytest.mark.parametrize(("arguments", "code"), EXIT_CODES.values(), ids=EXIT_CODES.keys())
def test_exit_code(system: Running, arguments: tuple[str, ...], code: int) -> None:
    done = system.omni(*arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stderr.strip(), "a failure must say something"
    if code >= 2:
        assert not done.stdout, "stdout is for results"


@pytest.mark.parametrize("asked", ["by the option", "by the variable"])
def test_debug_shows_the_traceback(system: Running, asked: str) -> None:
    command = ["get", "models", "--address", "http://127.0.0.1:9"]
    if asked == "by the option":
        done = system.omni("--debug", *command)
    else:
        done = Running(environment={**system.environment, "OMNI_DEBUG": "1"}).omni(*command)
    assert done.returncode == 5
    assert "Traceback" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("kind", ["models", "pools", "processes"])
def test_json_is_alone_on_stdout_and_has_whole_objects(system: Running, kind: str) -> None:
    done = system.omni("get", kind, "-o", "json")
    items = json.loads(done.stdout)["items"]
    assert items
    for item in items:
        assert {"metadata", "spec", "status"} <= set(item)


@pytest.mark.parametrize("kind", ["models", "pools", "processes"])
def test_yaml_is_the_same_objects(system: Running, kind: str) -> None:
    as_json, as_yaml = (system.omni("get", kind, "-o", form).stdout for form in ("json", "yaml"))
    assert json.loads(as_json) == yaml.safe_load(as_yaml)


@pytest.mark.parametrize(
    ("kind", "head", "row", "more", "more_of_row"),
    [
        (
            "models",
            "NAME READY TIER DEVICE WEIGHTS WAITING SERVED LAST_WAKE REASON",
            "words True warm - 1.0_MiB 0 0 - -",
            "POOL ENGINE TASK HOST WORKING WAKES PID LAST_REQUEST GENERATION MESSAGE",
            "default python embeddings - 1.0_MiB 0 4711 - 1 it_is_resident,_or_can_be_woken",
        ),
        (
            "pools",
            "NAME READY DEVICE BUDGET RESIDENT FREE OVER-COMMIT ISOLATION",
            "default True host 1.0_GiB - 1.0_GiB 0.00 process",
            "HOST HOST_BUDGET MODELS MISSING",
            "- 4.0_GiB 3 namespaces",
        ),
        (
            "processes",
            "MODEL STATE TIER PID PRIVATE RESTARTS AGE",
            "words ready warm 4711 30.0_MiB 2 AGE",
            "ISOLATION INSTANCE CGROUP HASH",
            "process words-1 /omni/words-1 HASH",
        ),
    ],
    ids=["models", "pools", "processes"],
)
def test_columns(system: Running, kind: str, head: str, row: str, more: str, more_of_row: str) -> None:
    """Columns are three spaces apart; a space within one is written as _ here."""
    changing = {"processes": {"AGE": r"\d+(\.\d+)?(_ms|_s|m|h|d)", "HASH": "[0-9a-f]{12}"}}.get(kind, {})
    for form, heads, values in (([], head, row), (["-o", "wide"], f"{head} {more}", f"{row} {more_of_row}")):
        first, *rows = table(system.omni("get", kind, *form).stdout)
        assert first == heads.split()
        (found,) = [cells for cells in rows if cells[0] == values.split()[0]]
        for cell, wanted in zip(found, values.split(), strict=True):
            assert re.fullmatch(changing.get(wanted, re.escape(wanted)), cell), f"{cell} is not {wanted}"


def table(text: str) -> list[list[str]]:
    return [[cell.replace(" ", "_") for cell in re.split(" {3,}", line)] for line in text.splitlines()]


@pytest.mark.parametrize("form", [(), ("-o", "wide"), ("-o", "json"), ("-o", "yaml")], ids="".join)
@pytest.mark.parametrize("kind", ["models", "pools", "processes"])
def test_a_broken_manifest_is_told_on_stderr_beside_what_is_asked_for(
    system: Running, kind: str, form: tuple[str, ...]
) -> None:
    done = system.omni("get", kind, *form)
    assert "broken.yaml" in done.stderr
    assert "broken" not in done.stdout


def test_describe_tells_conditions_residency_isolation_and_events(system: Running) -> None:
    text = system.omni("describe", "words").stdout
    for part in ("Name:", "words", "Ready", "Residency:", "Isolation:", "level process", "lacks namespaces", "Events:"):
        assert part in text
    assert "  node-1: warm, 0 B of device memory (-), 0 B of other host memory, " in text
    assert "  0 B of 1.0 GiB held on host, " in text


def test_describe_tells_what_the_memory_of_a_pool_is_held_for() -> None:
    status = {"budgetBytes": 576 << 20, "freeBytes": 76 << 20, "residentBytes": 180 << 20, "workingBytes": 320 << 20}
    _, held, parts, *_ = describe._pool_lines({"status": {**status, "device": "host", "overcommitRatio": 4.34}})
    assert held == "  500 MiB of 576 MiB held on host, over-commit 4.34"
    assert parts == "  of that 180 MiB weights, 320 MiB working memory"


def test_describe_tells_tokens_of_who_counts_them() -> None:
    counted, other = (
        list(describe._model_lines({"metadata": {"name": "m"}, "status": {"residency": [{"pod": "here", **more}]}}))[-1]
        for more in ({"requests": 3, "promptTokens": 37, "generatedTokens": 8}, {"requests": 3})
    )
    assert counted.endswith("3 served, 37 tokens of prompts, 8 generated")
    assert other.endswith("3 served")


def test_who_describes_a_model_that_is_not_there_is_told_where_those_are(system: Running) -> None:
    told = system.omni("describe", "nobody").stderr
    assert told == "error: OmniModel default/nobody: there is no such model; see omni get models\n"


def test_wake_and_evict_say_the_tier(system: Running) -> None:
    assert system.omni("wake", "words").stdout == "words is resident (wake 21 ms)\n"
    assert json.loads(system.omni("evict", "words", "-o", "json").stdout)["tier"] == "warm"


def test_logs_are_the_bytes_of_the_process(system: Running) -> None:
    assert system.omni("logs", "words").stdout == "hello\n"


def test_events_are_one_json_object_a_line(system: Running) -> None:
    lines = system.omni("events", "-o", "json").stdout.splitlines()
    assert "InvalidManifest" in {json.loads(line)["reason"] for line in lines}


def test_events_are_lines_for_people_and_follow_what_comes(system: Running) -> None:
    at = r"\d\d:\d\d:\d\d +Warning +InvalidManifest +"
    assert re.search(
        rf"^{at}.*broken\.yaml:1: .*\(Manifest .*broken\.yaml\)$", system.omni("events").stdout, re.MULTILINE
    )
    following = subprocess.Popen(
        [sys.executable, "-m", "omnimodel.cli", "events", "--follow"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=system.environment,
    )  # fmt: skip
    assert following.stdout is not None
    assert "broken.yaml" in following.stdout.readline()
    (system.folder / "worse.yaml").write_text("kind: OmniModel\n")
    assert re.match(rf"{at}.*worse\.yaml", following.stdout.readline())
    (system.folder / "worse.yaml").unlink()
    following.send_signal(signal.SIGINT)
    rest, messages = following.communicate(timeout=60)
    assert following.returncode == 130
    assert (rest, messages.strip()) == ("", ""), "who stops it by Ctrl-C is told nothing"


def test_check_names_the_failed_expectation(system: Running) -> None:
    done = system.omni("check", "words", "wrong", "slow")
    assert done.returncode == 1
    assert "passed   words" in done.stdout
    assert "/data/0/index is 0, not 7" in done.stdout
    assert "skipped  slow" in done.stdout
    as_json = json.loads(system.omni("check", "-o", "json").stdout)["items"]
    assert {item["model"]: item["result"] for item in as_json} == {
        "words": "passed", "wrong": "failed", "slow": "skipped",
    }  # fmt: skip


def test_top_once_is_a_picture(system: Running) -> None:
    text = system.omni("top", "--once").stdout
    assert "words" in text
    assert "over-commit" in text
    assert "broken.yaml" in text


def test_top_is_drawn_again_and_again_until_ctrl_c(system: Running) -> None:
    terminal = Terminal("top", "--interval", "0.1", environment=system.environment)
    until(lambda: terminal.text.count("pool default") > 3 or terminal.process.poll() is not None, "four pictures")
    assert terminal.interrupt() == 130
    assert re.search(r"\nwords +warm +1\.0 MiB", terminal.text)
    assert "broken.yaml" in terminal.text
    assert terminal.written.count(b"\x1b[?1049h") == terminal.written.count(b"\x1b[?1049l") == 1  # the other screen
    assert terminal.written.rindex(b"\x1b[?25h") > terminal.written.rindex(b"\x1b[?25l"), "the cursor is there again"
    assert "Traceback" not in terminal.text


def test_a_closed_pipe_is_no_error(system: Running) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "omnimodel.cli", "get", "models", "-o", "yaml"],
        stdout=writer, stderr=subprocess.PIPE, text=True, env=system.environment, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0
    assert all("broken.yaml" in line for line in done.stderr.splitlines())


def test_address_comes_from_the_environment(system: Running, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omnimodel.cli", "get", "models"],
        capture_output=True,
        text=True,
        env={**environment(tmp_path), "OMNI_ADDRESS": system.address},
        check=False,
    )
    assert "words" in done.stdout


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, "/home/me/.local/state"),
        ("/var/state", "/var/state"),
        ("state", "/home/me/.local/state"),
        ("", "/home/me/.local/state"),
    ],
    ids=["unset", "set", "relative, which is to be ignored", "empty"],
)
def test_the_state_directory_is_that_of_the_xdg_specification(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_STATE_HOME", variable)
    assert str(default_state_dir()) == f"{expected}/omnimodel"


def test_a_command_looks_into_the_state_directory_of_the_xdg_specification(system: Running, tmp_path: Path) -> None:
    variables = {name: value for name, value in system.environment.items() if name != "OMNI_STATE_DIR"}
    (tmp_path / "omnimodel").symlink_to(system.state_dir)
    done = Running(environment={**variables, "XDG_STATE_HOME": str(tmp_path)}).omni("get", "models")
    assert "words" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    heavy = ("aiohttp", "pydantic", "rich", "torch", "yaml", "asyncio", "kopf", "kubernetes")
    code = (
        "import sys; from omnimodel.cli import run; run(['--help']); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(Path("/nonexistent")), check=True
    )
    assert done.stderr.strip() == "[]"
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = CliRunner().invoke(omni, [name, "--help"], prog_name="omni")
    assert done.exit_code == 0, done.stderr
    assert f"Usage: omni {name}" in done.stdout
