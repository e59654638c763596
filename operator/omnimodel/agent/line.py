"""The line of one instance: who waits for it, who is in flight, and how often requests come."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omnimodel.agent.tokens import Tokens
from omnimodel.errors import DispatchError
from omnimodel.placement.state import Constants, next_gap

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance

_CONSTANTS = Constants()


@dataclass(eq=False)
class Waiter:
    """A place in a line: of a request, or (`system`) of the agent itself, which wants the model resident.

    Args:
        line: where it waits now, or was admitted; a new revision of the model takes waiters over.
        arrived_seconds: monotonic.
        admitted: done when the model takes it; a DispatchError when it never will.
        background: it may wait while interactive requests use the device.
    """

    line: Line
    arrived_seconds: float
    admitted: asyncio.Future[None]
    system: bool = False
    background: bool = False

    def leave(self) -> None:
        """Give the place up, waiting or in flight."""
        line = self.line
        if self in line.waiting:
            line.waiting.remove(self)
            line.owed = min(line.owed, len(line.waiting))
            self.admitted.cancel()
        elif self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None:
            line.in_flight -= 1
            line.system_in_flight -= self.system
            if line.in_flight == 0:
                line.empty.set()
        line.changed()


@dataclass(eq=False)
class Line:
    """The requests of one instance, in the order they came.

    Args:
        instance: whose line it is.
        concurrency: how many may be in flight at once.
        limit: how many may wait.
        changed: called after every change, so that the broker looks again.
        system_in_flight: how many of those in flight are the agent's own.
        owed: waiters that the last wake was made for and that are not admitted yet; they protect it from eviction.
        gap_seconds: moving mean of the time between arrivals; infinite until there were two.
        last_arrival_seconds: monotonic; minus infinity before the first.
        served, failed: of this model since the agent began; a new revision goes on with them, and with `tokens`.
        tokens_asked: whether nobody was let in since its process was asked for them.
    """

    instance: Instance
    concurrency: int
    limit: int
    changed: Callable[[], None]
    waiting: deque[Waiter] = field(default_factory=deque)
    in_flight: int = 0
    system_in_flight: int = 0
    owed: int = 0
    gap_seconds: float = math.inf
    last_arrival_seconds: float = -math.inf
    served: int = 0
    failed: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    tokens_asked: bool = True
    empty: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.empty.set()

    def arrive(self, now: float, *, system: bool = False, background: bool = False) -> Waiter:
        """Take the place at the end; the agent itself takes the first."""
        waiter = Waiter(self, now, asyncio.get_running_loop().create_future(), system, background)
        if system:
            self.waiting.appendleft(waiter)
        else:
            self.gap_seconds = next_gap(self.gap_seconds, self.last_arrival_seconds, now, _CONSTANTS)
            self.last_arrival_seconds = now
            self.waiting.append(waiter)
        self.changed()
        return waiter

    def come_back(self, arrived_seconds: float, *, background: bool = False) -> Waiter:
        """Take the place again that a request had by its age; it is no further arrival."""
        waiter = Waiter(self, arrived_seconds, asyncio.get_running_loop().create_future(), background=background)
        older = sum(other.system or other.arrived_seconds <= arrived_seconds for other in self.waiting)
        self.waiting.insert(older, waiter)
        self.changed()
        return waiter

    def admit(self, *, system_only: bool = False) -> None:
        """Let waiters in, in order, as far as the concurrency goes."""
        while self.waiting and self.in_flight < self.concurrency:
            if system_only and not self.waiting[0].system:
                return
            waiter = self.waiting.popleft()
            self.owed = max(0, self.owed - 1)
            if not waiter.admitted.done():
                self.in_flight += 1
                self.system_in_flight += waiter.system
                self.tokens_asked = False
                self.empty.clear()
                waiter.admitted.set_result(None)

    def refuse(self, error: Callable[[], DispatchError]) -> None:
        """Answer everybody who waits with an error."""
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error())
        self.owed = 0

    def hand_over(self, successor: Line) -> None:
        """Move everybody who waits, and what is known of arrivals, to the line of a new revision."""
        requests = [waiter for waiter in self.waiting if not waiter.system]
        for waiter in requests:
            self.waiting.remove(waiter)
            waiter.line = successor
        successor.waiting.extendleft(reversed(requests))
        successor.gap_seconds, successor.last_arrival_seconds = self.gap_seconds, self.last_arrival_seconds
        successor.served += self.served
        successor.failed += self.failed
        self.tokens.add(successor.tokens.prompt, successor.tokens.generated)
        successor.tokens = self.tokens  # of both from now on: some are in flight here yet
        self.owed = min(self.owed, len(self.waiting))

    async def quiet(self) -> None:
        """Wait until nobody is in flight."""
        await self.empty.wait()

    @property
    def busy(self) -> bool:
        """Whether anybody waits or is in flight."""
        return bool(self.waiting or self.in_flight)
