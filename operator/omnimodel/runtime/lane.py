"""The one thread of a model that computes, and the fence in front of it.

Work goes through the lane in steps: one call of `predict`, or one value out of its generator. The fence is closed
while the model is evicted: it closes when the step under way has ended, and no step begins behind it. Requests whose
steps wait there go on after the next wake.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()


class Fence:
    """Either steps pass, one at a time, or the model is evicted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether the model is evicted."""
        return self._closed

    def close(self) -> None:
        """Wait until the step under way has ended, and let no other begin."""
        if not self._closed:
            self._lock.acquire()
            self._closed = True

    def open(self) -> None:
        """Let steps pass."""
        if self._closed:
            self._closed = False
            self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Lane:
    """A thread with a fence.

    Args:
        prepare: called in the thread before its first step.
        step: wraps each step, such as `torch.inference_mode`.
    """

    def __init__(self, prepare: Callable[[], None], step: Callable[[], Any]) -> None:
        self.fence = Fence()
        self.working = 0  # requests that have work here or waiting for it
        self._prepare = prepare
        self._step = step
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]]
        self._jobs = queue.SimpleQueue()
        self._current: asyncio.Future[Any] | None = None  # of the step under way
        self._thread = threading.Thread(target=self._run, name="lane", daemon=True)
        self._thread.start()

    @property
    def abandoned(self) -> bool:
        """Whether the step under way is one that nobody waits for any more."""
        current = self._current
        return current is not None and current.cancelled()

    def _run(self) -> None:
        self._prepare()
        while True:
            job, future, loop = self._jobs.get()
            if future.cancelled():
                continue
            with self.fence:
                if future.cancelled():  # its client went away while it waited for the fence
                    continue
                result: Any = None
                error: BaseException | None = None
                self._current = future
                try:
                    with self._step():
                        result = job()
                except BaseException as raised:
                    error = raised
                self._current = None
            with suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(_settle, future, result, error)
            del job, future, result, error

    def _submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((job, future, loop))
        return future

    async def call(self, job: Callable[[], T]) -> T:
        """Run one step. When the caller is cancelled, a step that waits is dropped and the result of one that runs."""
        self.working += 1
        try:
            return await self._submit(job)
        finally:
            self.working -= 1

    async def stream(self, values: Iterator[T]) -> AsyncGenerator[T, None]:
        """Every value of an iterator, one step each. It is closed when the caller stops, in the lane too."""
        self.working += 1
        try:
            while (value := await self._submit(lambda: next(values, _END))) is not _END:
                yield value  # type: ignore[misc]
        finally:
            self.working -= 1
            close = getattr(values, "close", None)
            if close is not None:
                self._submit(close).add_done_callback(_forget)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration | SystemExit | KeyboardInterrupt):  # a future cannot carry these
        future.set_exception(RuntimeError(f"the handler raised {type(error).__name__}: {error}"))
    else:
        future.set_exception(error)


def _forget(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
