"""What processes hold on a device beside frames: held before it can come to be, and free when it is seen to be gone.

A process on a device with memory of its own has a context there from its start to its end, and working memory while
it is resident. What it holds the device's driver is asked, not the process: after an evict, working memory is free
only as far as the driver no longer shows it. A process that keeps more than a context is asked to empty its caches,
then parked, then killed. All of that is nothing where the device is host memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from omnimodel.agent.instance import Instance, State
from omnimodel.errors import LedgerError, OmniError, ProcessError, Reason
from omnimodel.memory.ledger import Kind
from omnimodel.placement.state import bytes_text

if TYPE_CHECKING:
    from omnimodel.agent.moves import DeviceMemory
    from omnimodel.agent.parking import Parks
    from omnimodel.agent.process import ModelProcess

log = logging.getLogger(__name__)

SPARE_BYTES = 128 << 20  # by which a context may grow: kernels are loaded when they are first used, libraries keep some
_ROOM_SECONDS = 15.0  # for others to make room that do so
_GONE_SECONDS = 10.0  # for the driver to take back what a process had that has ended
_LOOK_SECONDS = 0.01
_LOST_LOOK_SECONDS = 1.0  # once it should have been gone


class Contexts:
    """See the module.

    Args:
        memory: of the device.
        worth: of an image by its digest; the least worth loses its frames first.
        vacate: asks for so many bytes of the device; whether any are coming.
        tell: tells people what happened to an instance.
        is_lost: whether the device can do nothing any more; then nobody is asked, and nothing is waited for.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        worth: Callable[[str], float],
        vacate: Callable[[int], bool],
        tell: Callable[[Instance, str, str], None],
        is_lost: Callable[[], bool],
    ) -> None:
        self._memory = memory
        self._account = memory.ledger.device
        self._worth = worth
        self._vacate = vacate
        self._tell = tell
        self._is_lost = is_lost
        self.watts: float | None = None  # as of the last look
        self.joules: float | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._lost: dict[str, int] = {}
        self._first: dict[str, tuple[int, int]] = {}  # instance -> pid of its process, and what that took at its start

    @property
    def lost_bytes(self) -> int:
        """What processes held that have ended, and the driver has not taken back for long."""
        return sum(self._lost.values())

    @property
    def measured(self) -> bool:
        """Whether the driver says what each process holds."""
        return self._memory.device.meter is not None

    async def close(self) -> None:
        """Look after ended processes no more."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    # Room

    async def hold(self, instance: Instance, more_bytes: int, kind: Kind = Kind.CONTEXT) -> None:
        """Hold device memory that a process is about to take, when those that can be missed have made room.

        Raises:
            LedgerError: there is no room; naming both numbers.
            ProcessError: the process it is for ended meanwhile.
        """
        if not more_bytes:
            return
        process, deadline = instance.process, time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                self._account.hold(instance.name, kind, more_bytes)
                break
            except LedgerError:
                if not self._vacate(more_bytes - self._account.free_bytes) and time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_LOOK_SECONDS)
            if instance.process is not process:
                raise ProcessError(instance.subject, "its process ended while it waited for device memory")
            if instance.removed:
                raise ProcessError(instance.subject, f"it waited for device memory: {instance.removed}")
        try:
            await self._memory.frames.give_way(self._worth)
        except OmniError:
            if instance.process is process:
                self._account.give_back(instance.name, kind, more_bytes)
            raise

    def drop(self, instance: Instance) -> None:
        """Hold nothing any more for a process that has not come to be, or has ended."""
        if instance.process is None:
            self._account.give_back(instance.name, Kind.CONTEXT)

    # Measuring

    async def bytes_of(self, process: ModelProcess) -> int | None:
        """What a process holds, its children included, as the driver says; None when it does not say.

        Of one that has frames mapped these may be in it, or not.
        """
        holders = await self.holders(process)
        return None if holders is None else sum(holders.values())

    async def holders(self, process: ModelProcess) -> dict[int, int] | None:
        """Who of a process and its children holds how many bytes, by pid; None when the driver does not say."""
        meter = self._memory.device.meter
        if meter is None or self._is_lost():
            return None
        try:
            held = await asyncio.to_thread(meter.process_bytes)
        except OmniError as error:
            log.warning("device_not_measured device=%s problem=%r", self._memory.device.name, str(error))
            return None
        return {pid: held[pid] for pid in process.pids() if held.get(pid)}

    async def started(self, instance: Instance) -> None:
        """Hold what a process took at its start, or took again; one is killed that took more than there is room for."""
        try:
            await self._hold_taken(instance)
        except OmniError as error:
            await instance.kill(error)

    async def _hold_taken(self, instance: Instance) -> None:
        process = instance.process
        if process is None or instance.foreign:  # a server has nothing there yet, and is looked after elsewhere
            return
        taken_bytes = await self.bytes_of(process)
        if taken_bytes is None or instance.process is not process:
            return
        if self._first.get(instance.name, (0, 0))[0] != process.pid:
            self._first[instance.name] = (process.pid, taken_bytes)
        await self.hold(instance, max(0, taken_bytes - self._account.held_bytes(instance.name, Kind.CONTEXT)))
        instance.context_bytes = max(taken_bytes, instance.context_bytes)

    # After an evict

    async def given_back(self, instance: Instance, parks: Parks) -> None:
        """WARM -> WARM, PARKED or COLD: see what an evicted process still holds, and have it give back too much.

        Args:
            parks: parks it, when nothing else helps.
        """
        process = instance.process
        if process is None:
            return
        left_bytes = await self.bytes_of(process)
        if left_bytes is not None and left_bytes > self._most(instance) and instance.process is process:
            try:
                await instance.trim()
            except OmniError as error:
                log.warning("not_trimmed model=%s problem=%r", instance.name, error.problem)
            left_bytes = await self.bytes_of(process)
        if instance.process is not process:  # all of it was freed
            return
        if left_bytes is None:  # nobody knows better
            self._account.give_back(instance.name, Kind.WORKING)
        elif left_bytes <= self._most(instance):
            self._settle(instance, left_bytes)
        else:
            await self._take_away(instance, left_bytes, parks)

    def _most(self, instance: Instance) -> int:
        """What may be left of an evicted process."""
        _, first_bytes = self._first.get(instance.name, (0, 0))
        return max(self._memory.device.context_bytes, first_bytes) + SPARE_BYTES

    def _settle(self, instance: Instance, left_bytes: int) -> None:
        """Hold for an evicted process what it has, and nothing else."""
        self._account.give_back(instance.name, Kind.WORKING)
        self._account.set(instance.name, Kind.CONTEXT, left_bytes)
        instance.context_bytes = left_bytes

    async def _take_away(self, instance: Instance, left_bytes: int, parks: Parks) -> None:
        kept = f"its process kept {bytes_text(left_bytes)} of device memory when it was evicted"
        self._tell(instance, "NotGivenBack", f"{kept}, and when it was asked to empty its caches")
        if await parks.park(instance, f"{kept} and was parked"):
            return
        error = OmniError(
            instance.subject,
            f"{kept}, could not be parked and was killed",
            f"see omni logs {instance.model}",
            reason=Reason.EVICT_TIMEOUT,
        )
        await instance.kill(error)

    async def weigh(self, instance: Instance) -> int | None:
        """What a process that has left its frames, but has not emptied its caches, came to hold beside its context.

        That is all it ever held at once, as far as its allocator keeps what is freed, which torch's does. None when
        nobody knows.
        """
        process = instance.process
        if process is None:
            return None
        most_bytes = await self.bytes_of(process)
        with suppress(OmniError):  # what it keeps then is seen a moment later
            await instance.trim()
        least_bytes = await self.bytes_of(process)
        if most_bytes is None or least_bytes is None or instance.process is not process:
            return None
        return max(0, most_bytes - least_bytes)

    # At all times

    async def watch(
        self, instances: Iterable[Instance], moves: Callable[[str], bool]
    ) -> list[tuple[Instance, OmniError]]:
        """Note what the device draws and processes at rest hold now, and which of a server's processes hold any.

        Args:
            instances: all of the device.
            moves: whether one, by its name, is in a move.

        Returns:
            The instances whose process holds more than it may, and why it is to be killed.
        """
        meter = self._memory.device.meter
        if meter is None or self._is_lost():
            return []
        self.watts, self.joules = await asyncio.to_thread(lambda: (meter.watts(), meter.joules()))
        there = [(it, it.process) for it in instances if it.process is not None]
        servers = [(it, process) for it, process in there if it.foreign]
        at_rest = [it for it, _ in there if it.state in {State.WARM, State.RESIDENT} and not moves(it.name)]
        seen = [(it, it.process, it.since_seconds) for it in at_rest if not it.foreign]

        def look() -> tuple[dict[int, int], list[set[int]]]:
            found = meter.process_bytes()
            return found, [process.pids() & found.keys() for _, process in servers]

        try:
            held, pids = await asyncio.to_thread(look)
        except OmniError as error:
            log.warning("device_not_measured device=%s problem=%r", self._memory.device.name, str(error))
            return []
        for (server, its_process), found_pids in zip(servers, pids, strict=True):
            if server.process is its_process:
                server.rest.pids |= found_pids
        found = []
        for instance, process, since in seen:
            if process is None or (instance.process, instance.since_seconds) != (process, since):
                continue
            held_bytes = sum(held.get(pid, 0) for pid in process.pids())
            if (excess := self._excess(instance, held_bytes)) is not None:
                found.append((instance, excess))
        return found

    def _excess(self, instance: Instance, held_bytes: int) -> OmniError | None:
        most_bytes = self._most(instance)
        if instance.state is State.RESIDENT:
            # Frames may be in what the driver says, or not: so much can be taken beyond what was granted.
            most_bytes += instance.working_bytes + instance.weights_bytes
        elif most_bytes >= held_bytes > self._account.held_bytes(instance.name, Kind.CONTEXT):
            with suppress(LedgerError):  # it is told when somebody needs the room
                self._account.set(instance.name, Kind.CONTEXT, held_bytes)
        if held_bytes <= most_bytes:
            return None
        return OmniError(
            instance.subject,
            f"its process was killed: it held {bytes_text(held_bytes)} of device memory, and no more than "
            f"{bytes_text(most_bytes)} are granted to it while it is {instance.tier}",
            "raise resources.deviceMemory, or ask for less at once",
            reason=Reason.OUT_OF_MEMORY,
        )

    # The end

    def ended(self, instance: Instance) -> None:
        """Keep what an ended process held until the driver shows it no more: it takes back a little later."""
        left_bytes = sum(self._account.give_back(instance.name, kind) for kind in (Kind.WORKING, Kind.CONTEXT))
        self._first.pop(instance.name, None)
        pids = frozenset(instance.rest.pids)
        if not left_bytes or not pids or not self.measured or self._is_lost():
            return
        holder = f"{instance.name} ended {min(pids)}"
        self._account.hold(holder, Kind.CONTEXT, left_bytes)
        task = asyncio.create_task(self._until_gone(holder, pids), name=f"gone {holder}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _until_gone(self, holder: str, pids: frozenset[int]) -> None:
        meter, deadline = self._memory.device.meter, time.monotonic() + _GONE_SECONDS
        assert meter is not None
        while not self._is_lost():
            try:
                if pids.isdisjoint(await asyncio.to_thread(meter.process_bytes)):
                    break
            except OmniError as error:
                log.warning("device_not_measured device=%s problem=%r", self._memory.device.name, str(error))
            if time.monotonic() > deadline and holder not in self._lost:
                self._lost[holder] = self._account.held_bytes(holder)
                log.error("not_given_back device=%s holder=%r", self._memory.device.name, holder)
            await asyncio.sleep(_LOST_LOOK_SECONDS if holder in self._lost else _LOOK_SECONDS)
        self._lost.pop(holder, None)
        self._account.give_back(holder, Kind.CONTEXT)
