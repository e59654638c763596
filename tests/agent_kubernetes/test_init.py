"""The smallest init, as pid 1 of a PID namespace of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"),
]

PROGRAM = """
import os, signal, subprocess, sys, time
from omnimodel.cli.init import run_under_init

def say(text):
    with open({log!r}, "a") as file:
        file.write(text + "\\n")

def work(store):
{work}

assert os.getpid() == 1
{before}
sys.exit(run_under_init(work))
"""
ORPHAN = "import subprocess; subprocess.Popen(['sleep', '0.2'])"


class Container:
    """A program that is pid 1."""

    def __init__(self, folder: Path, work: str, before: str = "") -> None:
        self.log = folder / "log"
        self.log.touch()
        body = "\n".join(f"    {line}" for line in work.strip().splitlines())
        program = PROGRAM.format(log=str(self.log), work=body, before=before)
        self.process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "operator")}, stderr=subprocess.PIPE,
        )  # fmt: skip

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_for(self, count: int) -> list[str]:
        deadline = time.monotonic() + 30
        while len(self.lines()) < count:
            assert time.monotonic() < deadline, (self.lines(), self.process.poll())
            time.sleep(0.02)
        return self.lines()

    def init(self) -> int:
        """Its pid as this namespace sees it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def child(self) -> int:
        return int(Path(f"/proc/{self.init()}/task/{self.init()}/children").read_text().split()[0])


def test_the_work_is_not_pid_1_and_its_exit_code_is_that_of_the_container(tmp_path: Path) -> None:
    container = Container(tmp_path, "say(str(os.getpid() != 1 and os.getppid() == 1))\nreturn 7")
    assert container.process.wait(30) == 7
    assert container.lines() == ["True"]


def test_orphans_are_reaped(tmp_path: Path) -> None:
    work = f"""
for _ in range(20):
    subprocess.run([sys.executable, "-c", {ORPHAN!r}], check=True)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    states = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            states.append(open(f"/proc/{{pid}}/stat").read().split(")")[1].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # reaped between the two looks
            pass
    if len(states) == 2:
        break
    time.sleep(0.05)
say(f"{{len(states)}} {{states.count('Z')}}")
return 0
"""
    container = Container(tmp_path, work)
    assert container.process.wait(60) == 0, container.process.stderr.read()
    assert container.lines() == ["2 0"]


def test_sigterm_reaches_the_work_and_ends_the_container(tmp_path: Path) -> None:
    work = """
signal.signal(signal.SIGTERM, lambda *_: (say("told"), sys.exit(0)))
say("ready")
while True:
    time.sleep(1)
"""
    container = Container(tmp_path, work)
    container.wait_for(1)
    os.kill(container.init(), signal.SIGTERM)
    container.process.wait(30)
    assert container.lines() == ["ready", "told"]


def test_work_that_is_killed_is_begun_anew_and_its_orphans_live_on(tmp_path: Path) -> None:
    work = """
runs = open({log!r}).read().count("run")
if not runs:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
say("run")
if runs:
    say(str(subprocess.run(["pgrep", "-x", "sleep"], stdout=-3).returncode))
    return 0
while True:
    time.sleep(1)
""".replace("{log!r}", repr(str(tmp_path / "log")))
    container = Container(tmp_path, work)
    container.wait_for(1)
    os.kill(container.child(), signal.SIGKILL)
    assert container.process.wait(30) == 0
    assert container.lines() == ["run", "run", "0"]


def test_told_to_end_in_the_pause_after_a_crash_it_does_not_begin_anew(tmp_path: Path) -> None:
    work = """
say("run")
os.kill(os.getpid(), signal.SIGKILL)
"""
    container = Container(tmp_path, work, before="from omnimodel.cli import init\ninit.RESTART_PAUSE_SECONDS = 60.0")
    container.wait_for(1)
    assert b"starting it again" in container.process.stderr.readline()
    os.kill(container.init(), signal.SIGTERM)
    container.process.wait(30)
    assert container.lines() == ["run"]


def test_work_that_raises_says_so(tmp_path: Path) -> None:
    container = Container(tmp_path, "raise RuntimeError('no such device')")
    assert container.process.wait(30) == 1
    assert b"no such device" in container.process.stderr.read()


def test_work_that_is_killed_again_and_again_ends_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = """
from omnimodel.cli import init
say("run")
os.kill(os.getpid(), signal.SIGKILL)
"""
    container = Container(tmp_path, work)
    assert container.process.wait(60) == 128 + signal.SIGKILL
    assert len(container.lines()) == 6
