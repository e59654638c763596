"""What happened on this agent, for people to read: a bounded log that can be followed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

from omnimodel.protocol.admin import Event

log = logging.getLogger(__name__)

KEPT_EVENTS = 2000


class EventLog:
    """The latest events, oldest first."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque(maxlen=KEPT_EVENTS)
        self._count = 0
        self._more = asyncio.Event()

    def add(self, kind: str, namespace: str, name: str, reason: str, message: str, *, warning: bool = False) -> None:
        """Record an event of one object."""
        event = Event(time.time(), kind, namespace, name, "Warning" if warning else "Normal", reason, message)
        self._count += 1
        self._events.append((self._count, event))
        (log.warning if warning else log.info)(
            "event kind=%s name=%s/%s reason=%s message=%r", kind, namespace, name, reason, message
        )
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, *, follow: bool) -> AsyncIterator[Event]:
        """The events there are, then, with `follow`, those to come."""
        seen = 0
        while True:
            more = self._more
            for number, event in list(self._events):
                if number > seen:
                    seen = number
                    yield event
            if not follow:
                return
            await more.wait()
