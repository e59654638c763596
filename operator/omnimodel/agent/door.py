"""The door of one instance: which requests it lets in, and what it tells those that it does not."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from omnimodel.agent.abandoned import until_stopped
from omnimodel.errors import DispatchError, OmniError, Reason

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.process import ModelProcess

_END_SECONDS = 2.0  # a process whose connection broke is seen to be gone after a moment

_MOVES = {  # by `State`: what is under way
    "starting": "its process to start",
    "waking": "its wake to end",
    "evicting": "its eviction to end",
    "stopping": "its process to end",
}


class Door:
    """See the module.

    Args:
        instance: whose door it is.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._abandoned: asyncio.Task[None] | None = None

    def admit(self) -> None:
        """Let in who waits, if it may: not before its first answer was checked, and not while it drains."""
        instance = self._instance
        if not instance.resident or instance.leaving or instance.proving or self._abandoned is not None:
            return
        if not instance.draining or instance.line.owed:
            instance.line.admit(system_only=not instance.verified)

    def abandon(self, process: ModelProcess) -> None:
        """Note that nobody waits any more for an answer that the process has not finished."""
        instance = self._instance
        if self._abandoned is None and instance.process is process and not instance.foreign and not instance.freezable:
            work = until_stopped(instance, process)
            self._abandoned = asyncio.create_task(work, name=f"abandoned {instance.name}")
            self._abandoned.add_done_callback(self._stopped_computing)

    def _stopped_computing(self, _: asyncio.Task[None]) -> None:
        self._abandoned = None
        self.admit()

    def check(self) -> None:
        """Raise the DispatchError with which a request is refused at once, if there is one."""
        instance, line = self._instance, self._instance.line
        if instance.removed or instance.blocked or instance.failures.waiting(time.monotonic()):
            raise self.refusal()
        if len(line.waiting) >= line.limit:
            raise DispatchError(
                instance.subject,
                f"{line.limit} requests wait already, its limits.queue",
                "send it again later",
                reason=Reason.QUEUE_FULL,
                status=429,
                retry_after_seconds=max(1.0, round(self.expected_wake_seconds())),
            )

    def refusal(self) -> DispatchError:
        """The answer to a request that the model cannot take."""
        instance = self._instance
        if instance.removed:
            return DispatchError(instance.subject, instance.removed, reason=Reason.MODEL_NOT_FOUND, status=404)
        if why := instance.blocked:
            return DispatchError(instance.subject, why.sentence, why.cure, reason=why.reason, status=503)
        ended = OmniError(instance.subject, "its process has just ended", reason=Reason.CRASHED)
        failure = instance.failures.last or ended
        return DispatchError(
            instance.subject,
            failure.problem,
            failure.cure,
            reason=failure.reason,
            status=503,
            retry_after_seconds=max(1.0, math.ceil(instance.failures.retry_at_seconds - time.monotonic())),
        )

    def expected_wake_seconds(self) -> float:
        """How long a request that comes now is likely to be held, from what earlier wakes took."""
        instance = self._instance
        if instance.resident and not instance.draining:
            return 0.0
        history = instance.history
        return history.last_wake_seconds + (history.last_start_seconds if instance.process is None else 0.0)

    def waiting_for(self) -> str:
        """What a held request waits for, for its error message."""
        instance = self._instance
        if instance.prepared is None:
            return f"its image ({instance.message or 'being prepared'})"
        if instance.resident:
            return "its turn in the queue of the model"
        if instance.state in _MOVES:
            return _MOVES[instance.state]
        return "room on the device" + (f" (the model was {instance.made_room})" if instance.made_room else "")

    def waited_for(self, since_seconds: float) -> str:
        """What a request that came at `since_seconds` and was held waited for, for the response headers."""
        return "wake" if self._instance.woken_seconds > since_seconds else "queue"

    async def failure_of(self, process: ModelProcess, error: BaseException) -> DispatchError:
        """Why a connection to the process broke: it died (and of what), or it closed the connection."""
        instance = self._instance
        try:
            async with asyncio.timeout(_END_SECONDS):
                ended: OmniError = await process.exited
        except TimeoutError:
            return DispatchError(
                instance.subject,
                f"its process closed the connection before the end of the answer ({type(error).__name__})",
                f"see omni logs {instance.model}",
                reason=Reason.CRASHED,
                status=502,
            )
        ended = instance.lifetime.ended_because(process) or ended
        return DispatchError(instance.subject, ended.problem, ended.cure, reason=ended.reason, status=502)
