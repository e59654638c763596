"""Parks processes of evicted models: all they hold on the device goes to host memory, and comes back before a wake.

The driver does it without the process's help (`Device.parking`). A process with frames mapped is never parked, and one
comes back only after its bytes were held in the ledger, one at a time. One that does not come back is killed, and its
model starts cold. What a parked process has of host memory is measured as of any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from omnimodel.agent.instance import Instance, State
from omnimodel.errors import LedgerError, OmniError, ProcessError
from omnimodel.memory.devices import RestoreFailedError
from omnimodel.memory.ledger import Kind
from omnimodel.placement.state import bytes_text

if TYPE_CHECKING:
    from omnimodel.agent.contexts import Contexts
    from omnimodel.agent.moves import DeviceMemory
    from omnimodel.agent.process import ModelProcess

log = logging.getLogger(__name__)

_ROOM_SECONDS = 15.0  # for others to make room on the host
_SEEN_SECONDS = 1.0  # for the driver to show what it has done


class Tell(Protocol):
    """Tells people what happened to an instance."""

    def __call__(self, instance: Instance, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell it."""


class Parks:
    """See the module.

    Args:
        memory: of the device.
        contexts: measure and hold what processes have on it.
        relieve: asks for so many bytes of host memory; whether any are coming.
        measure: notes the private memory of an instance.
        tell: tells people what happened to it.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        contexts: Contexts,
        *,
        relieve: Callable[[int], bool],
        measure: Callable[[Instance], Awaitable[None]],
        tell: Tell,
    ) -> None:
        self._memory = memory
        self._contexts = contexts
        self._relieve = relieve
        self._measure = measure
        self._tell = tell
        self._one_at_a_time = asyncio.Lock()

    def can(self, instance: Instance) -> bool:
        """Whether its process, which is warm, can be parked as far as is known."""
        return self._memory.device.parking is not None and not instance.unparkable and not instance.foreign

    async def park(self, instance: Instance, why: str) -> bool:
        """WARM -> PARKED, or COLD when it failed half-way.

        Returns:
            Whether it has left the device; if not, its process is where it was.
        """
        process, parking, account = instance.process, self._memory.device.parking, self._memory.ledger.device
        if process is None:
            return True
        if parking is None or not self.can(instance):
            return False
        held_bytes = await self._contexts.bytes_of(process)
        if held_bytes is None:
            held_bytes = account.held_bytes(instance.name, Kind.CONTEXT)
        needs_bytes = instance.weights_bytes + instance.working_bytes + held_bytes
        if needs_bytes > account.capacity_bytes or not await self._room_on_host(held_bytes):
            return False  # it could never come back, or there is no place to put it
        try:
            async with self._one_at_a_time:
                mapped = instance.mapped is not None
                await self._driven(process, lambda: parking.park(process.pid, frames_mapped=mapped))
            left_bytes = await self._left_of(process)
            if left_bytes >= held_bytes > 0:
                raise RestoreFailedError(instance.subject, f"{bytes_text(left_bytes)} stayed on the device")
        except RestoreFailedError as error:
            if instance.process is process:
                await self._end(instance, f"its process was killed because it could not be parked: {error.problem}")
            return True
        except OmniError as error:
            log.warning("not_parked model=%s problem=%r", instance.name, error.problem)
            instance.unparkable = True
            return instance.process is not process
        if instance.process is not process:
            return True
        account.give_back(instance.name, Kind.WORKING)
        account.set(instance.name, Kind.CONTEXT, left_bytes)
        instance.context_bytes = held_bytes
        instance.set_state(State.PARKED, why)
        await self._measure(instance)
        self._tell(instance, "Parked", why)
        return True

    async def unpark(self, instance: Instance) -> None:
        """PARKED -> WARM, or COLD when its process does not come back.

        Raises:
            LedgerError: its bytes are not free; it is parked still.
        """
        process, parking = instance.process, self._memory.device.parking
        assert parking is not None
        if process is None:
            return
        began = time.perf_counter()
        try:
            here_bytes = self._memory.ledger.device.held_bytes(instance.name, Kind.CONTEXT)
            await self._contexts.hold(instance, max(0, instance.context_bytes - here_bytes))
            async with self._one_at_a_time:
                await self._driven(process, lambda: parking.unpark(process.pid))
            if instance.process is process:
                seconds = instance.history.last_unpark_seconds = time.perf_counter() - began
                instance.set_state(State.WARM, f"its process was brought back in {seconds:.3f} s")
                await self._contexts.started(instance)
        except OmniError as error:
            if instance.process is not process:
                return
            if isinstance(error, LedgerError) and instance.state is State.PARKED:
                raise
            await self._end(instance, f"its process was killed because it did not come back: {error.problem}")
            return
        await self._measure(instance)

    async def _end(self, instance: Instance, why: str) -> None:
        """Kill a process that is lost; its model starts cold when it is wanted."""
        instance.set_state(State.STOPPING, why)
        self._tell(instance, "ParkingFailed", why, warning=True)
        await instance.kill()

    async def _driven(self, process: ModelProcess, work: Callable[[], float]) -> None:
        """Have the driver work on a process, and do not wait for it any more when the process ends.

        Raises:
            OmniError: it failed, or the process ended.
        """
        call = asyncio.ensure_future(asyncio.to_thread(work))
        both: set[asyncio.Future[Any]] = {call, process.exited}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise ProcessError(process.subject, "its process ended")
        call.result()

    async def _left_of(self, process: ModelProcess) -> int:
        """What the driver still shows of a parked process, when it has had a moment; 0 where it does not say."""
        deadline = time.monotonic() + _SEEN_SECONDS
        while True:
            left_bytes = await self._contexts.bytes_of(process)
            if not left_bytes or time.monotonic() > deadline:
                return left_bytes or 0
            await asyncio.sleep(0.01)

    async def _room_on_host(self, size_bytes: int) -> bool:
        host, deadline = self._memory.ledger.host, time.monotonic() + _ROOM_SECONDS
        while host.free_bytes < size_bytes and time.monotonic() < deadline:
            if not self._relieve(size_bytes - host.free_bytes):
                break
            await asyncio.sleep(0.01)
        return host.free_bytes >= size_bytes
