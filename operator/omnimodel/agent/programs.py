"""Runs a program to its end and hears what it says line by line; when nobody waits any more, all of it is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

_LINE_BYTES = 1 << 16
_LOGIN = re.compile(r"(://)[^/@\s]+@")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Finished:
    """How a program ended: its exit code (negative: the signal that killed it) and the last lines it said."""

    code: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)


async def run_program(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    environment: Mapping[str, str | None] | None = None,
    keep_lines: int = 200,
) -> Finished:
    """Run a program in a session of its own.

    Args:
        command: program and arguments.
        on_line: gets each line of its output and errors, without colours and without passwords of URLs.
        environment: added to this process's own; None takes a variable away.
        keep_lines: how many of the last lines the result has.
    """
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **(environment or {})}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in variables.items() if value is not None},
        start_new_session=True,
        limit=_LINE_BYTES,
    )
    assert process.stdout is not None
    kept: deque[str] = deque(maxlen=keep_lines)
    try:
        while line := await _line(process.stdout):
            text = without_logins(_COLOURS.sub("", line.decode(errors="replace")).rstrip())
            if text:
                kept.append(text)
                on_line(text)
        return Finished(await process.wait(), tuple(kept))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())


def without_logins(text: str) -> str:
    """A text without the user names and passwords of the URLs in it."""
    return _LOGIN.sub(r"\1", text)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or the beginning of one that is too long; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
