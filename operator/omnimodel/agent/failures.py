"""How often a model has failed, why the last time, and when it makes sense to try again. Pure."""

from __future__ import annotations

import math

from omnimodel.errors import OmniError

# A model that fails is tried again after these waits, so that a broken one that is asked for all the time is started
# five times in ten minutes, and one whose cause is gone recovers with the next request.
BACKOFF_SECONDS = (5.0, 20.0, 80.0, 300.0)
HEALTHY_SECONDS = 300.0


class Failures:
    """The failures of one instance. Times are seconds of one clock, whichever the caller uses."""

    def __init__(self) -> None:
        self.last: OmniError | None = None
        self.retry_at_seconds = 0.0
        self._count = 0
        self._noted_seconds = -math.inf

    def note(self, error: OmniError, now: float, *, verified: bool) -> float:
        """Note a failure; how many seconds to wait before the next try.

        Args:
            error: what went wrong.
            now: on the clock of the caller.
            verified: whether the model has worked: the first death of one that has is taken for an accident, and it
                is started again at once.
        """
        if self.last is None and now - self._noted_seconds > HEALTHY_SECONDS:
            self._count = 0
        self._noted_seconds = now
        self._count += 1
        self.last = error
        step = self._count - (2 if verified else 1)
        wait_seconds = BACKOFF_SECONDS[min(step, len(BACKOFF_SECONDS) - 1)] if step >= 0 else 0.0
        self.retry_at_seconds = now + wait_seconds
        return wait_seconds

    @property
    def repeated(self) -> bool:
        """Whether it has failed again, and not answered since: that a wait is over makes it no better."""
        return self.last is not None and self._count > 1

    def recovered(self) -> None:
        """Forget the last one: the model has answered. How many there were counts until it was healthy for a while."""
        self.last = None
        self.retry_at_seconds = 0.0

    def waiting(self, now: float) -> bool:
        """Whether it is too early to try again."""
        return self.last is not None and now < self.retry_at_seconds
