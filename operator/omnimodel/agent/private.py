"""Memory that processes hold for themselves, where no control group counts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


class PrivateMemory:
    """Of one model's processes. Frames are shared with the agent, and never in it.

    The kernel shows the exact number to those who may trace a process. An agent in a pod may not trace processes of
    other users; all it is shown is their anonymous memory, with the pages they still share with the zygote. So there
    it counts what has come since the least that was ever seen, which is what a process had when it was forked, or
    just after it became another program.

    When the zygote has ended, what a process shared with it looks like its own. Of a process that an earlier agent
    left, all counts as its own that has come since it shared so much.

    Args:
        left: such a process, and how much anonymous memory it shared with its zygote.
    """

    def __init__(self, left: Mapping[int, int] | None = None) -> None:
        self._least: dict[int, int] = {}
        self._left = dict(left or {})
        self.shared: dict[int, int] = dict(self._left)  # anonymous bytes that are not its own, as seen last

    def of(self, pids: Iterable[int]) -> int:
        """Bytes of these processes together; those that have ended hold nothing."""
        return sum(self._one(pid) for pid in pids)

    def _one(self, pid: int) -> int:
        if pid in self._left:
            return max(0, anonymous_bytes(pid) - self._left[pid])
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except PermissionError:
            anonymous = anonymous_bytes(pid)
            self.shared[pid] = self._least[pid] = min(anonymous, self._least.get(pid, anonymous))
            return anonymous - self._least[pid]
        except OSError:
            return 0
        private = sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_"))
        self.shared[pid] = anonymous_bytes(pid) - private
        return private


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory that is not swapped out; 0 when the process has ended."""
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon:")), 0)
