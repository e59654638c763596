"""What the next process needs of everybody, made ahead: a control group, and a spare of the zygote in it.

So most of what a process touches at its start is its own by then, is charged to the group that it will be limited in,
and costs nobody who waits for a model any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from typing import TYPE_CHECKING

from omnimodel.agent.limits import Group, Groups
from omnimodel.errors import ProcessError

if TYPE_CHECKING:
    from omnimodel.agent.zygotes import Zygotes

_REMOVE_SECONDS = 5.0


async def remove(group: Group) -> None:
    """Kill what is in a group and remove it; what does not end in time is left to the next agent."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while not group.remove() and time.monotonic() < deadline:
        group.kill()
        await asyncio.sleep(0.005)


class Ahead:
    """See the module. Nobody knows yet whose a group will be, so its name says nothing, and no other agent gives it.

    Args:
        groups: where they are made.
        zygotes: whose spare goes into one.
    """

    def __init__(self, groups: Groups, zygotes: Zygotes) -> None:
        self._groups = groups
        self._zygotes = zygotes
        self._names = map("{}-{}".format, itertools.repeat(secrets.token_hex(4)), itertools.count(1))
        self._next: asyncio.Task[Group] | None = None
        self.name = ""  # of the group that is there for the next process, or comes to be

    def provide(self) -> None:
        """Begin to make a group and a spare, if there is none."""
        if self._next is None:
            self.name = next(self._names)
            self._next = asyncio.create_task(self._make(self.name, spare=True), name="next process")

    async def take(self) -> Group:
        """The group of the next process, which may have a spare in it; the receiver's to remove.

        Raises:
            OSError: none can be made.
        """
        made, self._next = self._next, None
        if made is None or (made.done() and made.exception() is not None):
            made = asyncio.create_task(self._make(next(self._names), spare=False))
        self.name = ""
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await remove(await made)  # a thread cannot be cancelled: what it makes must be removed
            raise

    async def _make(self, name: str, *, spare: bool) -> Group:
        group = await asyncio.to_thread(self._groups.create, name)
        if spare:
            with group.doors(ahead=True) as doors, contextlib.suppress(ProcessError):  # else it is forked when asked
                await self._zygotes.provide(name, doors)
        return group

    async def close(self) -> None:
        """Remove what was made for nobody."""
        made, self._next = self._next, None
        if made is not None:
            with contextlib.suppress(OSError):
                await remove(await made)
