"""What wakes on one device cost, learned from those that were: a rate of copying, and a part that does not grow."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from omnimodel.placement.state import Constants

_RATE_WEIGHT = 0.2  # how far one copy moves the measured rate
_RATE_FLOOR_BYTES = 16 << 20  # copies smaller than this say nothing about the rate
_WAKES = 9  # the fixed part is the median of so many
_LEAST_WAKES = 3  # of fewer, the median may be one that was held up


class WakeCosts:
    """See the module."""

    def __init__(self) -> None:
        self.copy_bytes_per_second: float | None = None
        self._beyond_seconds: deque[float] = deque(maxlen=_WAKES)

    def note_copy(self, copied_bytes: int, seconds: float) -> None:
        """An image was copied into frames from memory."""
        if copied_bytes < _RATE_FLOOR_BYTES or seconds <= 0:
            return
        rate, measured = self.copy_bytes_per_second, copied_bytes / seconds
        self.copy_bytes_per_second = measured if rate is None else rate + _RATE_WEIGHT * (measured - rate)

    def note_beyond(self, seconds: float) -> None:
        """A wake took so long beyond its copy."""
        self._beyond_seconds.append(max(0.0, seconds))

    def learned(self, constants: Constants) -> Constants:
        """The constants of the policy, with what is known by now."""
        if self.copy_bytes_per_second is not None:
            constants = replace(constants, copy_bytes_per_second=self.copy_bytes_per_second)
        if len(self._beyond_seconds) >= _LEAST_WAKES:
            constants = replace(constants, wake_fixed_seconds=median(self._beyond_seconds))
        return constants
