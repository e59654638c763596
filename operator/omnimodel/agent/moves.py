"""Moves of instances: a wake with the evictions it needs, a start, a stop. Each is one task.

An instance is in one move at most, so that nothing is ever done twice at a time. The broker begins moves, and nobody
else does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from omnimodel.agent import servers
from omnimodel.agent.contexts import Contexts
from omnimodel.agent.instance import Instance, State
from omnimodel.agent.loads import FREED_SECONDS, Loads, explained
from omnimodel.agent.parking import Parks
from omnimodel.errors import OmniError, Reason
from omnimodel.memory.ledger import Kind

if TYPE_CHECKING:
    from omnimodel.agent.events import EventLog
    from omnimodel.memory.arena import Arena
    from omnimodel.memory.devices import Device
    from omnimodel.memory.frames import FramePool
    from omnimodel.memory.ledger import Ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceMemory:
    """One device and the accounts of it."""

    device: Device
    ledger: Ledger
    frames: FramePool
    arena: Arena


class Moves:
    """See the module.

    Args:
        memory: of the device.
        events: where moves are told to people.
        under_way: moves of the instances of all devices, by name: one of several devices is in one move on all.
        everywhere: the moves of each device that an instance is on.
        worth: of an image by its digest; the least worth loses its frames first.
        worth_in_arena: the same in the arena, which other devices may share.
        relieve, vacate: asks for so many bytes of host, or device, memory; whether any are coming.
        elsewhere: has an instance go to another device, as its own has no memory for it; False when there is none.
        measure: notes the private memory of an instance that has begun or ended to hold device memory.
        changed: called with an instance when a move of it has ended.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        events: EventLog,
        under_way: dict[str, asyncio.Task[None]],
        *,
        everywhere: Callable[[Instance], Sequence[Moves]],
        worth: Callable[[str], float],
        worth_in_arena: Callable[[str], float],
        relieve: Callable[[int], bool],
        vacate: Callable[[int], bool],
        elsewhere: Callable[[Instance], bool],
        measure: Callable[[Instance], Awaitable[None]],
        changed: Callable[[Instance], None],
    ) -> None:
        self.memory = memory
        self.loads = Loads(
            memory,
            everywhere=lambda instance: [moves.loads for moves in everywhere(instance)],
            worth=worth,
            worth_in_arena=worth_in_arena,
            relieve=relieve,
            vacate=vacate,
        )
        self.contexts = Contexts(
            memory, worth=worth, vacate=vacate, tell=self.tell, is_lost=lambda: self.lost is not None
        )
        self.parks = Parks(memory, self.contexts, relieve=relieve, measure=measure, tell=self.tell)
        self.measuring: str | None = None
        self.lost: OmniError | None = None  # the device can do nothing any more
        self._events = events
        self._measure = measure
        self._elsewhere = elsewhere
        self._changed = changed
        self._everywhere = everywhere
        self._under_way = under_way

    def __contains__(self, name: str) -> bool:
        return name in self._under_way

    async def close(self, instances: Iterable[Instance]) -> None:
        """End every process and every move; what does not end in time is left to the kernel."""
        own = {instance.name: instance for instance in instances}
        moves = {name: self._under_way[name] for name in own if name in self}
        for name, move in moves.items():
            log.debug("move_given_up model=%s", name)
            move.cancel()
        await asyncio.gather(*(instance.kill() for instance in own.values()), return_exceptions=True)
        if moves:
            await asyncio.wait(moves.values(), timeout=FREED_SECONDS)
        await self.contexts.close()

    def _begin(self, instance: Instance, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                log.exception("move_failed model=%s", instance.name)
                await self._broke_off(instance, error)
            finally:
                if self._under_way.get(instance.name) is asyncio.current_task():
                    del self._under_way[instance.name]
                    instance.going = None
                    self.memory.ledger.host.give_back(instance.name, Kind.PROMISE)  # it has been measured by now
                self._changed(instance)

        task = asyncio.create_task(run(), name=f"move {instance.name}")
        self._under_way[instance.name] = task
        return task

    async def _broke_off(self, instance: Instance, error: Exception) -> None:
        """Bring an instance whose move broke off in an unforeseen way back to where one can begin."""
        instance.leaving = instance.freezing = False
        broken = explained(instance, error)
        if instance.process is None:
            instance.set_state(State.COLD, broken.problem)
            self.on_exit(instance, broken)
        elif not await instance.kill(broken):
            self.memory.frames.quarantine(instance.name)

    async def give_up(self, instance: Instance) -> None:
        """End a start, or the wake of a foreign engine, that is under way for nobody; wait for any other move."""
        if instance.state is State.STARTING and instance.name in self._under_way:
            self._under_way[instance.name].cancel()
        elif instance.state is State.WAKING and instance.foreign:
            await instance.kill()
        await self.settle(instance)

    async def settle(self, instance: Instance) -> None:
        """Wait until an instance is in no move."""
        while (move := self._under_way.get(instance.name)) is not None:
            await asyncio.gather(move, return_exceptions=True)

    def start(self, instance: Instance) -> asyncio.Task[None]:
        """Start the process of an instance."""
        self._check_free(instance)
        return self._begin(instance, self._start(instance))

    def wake(self, instance: Instance, leaving: Iterable[asyncio.Task[None]]) -> asyncio.Task[None]:
        """Wake an instance after its victims have left; what it will hold is its own from now on."""
        self._check_free(instance)
        instance.reserved = True
        instance.history.causes[_wake_cause(instance)] += 1
        if not instance.foreign:
            self.loads.copying = instance.name
        if not instance.measured:
            self.measuring = instance.name
        return self._begin(instance, self._wake_up(instance, leaving))

    def _check_free(self, instance: Instance) -> None:
        """Before anything is changed for a move: an instance is in one at most."""
        assert instance.name not in self._under_way, f"{instance.name} is in a move"

    async def _start(self, instance: Instance) -> None:
        """COLD -> WARM; a failure is noted in the instance."""
        try:
            if not instance.foreign:
                instance.fence = await asyncio.to_thread(self.memory.device.fence)
                await self.contexts.hold(instance, instance.context_bytes)
            await instance.start()
        except BaseException as error:
            self.loads.drop_fence(instance)
            self.contexts.drop(instance)
            if not isinstance(error, OmniError):
                raise
            self.failed(instance, error)
            return
        await self._measure(instance)
        await self.contexts.started(instance)

    def adopt(self, instance: Instance, since_seconds: float) -> asyncio.Task[None]:
        """Go on with the process of an instance that outlived its agent; what it may hold is its own."""
        self._check_free(instance)
        instance.reserved = instance.mapped is not None
        instance.set_state(State.WAKING if instance.reserved else State.WARM, "its process outlived the agent")
        return self._begin(instance, self._adopt(instance, since_seconds))

    async def _adopt(self, instance: Instance, since_seconds: float) -> None:
        """WARM or WAKING -> WARM or RESIDENT; a process that does not know what it is at is killed."""
        process, was_resident = instance.process, instance.mapped is not None
        try:
            await instance.settle()
        except OmniError as error:
            self.memory.frames.quarantine(instance.name)
            await instance.kill(error)
            instance.wish_again()
            return
        finally:
            instance.reserved = False
        if instance.resident and process is not None:
            instance.door.abandon(process)  # its requests have lost their clients
            instance.door.admit()
        else:
            self.memory.frames.release(instance.name)
            self.memory.ledger.device.give_back(instance.name, Kind.WORKING)
            await self._measure(instance)
        if instance.resident == was_resident:
            instance.since_seconds = since_seconds
        instance.keep()
        self.tell(instance, "Adopted", instance.message)

    def let_go(self, instance: Instance, *, freeze: bool, for_whom: str) -> asyncio.Task[None]:
        """Take a victim off the device, or freeze its requests; at once for whoever asks what it holds."""
        self._check_free(instance)
        instance.leaving, instance.freezing = True, freeze
        instance.history.causes["freeze" if freeze else "room"] += 1
        why = f"{'frozen' if freeze else 'evicted'} for {for_whom}" if for_whom else "evicted to stay within the budget"
        instance.made_room = why
        return self._begin(instance, self._leave(instance, freeze=freeze, why=why))

    def step_off(self, instance: Instance, why: str, cause: str, *, stop: bool) -> asyncio.Task[None]:
        """Take an instance without requests off the device, and with `stop` end its process."""
        self._check_free(instance)
        if instance.state is State.RESIDENT:
            instance.leaving, instance.freezing = True, False
            instance.history.causes[cause] += 1
        instance.going = State.COLD if stop else None
        return self._begin(instance, self._go_down(instance, why, stop=stop))

    async def _go_down(self, instance: Instance, why: str, *, stop: bool) -> None:
        if instance.state is State.RESIDENT:
            await self._leave(instance, freeze=False, why=why)
        if stop and instance.state is State.PARKED:  # it would wait for the driver before it ends
            instance.set_state(State.STOPPING, why)
            await instance.kill()
        elif stop and instance.state is State.WARM:
            await instance.stop(why)
        else:
            return
        self.tell(instance, "Stopped", why)

    async def weigh(self, instance: Instance) -> int | None:
        """Take an idle instance off the device, and learn what working memory it came to hold; None when it did not."""
        if instance.state is not State.RESIDENT or instance.line.in_flight or instance.name in self:
            return None
        weighed: list[int | None] = []
        instance.leaving, instance.freezing = True, False
        instance.history.causes["end"] += 1
        await self._begin(instance, self._leave(instance, freeze=False, why="its size is known now", weighed=weighed))
        return weighed[0] if weighed else None

    async def _leave(
        self, instance: Instance, *, freeze: bool, why: str, weighed: list[int | None] | None = None
    ) -> None:
        """RESIDENT -> WARM or FROZEN; a process that does not acknowledge is killed, and then its frames are free."""
        began = time.perf_counter()
        memories = [moves.memory for moves in self._everywhere(instance)]
        leave = partial(servers.leave, instance, memories) if servers.serves(instance, self.memory) else None
        try:
            await instance.evict(freeze=freeze, why=why, trim=weighed is None, leave=leave)
        except OmniError as error:
            self.memory.frames.quarantine(instance.name)
            late = OmniError(
                instance.subject,
                f"its process did not leave the device and was killed ({error.problem})",
                f"see omni logs {instance.model}",
                reason=Reason.EVICT_TIMEOUT,
            )
            await instance.kill(late)
            return
        finally:
            instance.leaving = instance.freezing = False
        self.memory.frames.release(instance.name)
        if weighed is not None:
            weighed.append(await self.contexts.weigh(instance))
        if instance.state is not State.FROZEN:
            if instance.foreign:
                for memory in memories:
                    left_bytes = instance.rest.asleep_bytes.get(memory.device.name, 0)
                    memory.ledger.device.set(instance.name, Kind.WORKING, left_bytes)
            else:
                await self.contexts.given_back(instance, self.parks)
        instance.history.last_evict_seconds = time.perf_counter() - began
        if instance.state is not State.FROZEN:
            await self._measure(instance)
        self.tell(instance, "Frozen" if instance.state is State.FROZEN else "Evicted", instance.message)

    async def _wake_up(self, instance: Instance, leaving: Iterable[asyncio.Task[None]]) -> None:
        """Bring an instance onto the device, after its victims have left it."""
        try:
            await asyncio.gather(*leaving, return_exceptions=True)
            if instance.removed and instance.state is not State.FROZEN:
                return
            if instance.state is State.PARKED:
                await self._unpark(instance)
            if instance.state is State.COLD:
                await self._start(instance)
            if instance.state in {State.WARM, State.FROZEN}:
                await self._bring(instance)
        finally:
            instance.reserved = False
            self.loads.end_copying(instance)
            if instance.state is not State.RESIDENT:
                self.end_measuring(instance)

    def park(self, instance: Instance, why: str, *, needed: bool) -> asyncio.Task[None]:
        """Take what a warm process holds on the device to host memory; where that is needed and fails, end it."""
        self._check_free(instance)
        instance.going = State.PARKED
        return self._begin(instance, self._park(instance, why, needed=needed))

    async def _park(self, instance: Instance, why: str, *, needed: bool) -> None:
        if instance.state is State.WARM and not await self.parks.park(instance, why) and needed:
            instance.going = State.COLD
            await self._go_down(instance, why, stop=True)

    async def _unpark(self, instance: Instance) -> None:
        """PARKED -> WARM or COLD; a failure for want of room is noted in the instance."""
        try:
            await self.parks.unpark(instance)
        except OmniError as error:
            if instance.process is not None and not instance.removed:
                self.failed(instance, error)

    async def _bring(self, instance: Instance) -> None:
        """WARM or FROZEN -> RESIDENT, or back; a failure is noted in the instance."""
        try:
            loaded = await self.loads.load(instance)
        except OmniError as error:
            self.failed(instance, error)
            return
        if loaded:
            self.tell(instance, "Woken", instance.message)
            instance.door.admit()

    def on_exit(self, instance: Instance, error: OmniError | None) -> None:
        """Free what an instance held. Called once its process is seen to be gone (its pidfd is readable)."""
        for moves in self._everywhere(instance):
            moves.contexts.ended(instance)
        self.loads.free(instance)
        if error is not None:
            self.failed(instance, error)
        self._changed(instance)

    def failed(self, instance: Instance, error: OmniError) -> None:
        """Note a failure and tell people."""
        if error.reason is Reason.DEVICE_LOST:  # no fault of the model's: it is woken elsewhere, at once
            if instance.spread.count == 1:  # else it may be another of its devices, which has been told
                self.lost = self.lost or error
        elif error.reason is not Reason.DEVICE_FULL or not self._elsewhere(instance):
            instance.fail(error)
        self.tell(instance, str(error.reason), error.advice, warning=True)

    def tell(self, instance: Instance, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell people what happened to a model."""
        self._events.add("OmniModel", instance.namespace, instance.model, reason, message, warning=warning)

    def end_measuring(self, instance: Instance) -> None:
        """Let the next model of unknown size be measured."""
        if self.measuring == instance.name:
            self.measuring = None
        self._changed(instance)


def _wake_cause(instance: Instance) -> str:
    if any(not waiter.system for waiter in instance.line.waiting) or instance.line.in_flight:
        return "request"
    return "check" if not instance.verified else "hand" if instance.line.waiting else "preload"
