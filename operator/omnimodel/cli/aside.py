"""What may block for as long as somebody likes, such as writing to a pipe that nobody reads: in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

FINISH_SECONDS = 1.0


class Aside:
    """Does one thing after another in a daemon thread, which the end of the process does not wait for."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="aside", daemon=True).start()

    def begin(self, call: Callable[[], object]) -> Future[None]:
        """Have something done in its turn."""
        done: Future[None] = Future()
        self._work.put((call, done))
        return done

    async def run(self, call: Callable[[], object]) -> None:
        """Have something done, and wait for it. Raises what it raises."""
        await asyncio.wrap_future(self.begin(call))

    async def finish(self) -> None:
        """Wait for what was begun, `FINISH_SECONDS` at most."""
        await asyncio.wait([asyncio.wrap_future(self.begin(lambda: None))], timeout=FINISH_SECONDS)

    def _run(self) -> None:
        while True:
            call, done = self._work.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                call()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


class Lines(Aside):
    """Writes lines to a descriptor.

    Args:
        descriptor: such as 1 for standard output; past the buffers of Python, whose locks a blocked write would hold.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def put(self, text: str) -> None:
        """Write a line in its turn; nobody waits for it."""
        self.begin(lambda: self._write(text))

    async def write(self, text: str) -> None:
        """Write a line, and wait until it is written. Raises OSError."""
        await self.run(lambda: self._write(text))

    def _write(self, text: str) -> None:
        rest = memoryview(f"{text}\n".encode())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
