"""Every command in a process of its own, against a running system: exit codes, and stdout for results alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cli.conftest import Running, environment

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


def test_yaml_is_the_same_objects(system: Running) -> None:
    as_json = json.loads(system.omni("get", "models", "words", "-o", "json").stdout)
    as_yaml = yaml.safe_load(system.omni("get", "models", "words", "-o", "yaml").stdout)
    assert as_json["items"][0]["spec"] == as_yaml["items"][0]["spec"]


def test_columns(system: Running) -> None:
    done = system.omni("get", "models")
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["NAME", "READY", "TIER"]
    assert [row.split()[:3] for row in rows if row.startswith("words")] == [["words", "True", "warm"]]
    wide = system.omni("get", "models", "-o", "wide").stdout
    assert "ENGINE" in wide.splitlines()[0]
    assert "ENGINE" not in head


def test_a_broken_manifest_is_told_on_stderr_beside_the_models(system: Running) -> None:
    done = system.omni("get", "models")
    assert "broken.yaml" in done.stderr
    assert "broken" not in done.stdout


def test_describe_tells_conditions_residency_isolation_and_events(system: Running) -> None:
    text = system.omni("describe", "words").stdout
    for part in ("Name:", "words", "Ready", "Residency:", "Isolation:", "level process", "lacks namespaces", "Events:"):
        assert part in text


def test_wake_and_evict_say_the_tier(system: Running) -> None:
    assert system.omni("wake", "words").stdout == "words is resident (wake 21 ms)\n"
    assert json.loads(system.omni("evict", "words", "-o", "json").stdout)["tier"] == "warm"


def test_logs_are_the_bytes_of_the_process(system: Running) -> None:
    assert system.omni("logs", "words").stdout == "hello\n"


def test_events_are_one_json_object_a_line(system: Running) -> None:
    lines = system.omni("events", "-o", "json").stdout.splitlines()
    assert "InvalidManifest" in {json.loads(line)["reason"] for line in lines}


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


def test_every_command_has_help(system: Running) -> None:
    from omnimodel.cli import COMMANDS

    for name in COMMANDS:
        done = system.omni(name, "--help")
        assert done.returncode == 0, done.stderr
        assert "Usage: omni" in done.stdout
