"""The agent's end of one zygote: what it asks, and the task that reads what the zygote says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnimodel.errors import OmniError, ProcessError
from omnimodel.protocol.channel import AsyncChannel, ChannelClosed

ProgressSaid = Callable[[str, int, int], None]
_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class ZygoteReport:
    """How a zygote came up: `private_bytes` is what it costs the machine once."""

    pid: int
    start_ticks: int
    seconds: float
    private_bytes: int
    threads: int
    absent: tuple[str, ...]


class Zygote:
    """One zygote and the task that reads what it says.

    Args:
        channel: to it.
        process: it is the agent's own child.
        log_path: what it prints.
        ended: called when it has ended without being closed.
    """

    def __init__(
        self,
        channel: AsyncChannel,
        process: subprocess.Popen[bytes],
        log_path: Path,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel = channel
        self.process = process
        self.log_path = log_path
        self._ended = ended
        self._closing = False
        self.report: asyncio.Future[ZygoteReport] = asyncio.get_running_loop().create_future()
        self.waiting: dict[str, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self.statuses: dict[int, asyncio.Future[int]] = {}
        self.progress: ProgressSaid | None = None
        self.reader = asyncio.create_task(self._read(), name="zygote reader")

    @property
    def alive(self) -> bool:
        """Whether it has not hung up."""
        return not self.reader.done()

    @property
    def up(self) -> bool:
        """Whether it has come up at all."""
        return self.report.done() and not self.report.cancelled() and self.report.exception() is None

    async def _read(self) -> None:
        try:
            while True:
                message, descriptors = await self.channel.receive()
                self._take(message, descriptors)
        except OmniError:
            pass
        finally:
            self._gone()

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        kind = message["kind"]
        if kind == "progress":
            if self.progress is not None:
                self.progress(message["stage"], message["done"], message["total"])
        elif kind == "up":
            names = ("pid", "seconds", "threads")
            self.report.set_result(
                ZygoteReport(
                    start_ticks=message["startTicks"],
                    private_bytes=message["privateBytes"],
                    absent=tuple(message["absent"]),
                    **{name: message[name] for name in names},
                )
            )
        elif kind == "exited":
            status = self.statuses.pop(message["pid"], None)
            if status is not None and not status.done():
                status.set_result(message["status"])
        else:
            waiter = self.waiting.pop(message["instance"], None)
            if kind == "forked":
                self.statuses[message["pid"]] = asyncio.get_running_loop().create_future()
            if waiter is not None and not waiter.done():
                waiter.set_result((message, descriptors))
            else:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _gone(self) -> None:
        error = ProcessError("zygote", "it has ended", f"see {self.log_path}")
        futures: list[asyncio.Future[Any]] = [self.report, *self.waiting.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting
        for status in self.statuses.values():
            status.cancel()
        self.waiting.clear()
        self.channel.close()
        asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        if not self._closing and self.up:
            self._ended()

    async def tell(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Send a request that has no answer.

        Raises:
            ProcessError: it has ended.
        """
        try:
            await self.channel.send(message, descriptors)
        except ChannelClosed as error:
            raise ProcessError("zygote", "it has ended", f"see {self.log_path}") from error

    async def ask(
        self, key: str, message: dict[str, Any], descriptors: Sequence[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request and wait for its answer.

        Raises:
            ProcessError: it has ended.
        """
        waiter: asyncio.Future[tuple[dict[str, Any], list[int]]] = asyncio.get_running_loop().create_future()
        self.waiting[key] = waiter
        try:
            await self.tell(message, descriptors)
            return await waiter
        finally:
            self.waiting.pop(key, None)

    async def close(self, *, kill: bool = False) -> None:
        """Hang up, at which it ends, and wait for its end."""
        self._closing = True
        if kill:
            self.process.kill()
        self.reader.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        await asyncio.to_thread(self.process.wait)

    def last_line(self) -> str:
        """The last line that it printed, such as the error that an import failed with."""
        with contextlib.suppress(OSError):
            text = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
            return text.splitlines()[-1] if text else "it printed nothing"
        return "it has no log"
