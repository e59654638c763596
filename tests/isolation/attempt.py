"""Runs a piece of code inside a real sandbox: a program that forks, enters and executes, and the function that calls it.

As a program it reads a JSON request from standard input. It is run by the system's Python, because that one can be
reached by every user; the package needs nothing but the standard library here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

OPERATOR = str(Path(__file__).parents[2] / "operator")
PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Machine:
    """What the program may do before it forks: stands for a kind of host.

    Args:
        command: run in front of the interpreter.
        filtered: with a system call filter like that of a container runtime, which allows no namespaces.
        refused: names of system calls that are refused before it forks.
    """

    name: str
    command: tuple[str, ...] = ()
    filtered: bool = False
    refused: tuple[str, ...] = ()


ROOT = Machine("root")
ROOT_WITHOUT_SYS_ADMIN = Machine("root without CAP_SYS_ADMIN", ("setpriv", "--bounding-set=-sys_admin"))
USER = Machine("ordinary user", ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"))
CONTAINER_ROOT = Machine("root in a container", ("setpriv", "--no-new-privs"), filtered=True)
CONTAINER_USER = Machine("user in a container", (*USER.command, "--no-new-privs"), filtered=True)
# Parts of /proc are covered in containers; the kernel then refuses a fresh one to user namespaces.
COVERED_PROC = Machine(
    "user whose proc is covered",
    ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /proc/cmdline && exec "$0" "$@"', *USER.command),
)
NO_PIVOT = Machine("root who may not pivot", refused=("pivot_root",))


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    level: str
    missing: tuple[str, ...]
    answer: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    status: int = 0


def attempt(machine: Machine, plan: Any, code: str, **given: Any) -> Outcome:
    """Enter the sandbox of `plan` on `machine` and execute `code` there, with `given` and `answer` as its variables."""
    request = {"plan": plan.to_json(), "code": code, "given": given, "filtered": machine.filtered}
    request["refused"] = machine.refused
    done = subprocess.run(
        [*machine.command, PYTHON, "-P", __file__],
        input=json.dumps(request).encode(),
        capture_output=True,
        env={"PATH": os.defpath, "PYTHONPATH": OPERATOR, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr.decode()
    body = json.loads(done.stdout.splitlines()[-1])
    return replace(Outcome(**body), missing=tuple(body["missing"]))


def _main() -> None:
    from omnimodel.errors import OmniError
    from omnimodel.isolation import SandboxPlan, enter, fork_isolated, seccomp
    from omnimodel.isolation.syscalls import PR_SET_CHILD_SUBREAPER, prctl

    request = json.load(sys.stdin)
    plan = SandboxPlan.from_json(request["plan"])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if request["filtered"]:
        seccomp.install(internet=True)
    if request["refused"]:
        whole, namespaces = seccomp.DENIED, seccomp._NEW_NAMESPACES
        seccomp.DENIED, seccomp._NEW_NAMESPACES = {name: whole[name] for name in request["refused"]}, 0
        seccomp.install(internet=True)
        seccomp.DENIED, seccomp._NEW_NAMESPACES = whole, namespaces
    read, write = os.pipe()
    pid = fork_isolated(plan.uid)
    if pid == 0:
        body: dict[str, Any] = {"level": "", "missing": [], "answer": {}, "error": ""}
        try:
            reached = enter(plan)
            body |= reached.to_json()
            exec(compile(request["code"], "code", "exec"), {"os": os, "answer": body["answer"], **request["given"]})
        except OmniError as error:
            body["error"] = str(error)
        except BaseException:
            body["error"] = traceback.format_exc()
        os.write(write, json.dumps(body).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    body = json.loads(text) if text else {"level": "", "missing": [], "error": "it said nothing"}
    sys.stdout.write(json.dumps({**body, "status": os.waitstatus_to_exitcode(status)}) + "\n")


if __name__ == "__main__":
    _main()
