"""The main program of a process that builds packages: their setup code is a stranger's, so it runs in a sandbox."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from omnimodel.errors import OmniError, ProcessError
from omnimodel.protocol.channel import Channel
from omnimodel.protocol.process import Build, Envelope, Progress, Reply, encode

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE_CHARACTERS = 1000
_BURST_LINES, _LINE_SECONDS = 1000, 0.01  # the agent ends a process that says more


def run(channel: Channel, instance: str, descriptors: Mapping[str, int]) -> int:  # noqa: ARG001 the interface
    """Carry one Build out.

    Returns:
        The exit status of this process: 0 when uv could be run, whatever it said.
    """
    message, _ = channel.receive()
    envelope = Envelope.from_message(message)
    command = envelope.command
    try:
        if not isinstance(command, Build):
            raise ProcessError("control channel", f"{command.op!r} is no command of a process that builds")
        threading.Thread(target=_end_with_the_agent, args=(channel,), name="agent", daemon=True).start()
        code = _uv(channel, command.arguments)
    except Exception as error:
        channel.send(encode(Reply.failed(envelope.id, error)))
        return 1
    channel.send(encode(Reply(envelope.id, ok=True, values={"code": code & 0xFF})))
    return 0


def _end_with_the_agent(channel: Channel) -> None:
    """A compiler says nothing for minutes, and nobody would miss the agent meanwhile."""
    with contextlib.suppress(OmniError, OSError):
        channel.receive()  # nothing comes but the end
    os.killpg(0, signal.SIGKILL)  # uv and all below it; the first of a namespace does not die of its own signal
    os._exit(1)


def _uv(channel: Channel, arguments: list[str]) -> int:
    """Run uv and tell what it says, not faster than the agent hears it."""
    for name in ("TMPDIR", "HOME"):
        os.makedirs(os.environ[name], mode=0o700, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "uv", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for number, line in enumerate(process.stdout):
        if text := _COLOURS.sub("", line).rstrip():
            channel.send(encode(Progress(text[:_LINE_CHARACTERS], 0, 0)))
            print(text, flush=True)  # noqa: T201 for the log
        if number >= _BURST_LINES:
            time.sleep(_LINE_SECONDS)
    return process.wait()
