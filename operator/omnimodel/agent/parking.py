"""Parks processes of evicted models: all they hold on the device goes to host memory, and comes back before a wake.

The driver does it without the process's help (`Device.parking`). A process with frames mapped is never parked, and one
comes back only after its bytes were held in the ledger, one at a time. One that does not come back is killed, and its
model starts cold. What a parked process has of host memory is measured as of any other.

Of a server of others what is left in its sleep is parked, where one of its processes holds all of it. With several, or
over several devices, the driver has hung or not brought them back: those servers are not parked, and neither is one
again whose process has once not come back. Source: NVIDIA/cuda-checkpoint#27, #30, #45, #47; that one process of a
sleeping vLLM comes back: vllm-project/vllm#56373.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from omnimodel.agent.instance import Instance, State
from omnimodel.agent.loads import check_free
from omnimodel.errors import OmniError, ProcessError
from omnimodel.memory.devices import RestoreFailedError
from omnimodel.memory.ledger import Kind
from omnimodel.placement.state import bytes_text

if TYPE_CHECKING:
    from omnimodel.agent.contexts import Contexts
    from omnimodel.agent.moves import DeviceMemory
    from omnimodel.agent.process import ModelProcess

log = logging.getLogger(__name__)

_ROOM_SECONDS = 15.0  # for others to make room on the host
_AGAIN_SECONDS = 30.0  # to the next try, when there was no room for it or the driver did not say who holds what
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
        """Whether its process, which is warm, can be parked as far as is known, and may be without need."""
        return time.monotonic() >= instance.rest.parks_at_seconds and self._possible(instance)

    def _possible(self, instance: Instance) -> bool:
        if self._memory.device.parking is None or instance.rest.unparkable:
            return False
        left = instance.rest.asleep_bytes
        return not instance.foreign or (len(left) == 1 and any(left.values()))

    async def park(self, instance: Instance, why: str) -> bool:
        """WARM -> PARKED, or COLD when it failed half-way.

        Returns:
            Whether it has left the device; if not, its process is where it was.
        """
        process, parking, account = instance.process, self._memory.device.parking, self._memory.ledger.device
        if process is None:
            return True
        if parking is None or not self._possible(instance):
            return False
        instance.rest.parks_at_seconds = time.monotonic() + _AGAIN_SECONDS  # if it is not now
        holders = await self._contexts.holders(process)
        if instance.process is not process:
            return True
        held_bytes = account.held_bytes(instance.name, _kind(instance)) if holders is None else sum(holders.values())
        pid = process.pid
        if instance.foreign:
            if holders is None or len(holders) != 1:
                log.info("not_parked model=%s holders=%s", instance.name, holders)
                return False
            (pid,) = holders
        needs_bytes = instance.weights_bytes + instance.working_bytes + (0 if instance.foreign else held_bytes)
        if needs_bytes > account.capacity_bytes or not await self._take_room_on_host(instance, held_bytes):
            return False  # it could never come back, or there is no place to put it
        try:
            async with self._one_at_a_time:
                mapped = instance.mapped is not None
                await self._driven(process, lambda: parking.park(pid, frames_mapped=mapped))
            left_bytes = await self._left_of(process)
            if left_bytes >= held_bytes > 0:
                raise RestoreFailedError(instance.subject, f"{bytes_text(left_bytes)} stayed on the device")
        except RestoreFailedError as error:
            if instance.process is process:
                await self._end(instance, f"its process was killed because it could not be parked: {error.problem}")
            return True
        except OmniError as error:
            log.warning("not_parked model=%s problem=%r", instance.name, error.problem)
            instance.rest.unparkable = True
            return instance.process is not process
        if instance.process is not process:
            return True
        account.give_back(instance.name, Kind.WORKING)
        self._note(instance, left_bytes)
        instance.context_bytes, instance.rest.parked_pid, instance.rest.parks_at_seconds = held_bytes, pid, 0.0
        instance.set_state(State.PARKED, why)
        await self._measure(instance)
        self._tell(instance, "Parked", why)
        return True

    async def unpark(self, instance: Instance) -> None:
        """PARKED -> WARM, or COLD when its process does not come back.

        Raises:
            LedgerError: its bytes are not free; it is parked still.
            ProcessError: it ended, or nobody wants it any more, while it waited for them.
        """
        process, parking = instance.process, self._memory.device.parking
        assert parking is not None
        if process is None:
            return
        began = time.perf_counter()
        kind, pid, account = _kind(instance), instance.rest.parked_pid, self._memory.ledger.device
        here_bytes = account.held_bytes(instance.name, kind)
        more_bytes = max(0, instance.context_bytes - here_bytes)
        await self._contexts.hold(instance, more_bytes, kind)
        try:
            await asyncio.to_thread(check_free, self._memory.device, more_bytes)
        except (OmniError, asyncio.CancelledError):
            if instance.process is process:
                account.give_back(instance.name, kind, more_bytes)
            raise
        try:
            async with self._one_at_a_time:
                await self._driven(process, lambda: parking.unpark(pid))
            if instance.process is process:
                self._note(instance, max(here_bytes, instance.context_bytes))
                seconds = instance.history.last_unpark_seconds = time.perf_counter() - began
                instance.set_state(State.WARM, f"its process was brought back in {seconds:.3f} s")
        except OmniError as error:
            if instance.process is process:
                await self._end(instance, f"its process was killed because it did not come back: {error.problem}")
            return
        await self._contexts.started(instance)
        await self._measure(instance)

    def _note(self, instance: Instance, held_bytes: int) -> None:
        """Say what a process at rest holds on the device now."""
        self._memory.ledger.device.set(instance.name, _kind(instance), held_bytes)
        if instance.foreign:
            instance.rest.asleep_bytes = {self._memory.device.name: held_bytes}

    async def _end(self, instance: Instance, why: str) -> None:
        """Kill a process that is lost; its model starts cold when it is wanted."""
        instance.rest.unparkable = True
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

    async def _take_room_on_host(self, instance: Instance, size_bytes: int) -> bool:
        """Take host memory for what leaves the device, until the move is over; False where there is too little."""
        host, deadline = self._memory.ledger.host, time.monotonic() + _ROOM_SECONDS
        while host.free_bytes < size_bytes and time.monotonic() < deadline:
            if not self._relieve(size_bytes - host.free_bytes):
                break
            await asyncio.sleep(0.01)
        if host.free_bytes < size_bytes:
            return False
        host.hold(instance.name, Kind.PROMISE, size_bytes)
        return True


def _kind(instance: Instance) -> Kind:
    """As what the ledger has the bytes of its process at rest."""
    return Kind.WORKING if instance.foreign else Kind.CONTEXT
