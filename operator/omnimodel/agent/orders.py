"""What controllers and people order of one instance: to be woken, evicted, stopped, taken away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from omnimodel.agent.instance import Instance, State
from omnimodel.errors import DispatchError, OmniError, Reason

if TYPE_CHECKING:
    from omnimodel.agent.moves import Moves

log = logging.getLogger(__name__)


class Orders:
    """See the module.

    Args:
        forget: decides about an instance no more.
        moves: begins what is ordered.
        kick: lets the broker look again.
        reason: why a model waits, by its name.
    """

    def __init__(
        self,
        moves: Moves,
        *,
        forget: Callable[[Instance], None],
        kick: Callable[[], None],
        reason: Callable[[str], str],
    ) -> None:
        self._forget = forget
        self._moves = moves
        self._kick = kick
        self._reason = reason

    async def wake(self, instance: Instance, deadline_seconds: float) -> None:
        """Make an instance resident, as if a request waited for it.

        Raises:
            DispatchError: it could not, or not in time.
        """
        instance.door.check()
        waiter = instance.line.arrive(time.monotonic(), system=True)
        self._kick()
        try:
            async with asyncio.timeout(deadline_seconds):
                await waiter.admitted
        except TimeoutError:
            reason = self._reason(instance.name) or f"it waits for {instance.door.waiting_for()}"
            raise DispatchError(
                instance.subject,
                f"it was not resident after {deadline_seconds:g} s: {reason}",
                "wait longer, or evict something",
                reason=Reason.DEADLINE_EXCEEDED,
                status=504,
            ) from None
        finally:
            waiter.leave()

    async def evict(self, instance: Instance, deadline_seconds: float, why: str) -> None:
        """Drain an instance and take it off the device.

        Raises:
            DispatchError: its requests did not end in time; it serves on.
        """
        instance.draining = True
        try:
            async with asyncio.timeout(deadline_seconds):
                while instance.line.in_flight or instance.name in self._moves:
                    await self._moves.settle(instance)
                    if instance.line.in_flight:
                        await instance.line.quiet()
        except TimeoutError:
            raise DispatchError(
                instance.subject,
                f"{instance.line.in_flight} requests did not end within {deadline_seconds:g} s",
                "wait longer",
                reason=Reason.DEADLINE_EXCEEDED,
                status=504,
            ) from None
        finally:
            instance.draining = False
        if instance.state is State.RESIDENT:
            await self._moves.step_off(instance, why, "hand", stop=False)

    async def stop(self, instance: Instance, why: str) -> None:
        """Take an idle instance off the device and end its process; a request that comes starts a new one."""
        await self._moves.settle(instance)
        if instance.process is not None and not instance.line.in_flight:
            await self._moves.step_off(instance, why, "end", stop=True)

    async def remove(self, instance: Instance, why: str) -> None:
        """Take an instance away for good: its requests finish, its process goes, its bytes are free.

        Who waits is refused at once. Who is in flight has the model's `limits.drainTimeout`.
        """
        instance.draining = True
        instance.removed = why
        instance.line.refuse(instance.door.refusal)
        self._kick()
        if not await self._quiet(instance):
            seconds = instance.limits.drain_seconds
            late = OmniError(
                instance.subject,
                f"{why}, and the request did not end within {seconds:g} s, its limits.drainTimeout",
                "raise limits.drainTimeout",
                reason=Reason.DRAINING,
            )
            log.warning("drain_late model=%s in_flight=%d", instance.name, instance.line.in_flight)
            await instance.kill(late)
        await self._moves.give_up(instance)
        if instance.state is State.RESIDENT:
            await self._moves.step_off(instance, why, "end", stop=True)
        elif instance.state is State.WARM:
            with contextlib.suppress(OmniError):  # it hangs in the kernel
                await instance.stop(why)
        if await instance.kill():
            self._moves.on_exit(instance, None)
        else:
            self._moves.memory.frames.quarantine(instance.name)
        self._forget(instance)
        instance.line.refuse(instance.door.refusal)
        self._kick()

    @staticmethod
    async def _quiet(instance: Instance) -> bool:
        try:
            async with asyncio.timeout(instance.limits.drain_seconds):
                await instance.line.quiet()
        except TimeoutError:
            return False
        return True
