"""What this machine allows, found by trying it in a process that is thrown away."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import traceback

from omnimodel.errors import IsolationError
from omnimodel.isolation.enter import enter
from omnimodel.isolation.fork import fork_isolated
from omnimodel.isolation.plan import Level, Reached, SandboxPlan
from omnimodel.isolation.syscalls import PR_SET_CHILD_SUBREAPER, prctl

_SECONDS = 30.0
_UID = 19999


def _command() -> tuple[list[str], dict[str, str]]:
    package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": package_parent}
    return [sys.executable, "-P", "-m", "omnimodel.isolation.probe"], environment


def _read(output: bytes) -> Reached:
    try:
        return Reached.from_json(json.loads(output))
    except (ValueError, KeyError) as error:
        raise IsolationError("isolation", "the probe of this machine gave no result", "run it with -v") from error


def probe(wanted: Level = Level.NAMESPACES) -> Reached:
    """Try the ladder from `wanted` downwards.

    Raises:
        IsolationError: even the attempt failed.
    """
    command, environment = _command()
    plan = SandboxPlan("probe", uid=_UID, wanted=wanted)
    done = subprocess.run(
        command,
        input=json.dumps(plan.to_json()).encode(),
        stdout=subprocess.PIPE,
        env=environment,
        timeout=_SECONDS,
        check=False,
    )
    return _read(done.stdout)


async def probe_async(wanted: Level = Level.NAMESPACES) -> Reached:
    """`probe` without blocking the loop."""
    return await asyncio.to_thread(probe, wanted)


def _main() -> int:
    plan = SandboxPlan.from_json(json.loads(sys.stdin.buffer.read()))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = fork_isolated(plan.uid)
    if pid == 0:
        try:
            sys.stdout.write(json.dumps(enter(plan).to_json()))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(_main())
