"""Memory that processes hold for themselves, where no control group counts it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class PrivateMemory:
    """Of one model's processes. Frames are shared with the agent, and never in it.

    The kernel shows the exact number to those who may trace a process. An agent in a pod may not trace processes of
    other users; all it is shown is their anonymous memory, with the pages they still share with the zygote. So there
    it counts what has come since the least that was ever seen, which is what a process had when it was forked, or
    just after it became another program.
    """

    def __init__(self) -> None:
        self._least: dict[int, int] = {}

    def of(self, pids: Iterable[int]) -> int:
        """Bytes of these processes together; those that have ended hold nothing."""
        return sum(self._one(pid) for pid in pids)

    def _one(self, pid: int) -> int:
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_"))
        except PermissionError:
            anonymous = _anonymous_bytes(pid)
        except OSError:
            return 0
        least = self._least[pid] = min(anonymous, self._least.get(pid, anonymous))
        return anonymous - least


def _anonymous_bytes(pid: int) -> int:
    """Anonymous memory that is not swapped out; 0 when the process has ended."""
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon:")), 0)
