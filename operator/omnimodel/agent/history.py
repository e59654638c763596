"""What has become of one revision so far: how often it was moved and why, and how long that took the last time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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

    def note_copied(self, copied_bytes: int, seconds: float) -> None:
        """The last wake is over, its copy too."""
        self.wake_seconds += self.last_wake_seconds
        self.last_wake_bytes_per_second = int(copied_bytes / seconds) if seconds > 0 else 0
