"""Moves of instances: a wake with the evictions it needs, a start, a stop. Each is one task.

An instance is in one move at most, so that nothing is ever done twice at a time. The broker begins moves, and nobody
else does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnimodel.agent.instance import Instance, State
from omnimodel.agent.proof import prove, proves_wakes
from omnimodel.errors import LedgerError, OmniError, Reason
from omnimodel.memory.ledger import Kind

if TYPE_CHECKING:
    from omnimodel.agent.events import EventLog
    from omnimodel.memory.arena import Arena
    from omnimodel.memory.devices import Device, Frame
    from omnimodel.memory.frames import FramePool
    from omnimodel.memory.ledger import Ledger

log = logging.getLogger(__name__)

_RATE_WEIGHT = 0.2  # how far one copy moves the measured rate
_RATE_FLOOR_BYTES = 16 << 20  # copies smaller than this say nothing about the rate
_COPY_SECONDS = 120.0  # no image takes that long to copy
_FREED_SECONDS = 15.0  # from a kill to the free frames


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
        worth: of an image by its digest; the least worth loses its frames first.
        measure: notes the private memory of an instance that has begun or ended to hold device memory.
        changed: called when a move has ended.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        events: EventLog,
        *,
        worth: Callable[[str], float],
        measure: Callable[[Instance], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self.memory = memory
        self.copying: str | None = None
        self.measuring: str | None = None
        self.copy_bytes_per_second: float | None = None
        self.swaps = 0
        self._events = events
        self._worth = worth
        self._measure = measure
        self._changed = changed
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._under_way

    async def finish(self) -> None:
        """Wait for all moves."""
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def _begin(self, instance: Instance, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception:
                log.exception("move_failed model=%s", instance.name)
            finally:
                if self._under_way.get(instance.name) is asyncio.current_task():
                    del self._under_way[instance.name]
                self._changed()

        assert instance.name not in self._under_way
        task = asyncio.create_task(run(), name=f"move {instance.name}")
        self._under_way[instance.name] = task
        return task

    async def settle(self, instance: Instance) -> None:
        """Wait until an instance is in no move."""
        while (move := self._under_way.get(instance.name)) is not None:
            await asyncio.gather(move, return_exceptions=True)

    def start(self, instance: Instance) -> asyncio.Task[None]:
        """Start the process of an instance."""
        return self._begin(instance, self._start(instance))

    def wake(self, instance: Instance, leaving: Iterable[asyncio.Task[None]]) -> asyncio.Task[None]:
        """Wake an instance after its victims have left; what it will hold is its own from now on."""
        instance.reserved = True
        instance.causes[_wake_cause(instance)] += 1
        if not instance.foreign:
            self.copying = instance.name
        if not instance.measured:
            self.measuring = instance.name
        return self._begin(instance, self._wake_up(instance, leaving))

    async def _start(self, instance: Instance) -> None:
        """COLD -> WARM; a failure is noted in the instance."""
        try:
            await instance.start()
        except OmniError as error:
            self.failed(instance, error)
            return
        self.memory.ledger.host.hold(instance.name, Kind.PROCESS, 0)
        await self._measure(instance)

    def let_go(self, instance: Instance, *, freeze: bool, for_whom: str) -> asyncio.Task[None]:
        """Take a victim off the device, or freeze its requests; at once for whoever asks what it holds."""
        instance.leaving, instance.freezing = True, freeze
        instance.causes["freeze" if freeze else "room"] += 1
        why = f"{'frozen' if freeze else 'evicted'} for {for_whom}" if for_whom else "evicted to stay within the budget"
        return self._begin(instance, self._leave(instance, freeze=freeze, why=why))

    def step_off(self, instance: Instance, why: str, cause: str, *, stop: bool) -> asyncio.Task[None]:
        """Take an instance without requests off the device, and with `stop` end its process."""
        if instance.state is State.RESIDENT:
            instance.leaving, instance.freezing = True, False
            instance.causes[cause] += 1
        return self._begin(instance, self._go_down(instance, why, stop=stop))

    async def _go_down(self, instance: Instance, why: str, *, stop: bool) -> None:
        if instance.state is State.RESIDENT:
            await self._leave(instance, freeze=False, why=why)
        if stop and instance.state is State.WARM:
            await instance.stop(why)
            self.memory.ledger.forget(instance.name)
            self.tell(instance, "Stopped", why)

    async def _leave(self, instance: Instance, *, freeze: bool, why: str) -> None:
        """RESIDENT -> WARM or FROZEN; a process that does not acknowledge is killed, and then its frames are free."""
        began = time.perf_counter()
        try:
            await instance.evict(freeze=freeze, why=why)
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
        if instance.state is not State.FROZEN:
            self.memory.ledger.device.give_back(instance.name, Kind.WORKING)
            await self._measure(instance)
        instance.last_evict_seconds = time.perf_counter() - began
        self.tell(instance, "Frozen" if instance.state is State.FROZEN else "Evicted", why)

    async def _wake_up(self, instance: Instance, leaving: Iterable[asyncio.Task[None]]) -> None:
        """Bring an instance onto the device, after its victims have left it."""
        try:
            await asyncio.gather(*leaving, return_exceptions=True)
            if instance.state is State.COLD:
                await self._start(instance)
            if instance.state in {State.WARM, State.FROZEN}:
                await self._load(instance)
        finally:
            instance.reserved = False
            if self.copying == instance.name:
                self.copying = None
            if instance.state is not State.RESIDENT:
                self.end_measuring(instance)

    async def _load(self, instance: Instance) -> None:
        """WARM or FROZEN -> RESIDENT, or back; a process that does not map its frames is killed."""
        account, pool = self.memory.ledger.device, self.memory.frames
        prepared, process = instance.prepared, instance.process
        assert prepared is not None
        image = prepared.image
        worth_of = self._worth
        held_before = account.held_bytes(instance.name, Kind.WORKING)
        instance.begin_wake()
        copy_seconds = 0.0
        frames: tuple[Frame, ...] = ()
        try:
            await self._promise(instance, prepared.frame_count, max(0, instance.working_bytes - held_before))
            await pool.make_room(worth_of)
            if image is None or not prepared.frame_count:
                account.grant(instance.name)
            else:
                async with self.memory.arena.staged(image, worth_of) as staged:
                    allocation = pool.take(instance.name, image.digest, worth_of)
                    frames = allocation.frames
                    copy_seconds = await pool.fill(allocation, staged, _COPY_SECONDS)
                self._learn_rate(allocation.missing * self.memory.device.frame_bytes, copy_seconds)
        except (OmniError, TimeoutError) as error:
            if instance.process is not process:  # it died meanwhile, and all is freed
                account.cancel(instance.name)
                return
            account.cancel(instance.name)
            pool.release(instance.name)
            account.give_back(
                instance.name, Kind.WORKING, account.held_bytes(instance.name, Kind.WORKING) - held_before
            )
            instance.wake_failed()
            self.failed(instance, error if isinstance(error, OmniError) else _slow_copy(instance))
            return
        finally:
            if self.copying == instance.name:
                self.copying = None
        if instance.process is not process or process is None:  # it died while its image was copied
            self.on_exit(instance, None)
            return
        self.memory.ledger.host.give_back(instance.name, Kind.PROCESS)
        instance.proving = proves_wakes(instance)
        try:
            await instance.wake(frames, copy_seconds)
            if instance.proving:
                await prove(instance)
        except OmniError as error:
            await instance.kill(error)
            if image is not None and error.reason is Reason.PROBE_FAILED:  # its copies in memory may be what is wrong
                pool.forget(image.digest)
                self.memory.arena.drop(image.digest)
            return
        finally:
            instance.proving = False
        self.swaps += 1
        self.tell(instance, "Woken", instance.message)
        instance.admit()

    async def _promise(self, instance: Instance, frame_count: int, working_bytes: int) -> None:
        """Have the bytes of a wake set aside. Victims were told to leave, but one that is killed takes a moment.

        Raises:
            LedgerError: they did not come free.
        """
        deadline = time.monotonic() + _FREED_SECONDS
        while True:
            try:
                self.memory.ledger.device.promise(instance.name, frame_count, working_bytes)
                return
            except LedgerError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.01)

    def on_exit(self, instance: Instance, error: OmniError | None) -> None:
        """Free what an instance held. Called once its process is seen to be gone (its pidfd is readable)."""
        self.memory.frames.recover(instance.name)
        self.memory.frames.release(instance.name)
        self.memory.ledger.forget(instance.name)
        if error is not None:
            self.failed(instance, error)
        self._changed()

    def failed(self, instance: Instance, error: OmniError) -> None:
        """Note a failure and tell people."""
        instance.fail(error)
        told = f"{error.problem}; {error.cure}" if error.cure else error.problem
        self.tell(instance, str(error.reason), told, warning=True)

    def tell(self, instance: Instance, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell people what happened to a model."""
        self._events.add("OmniModel", instance.namespace, instance.model, reason, message, warning=warning)

    def _learn_rate(self, copied_bytes: int, seconds: float) -> None:
        if copied_bytes < _RATE_FLOOR_BYTES or seconds <= 0:
            return
        rate, measured = self.copy_bytes_per_second, copied_bytes / seconds
        self.copy_bytes_per_second = measured if rate is None else rate + _RATE_WEIGHT * (measured - rate)

    def end_measuring(self, instance: Instance) -> None:
        """Let the next model of unknown size be measured."""
        if self.measuring == instance.name:
            self.measuring = None
        self._changed()


def _wake_cause(instance: Instance) -> str:
    if any(not waiter.system for waiter in instance.line.waiting) or instance.line.in_flight:
        return "request"
    return "check" if not instance.verified else "hand" if instance.line.waiting else "preload"


def _slow_copy(instance: Instance) -> OmniError:
    return OmniError(
        instance.subject,
        f"its image was not copied to the device within {_COPY_SECONDS:g} s",
        "see whether the machine is overloaded or its disk is failing",
        reason=Reason.LOAD_TIMEOUT,
    )
