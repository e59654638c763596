"""What the agent and one process say to each other over its control channel: commands, progress and replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnimodel.errors import OmniError, ProcessError, Reason
from omnimodel.protocol.channel import AsyncChannel, ChannelClosed
from omnimodel.protocol.process import (
    Build,
    Command,
    Envelope,
    Evict,
    Progress,
    Publish,
    Reply,
    Settle,
    Start,
    Stop,
    Wake,
    decode,
)

ProgressSaid = Callable[[Progress], None]

# What a process may say of itself: that a device, which others use too, can do nothing any more the agent finds out.
_OF_ITSELF = frozenset(Reason) - {Reason.DEVICE_LOST}

_LATE: dict[type[Command], tuple[Reason, str]] = {
    Start: (Reason.LOAD_TIMEOUT, "raise limits.loadDeadline, or see its log for what it waits for"),
    Publish: (Reason.LOAD_TIMEOUT, "raise limits.loadDeadline, or see its log for what it waits for"),
    Build: (Reason.ENVIRONMENT_FAILED, "see its log for what the compiler waits for"),
    Wake: (Reason.LOAD_TIMEOUT, "see its log"),
    Evict: (Reason.EVICT_TIMEOUT, "its process is killed so that its memory comes back"),
    Stop: (Reason.EVICT_TIMEOUT, "its process is killed"),
    Settle: (Reason.DEADLINE_EXCEEDED, "it is killed, and started again"),
}


@dataclass
class _Moving:
    """The time limit of a command that may take as long as it moves."""

    limit: asyncio.Timeout
    seconds: float
    last: Progress | None = None

    def extend(self, said: Progress) -> None:
        """Begin the time anew when something has moved."""
        if said != self.last and not self.limit.expired():
            self.last = said
            self.limit.reschedule(asyncio.get_running_loop().time() + self.seconds)


class Conversation:
    """See the module.

    Args:
        subject: the object in messages.
        generation, instance: of the process, as its commands carry them.
        channel: to it; whoever made it closes it.
        first: the number of the first command; numbers of one process only grow, whichever agent sends them.
        not_understood: called with the problem when the process says what is no message.
    """

    def __init__(
        self,
        subject: str,
        generation: int,
        instance: str,
        channel: AsyncChannel,
        *,
        first: int,
        not_understood: Callable[[str], None],
    ) -> None:
        self._subject = subject
        self._generation = generation
        self._instance = instance
        self._channel = channel
        self._next_id = first
        self._not_understood = not_understood
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._progress: dict[int, ProgressSaid] = {}
        self._moving: dict[int, _Moving] = {}

    async def ask(
        self, command: Command, descriptors: Sequence[int], timeout_seconds: float, progress: ProgressSaid | None
    ) -> Reply:
        """Send a command and wait for its reply; see `ModelProcess.command`."""
        number, self._next_id = self._next_id, self._next_id + 1
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[number] = waiter
        if progress is not None:
            self._progress[number] = progress
        envelope = Envelope(number, self._generation, self._instance, command)
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                if isinstance(command, Start | Publish | Build):
                    self._moving[number] = _Moving(limit, timeout_seconds)
                with contextlib.suppress(ChannelClosed):  # it is ending: the waiter gets to know why
                    await self._channel.send(envelope.to_message(), descriptors)
                reply = await waiter
        except TimeoutError as error:
            reason, cure = _LATE.get(type(command), (Reason.DEADLINE_EXCEEDED, "see its log"))
            moving = " without any progress" if number in self._moving else ""
            problem = f"its process did not answer {command.op!r} in {timeout_seconds:g} s{moving}"
            raise ProcessError(self._subject, problem, cure, reason=reason) from error
        finally:
            self._replies.pop(number, None)
            self._progress.pop(number, None)
            self._moving.pop(number, None)
        if not reply.ok:
            reason = Reason(reply.reason) if reply.reason in _OF_ITSELF else Reason.HANDLER_FAILED
            problem = reply.message.removeprefix(f"{self._subject}: ")  # its own errors name it, too
            refusal = ProcessError(self._subject, problem, "", reason=reason)
            if reply.detail:
                refusal.add_note(reply.detail)
            raise refusal
        return reply

    async def listen(self) -> None:
        """Take what the process says. It runs a stranger's code: a flood, or anything that is no message, ends it."""
        try:
            while True:
                message, _ = await self._channel.receive()
                said = decode(message)
                if isinstance(said, Progress):
                    for moving in self._moving.values():
                        moving.extend(said)
                    for callback in list(self._progress.values()):
                        callback(said)
                elif (waiter := self._replies.get(said.id)) is not None and not waiter.done():
                    waiter.set_result(said)
        except ChannelClosed:
            return
        except Exception as error:
            self._not_understood(error.problem if isinstance(error, OmniError) else repr(error))

    def end(self, reason: ProcessError) -> None:
        """Whoever still waits for a reply learns why there is none."""
        for waiter in self._replies.values():
            if not waiter.done():
                waiter.set_exception(reason)
