"""Requests without end from several clients, while something is done to the system."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

from cluster_node.installation import Answer


class Load:
    """Asks until the context ends, and keeps every answer that is not the right one.

    Args:
        ask: one request.
        expected: the values of a right answer.
        workers: clients; each waits for its answer before it asks again.
        pause_seconds: between two requests of a client.
    """

    def __init__(
        self, ask: Callable[[], Answer], expected: Any, *, workers: int = 3, pause_seconds: float = 0.05
    ) -> None:
        self.answers = 0
        self.failures: list[Answer] = []
        self.slowest_seconds = 0.0
        self._ask, self._expected, self._pause_seconds = ask, expected, pause_seconds
        self._ending = threading.Event()
        self.clients = [threading.Thread(target=self._run, daemon=True) for _ in range(workers)]

    def __enter__(self) -> Self:
        for thread in self.clients:
            thread.start()
        self.more(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self.clients:
            thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            answer = self._ask()
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
            if answer.values != self._expected:
                self.failures.append(answer)
            self.answers += 1
            time.sleep(self._pause_seconds)

    def more(self, count: int, seconds: float = 120.0) -> None:
        """Wait for so many further answers."""
        wanted, deadline = self.answers + count, time.monotonic() + seconds
        while self.answers < wanted:
            assert time.monotonic() < deadline, f"not {count} more answers in {seconds} s; failed: {self.failures[:3]}"
            time.sleep(0.05)
