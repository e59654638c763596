"""The life of one process after another of an instance: each is followed from its start until it is seen to be gone.

Gone is a process when the kernel says so (its pidfd is readable), not when it was told to end. One that hangs in a
driver is neither there nor gone, and its instance has it until it is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp

from omnimodel.agent.ending import KILL_SECONDS

if TYPE_CHECKING:
    from omnimodel.agent.process import ModelProcess
    from omnimodel.errors import OmniError

log = logging.getLogger(__name__)

_STOP_SECONDS = 2.0
_IDLE_CONNECTION_SECONDS = 15.0
_IDLE_FOREIGN_CONNECTION_SECONDS = 2.0  # their servers close idle connections themselves, some after five seconds


class Lifetime:
    """See the module.

    Args:
        name: of the instance.
        gone: called at once when a process is seen to be gone; nobody has it any more.
        buried: called when its connections are closed, too, with the reason when it was not told to go.
    """

    def __init__(self, name: str, *, gone: Callable[[], None], buried: Callable[[OmniError | None], None]) -> None:
        self._name = name
        self._gone = gone
        self._buried = buried
        self.process: ModelProcess | None = None
        self.session: aiohttp.ClientSession | None = None
        self.started_seconds = -math.inf
        self.hung = False
        self._watch: asyncio.Task[None] | None = None
        self._ending = False  # told to
        self._killed: tuple[ModelProcess, OmniError | None] | None = None  # the last one, and why it was at first

    def begin(self, process: ModelProcess, *, foreign: bool) -> None:
        """Follow a process.

        Args:
            foreign: its server closes idle connections itself.
        """
        self.process, self._ending = process, False
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(
                path=str(process.socket_path),
                limit=0,
                keepalive_timeout=_IDLE_FOREIGN_CONNECTION_SECONDS if foreign else _IDLE_CONNECTION_SECONDS,
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        self.started_seconds = time.monotonic()
        self._watch = asyncio.create_task(self._watch_exit(process), name=f"watch {self._name}")

    def ended_because(self, process: ModelProcess) -> OmniError | None:
        """Why the agent has ended a process, if it had a reason that concerns its requests."""
        return self._killed[1] if self._killed is not None and self._killed[0] is process else None

    async def ended(self, process: ModelProcess) -> None:
        """Wait until a process that does not take connections is seen to be gone; not for long."""
        if self.process is process and self._watch is not None:
            await asyncio.wait([self._watch], timeout=_STOP_SECONDS)

    async def stop(self) -> None:
        """End the process in peace."""
        if self.process is not None:
            self._ending = True
            await self.process.stop(_STOP_SECONDS)
            await self._seen_to_be_gone()

    async def kill(self, why: OmniError | None) -> bool:
        """End the process at once; whether it is seen to be gone."""
        if self.process is None:
            return True
        if self._killed is None or self._killed[0] is not self.process:  # later reasons come of the first
            self._killed = (self.process, why)
        self._ending = True
        self.process.kill()
        return await self._seen_to_be_gone()

    async def _seen_to_be_gone(self) -> bool:
        watch = self._watch
        if watch is None:
            return True
        await asyncio.wait([watch], timeout=KILL_SECONDS)
        self.hung = not watch.done()
        if self.hung:
            log.error("not_gone model=%s pid=%s", self._name, self.process.pid if self.process else 0)
        return watch.done()

    async def _watch_exit(self, process: ModelProcess) -> None:
        ended = await asyncio.shield(process.exited)
        session, self.session, self.process = self.session, None, None
        self._gone()
        if session is not None:
            await session.close()
        self.hung = False
        self._buried(self.ended_because(process) if self._ending else ended)
