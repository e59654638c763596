"""A queue of keys: what waits more than once is worked on once, never by two at a time, and again after a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.5, 60.0)


class KeyedQueue(Generic[K]):
    """See the module.

    Args:
        work: what is done for a key. It may be called again at any time with the same result.
        done: told of each run: key, seconds, and the error or None.
        delay_of: seconds that an error asks to wait; 0 to leave it to the queue.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[None]],
        *,
        done: Callable[[K, float, Exception | None], None] | None = None,
        delay_of: Callable[[Exception], float] = lambda _: 0.0,
    ) -> None:
        self._work = work
        self._done = done
        self._delay_of = delay_of
        self._ready: dict[K, None] = {}  # in the order in which they came
        self._running: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._bell = asyncio.Event()

    @property
    def depth(self) -> int:
        """Keys that wait or are worked on."""
        return len(self._ready) + len(self._running)

    def add(self, key: K, delay_seconds: float = 0.0) -> None:
        """Have a key worked on, now or later. A sooner time wins over a later one."""
        if delay_seconds > 0:
            loop = asyncio.get_running_loop()
            timer = self._timers.get(key)
            if timer is not None:
                if timer.when() <= loop.time() + delay_seconds:
                    return
                timer.cancel()
            self._timers[key] = loop.call_later(delay_seconds, self._due, key)
        elif key in self._running:
            self._again.add(key)
        else:
            self._ready[key] = None
            self._bell.set()

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def run(self, workers: int) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(workers):
                tasks.create_task(self._run(), name=f"reconcile-{number}")

    async def _run(self) -> None:
        while True:
            while not self._ready:
                self._bell.clear()
                await self._bell.wait()
            key = next(iter(self._ready))
            del self._ready[key]
            self._running.add(key)
            began = time.perf_counter()
            error: Exception | None = None
            try:
                await self._work(key)
            except Exception as caught:
                error = caught
            finally:
                self._running.discard(key)
            self._finish(key, time.perf_counter() - began, error)

    def _finish(self, key: K, seconds: float, error: Exception | None) -> None:
        again = key in self._again
        self._again.discard(key)
        if error is None:
            self._failures.pop(key, None)
        else:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            least, most = BACKOFF_SECONDS
            delay_seconds = max(self._delay_of(error), min(most, least * 2 ** min(failures - 1, 10)))
            # What came up while it failed does not shorten the wait; news after that does.
            self.add(key, delay_seconds)
        if again and error is None:
            self.add(key)
        if self._done is not None:
            self._done(key, seconds, error)
