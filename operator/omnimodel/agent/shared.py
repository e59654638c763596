"""Work that several may want at once and that is done once: equal fetches, equal builds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

L = TypeVar("L")
Work = Callable[[list[L]], Awaitable[Path]]  # gets the listeners, which come and go while it runs


@dataclass
class _Running(Generic[L]):
    """Work under way, and what everyone who waits for it listens with."""

    task: asyncio.Future[Path]
    listeners: list[L] = field(default_factory=list)


class SharedWork(Generic[L]):
    """Runs work by key; it is cancelled when the last who waits for it goes, and never runs twice at once."""

    def __init__(self) -> None:
        self._running: dict[str, _Running[L]] = {}
        self._ending: dict[str, asyncio.Future[Path]] = {}

    def runs(self, key: str) -> bool:
        """Whether the work of a key runs now, or has not ended yet. May be asked by any thread."""
        return key in self._running or key in self._ending

    async def run(self, key: str, work: Work[L], listener: L) -> Path:
        """Wait for the result of the work of a key, starting it unless it runs already."""
        while ending := self._ending.get(key):
            await asyncio.wait([ending])
        running = self._running.get(key)
        if running is None:
            listeners: list[L] = []
            running = _Running(asyncio.ensure_future(work(listeners)), listeners)
            self._running[key] = running
        running.listeners.append(listener)
        try:
            return await asyncio.shield(running.task)
        finally:
            running.listeners.remove(listener)
            if not running.listeners and self._running.get(key) is running:
                del self._running[key]
                await self._end(key, running.task)

    async def _end(self, key: str, task: asyncio.Future[Path]) -> None:
        if task.done():
            return
        self._ending[key] = task
        task.add_done_callback(lambda _: self._ending.pop(key, None))
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
