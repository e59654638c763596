"""What has become of one revision so far: how often it was moved and why, and how long that took the last time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

IDLE_STEP_BYTES = 4 << 20


@dataclass
class History:
    """See the module.

    Args:
        wakes, evictions: that succeeded.
        restarts: ends of its process that were not wished for.
        causes: how many of its moves had which cause.
        last_start_seconds, last_unpark_seconds, last_wake_seconds, last_evict_seconds: what the last of each took.
        wake_seconds: what all wakes took.
        last_wake_bytes_per_second: at which the last wake copied; 0 when nothing was missing.
        last_request_seconds: Unix time of its last answer; 0 for none.
        idle_bytes: private memory of its process when it is idle; 0 while that was not seen.
    """

    wakes: int = 0
    evictions: int = 0
    restarts: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    last_start_seconds: float = 0.0
    last_unpark_seconds: float = 0.0
    last_wake_seconds: float = 0.0
    last_evict_seconds: float = 0.0
    wake_seconds: float = 0.0
    last_wake_bytes_per_second: int = 0
    last_request_seconds: float = 0.0
    idle_bytes: int = 0

    def note_idle(self, private_bytes: int) -> bool:
        """Its process is idle and holds so much; whether that is news. A little more or less is not: it is written."""
        step_bytes = max(IDLE_STEP_BYTES, self.idle_bytes // 4) if self.idle_bytes else 0
        if abs(private_bytes - self.idle_bytes) <= step_bytes:
            return False
        self.idle_bytes = private_bytes
        return True

    def note_copied(self, copied_bytes: int, seconds: float) -> None:
        """The last wake is over, its copy too."""
        self.wake_seconds += self.last_wake_seconds
        self.last_wake_bytes_per_second = int(copied_bytes / seconds) if seconds > 0 else 0
