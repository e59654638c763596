"""Children that come to a process when their own parents have ended."""

from __future__ import annotations

import contextlib
import os
import time

_WAIT_SECONDS = 30.0


class OrphanReaper:
    """SIGCHLD of a pid 1: waits for children that nobody has waited for in 30 s, never for those of subprocess."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def __call__(self, *_: object) -> None:
        """Reap those whose time is over."""
        now = time.monotonic()
        zombies = {pid for pid in children() if _is_zombie(pid)}
        self._since = {pid: self._since.get(pid, now) for pid in zombies}
        for pid, since in self._since.items():
            if now - since > _WAIT_SECONDS:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def children() -> list[int]:
    """Pids of this process's children, zombies among them; none where the kernel does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return False
