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
    from omnimodel.memory.devices import Copy, Device, Frame
    from omnimodel.memory.frames import FramePool
    from omnimodel.memory.ledger import Ledger
    from omnimodel.memory.store import ImageRef

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
        relieve: asks for so many bytes of host memory; whether any are coming.
        measure: notes the private memory of an instance that has begun or ended to hold device memory.
        changed: called when a move has ended.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        events: EventLog,
        *,
        worth: Callable[[str], float],
        relieve: Callable[[int], bool],
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
        self._relieve = relieve
        self._measure = measure
        self._changed = changed
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._under_way

    async def close(self, instances: Iterable[Instance]) -> None:
        """End every process and every move; what does not end in time is left to the kernel."""
        for name, move in self._under_way.items():
            log.debug("move_given_up model=%s", name)
            move.cancel()
        moves = list(self._under_way.values())
        await asyncio.gather(*(instance.kill() for instance in instances), return_exceptions=True)
        if moves:
            await asyncio.wait(moves, timeout=_FREED_SECONDS)

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
                self._changed()

        task = asyncio.create_task(run(), name=f"move {instance.name}")
        self._under_way[instance.name] = task
        return task

    async def _broke_off(self, instance: Instance, error: Exception) -> None:
        """Bring an instance whose move broke off in an unforeseen way back to where one can begin."""
        instance.leaving = instance.freezing = False
        broken = _explained(instance, error)
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
        instance.causes[_wake_cause(instance)] += 1
        if not instance.foreign:
            self.copying = instance.name
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
            await instance.start()
        except BaseException as error:
            self._drop_fence(instance)
            if not isinstance(error, OmniError):
                raise
            self.failed(instance, error)
            return
        self.memory.ledger.host.hold(instance.name, Kind.PROCESS, 0)
        await self._measure(instance)

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
        instance.causes["freeze" if freeze else "room"] += 1
        why = f"{'frozen' if freeze else 'evicted'} for {for_whom}" if for_whom else "evicted to stay within the budget"
        return self._begin(instance, self._leave(instance, freeze=freeze, why=why))

    def step_off(self, instance: Instance, why: str, cause: str, *, stop: bool) -> asyncio.Task[None]:
        """Take an instance without requests off the device, and with `stop` end its process."""
        self._check_free(instance)
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
            if instance.removed and instance.state is not State.FROZEN:
                return
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
        began = copy_seconds = 0.0
        frames: tuple[Frame, ...] = ()
        mapping: asyncio.Task[None] | None = None  # by a process that waits for each byte before it reads it

        def begun(copy: Copy) -> None:
            nonlocal mapping
            if instance.fence is not None and instance.process is process:
                mapping = asyncio.create_task(self._map(instance, frames, 0.0, copy.fence_base))

        try:
            if image is not None:
                await self._room_on_host(image)
            await self._promise(instance, prepared.frame_count, max(0, instance.working_bytes - held_before))
            await pool.make_room(worth_of)
            if image is None or not prepared.frame_count:
                account.grant(instance.name)
            else:
                async with self.memory.arena.staged(image, worth_of) as staged:
                    allocation = pool.take(instance.name, image.digest, worth_of)
                    frames, began = allocation.frames, time.perf_counter()
                    copy_seconds = await pool.fill(allocation, staged, _COPY_SECONDS, fence=instance.fence, begun=begun)
                self._learn_rate(allocation.missing * self.memory.device.frame_bytes, copy_seconds)
        except (OmniError, OSError) as error:
            if instance.process is not process:  # it died meanwhile, and all is freed
                account.cancel(instance.name)
                return
            if mapping is not None:  # what its streams wait for never comes: nothing of it may be answered
                if not await instance.kill(_explained(instance, error)):
                    pool.quarantine(instance.name)
                return
            account.cancel(instance.name)
            pool.release(instance.name)
            account.give_back(
                instance.name, Kind.WORKING, account.held_bytes(instance.name, Kind.WORKING) - held_before
            )
            instance.wake_failed()
            self.failed(instance, _explained(instance, error))
            return
        except asyncio.CancelledError:
            if mapping is not None:
                mapping.cancel()
            raise
        finally:
            if self.copying == instance.name:
                self.copying = None
            await asyncio.gather(*filter(None, [mapping]), return_exceptions=True)
            instance.proving = False
            self._drop_fence(instance)
        if instance.process is not process or process is None:  # it died while its image was copied
            self.on_exit(instance, None)
            return
        try:
            if mapping is None:
                await self._map(instance, frames, copy_seconds, None)
            else:
                mapping.result()
                instance.note_wake(time.perf_counter() - began)
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
        instance.door.admit()

    async def _map(
        self, instance: Instance, frames: tuple[Frame, ...], copy_seconds: float, fence_base: int | None
    ) -> None:
        """Let the process map its frames, and prove that it can compute with what is in them.

        Raises:
            OmniError: it cannot; its process is to be killed.
        """
        if self.memory.device.on_host:
            self.memory.ledger.host.give_back(instance.name, Kind.PROCESS)
        instance.proving = proves_wakes(instance)
        await instance.wake(frames, copy_seconds, fence_base)
        if instance.proving:
            await prove(instance)

    def _drop_fence(self, instance: Instance) -> None:
        """Let go of the fence of a process that is gone, once no copy writes it any more."""
        if instance.fence is not None and instance.process is None and not self.memory.frames.filling(instance.name):
            instance.fence.close()
            instance.fence = None

    async def _room_on_host(self, image: ImageRef) -> None:
        """Have warm processes give way to an image that is to be woken; the arena says so when they cannot."""
        deadline = time.monotonic() + _FREED_SECONDS
        while (short_bytes := self.memory.arena.short_bytes(image)) and time.monotonic() < deadline:
            if not self._relieve(short_bytes):
                return
            await asyncio.sleep(0.01)

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
        self._drop_fence(instance)
        if error is not None:
            self.failed(instance, error)
        self._changed()

    def failed(self, instance: Instance, error: OmniError) -> None:
        """Note a failure and tell people."""
        instance.fail(error)
        self.tell(instance, str(error.reason), error.advice, warning=True)

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


def _explained(instance: Instance, error: Exception) -> OmniError:
    """What broke a move off, as a person is told."""
    if isinstance(error, OmniError):
        return error
    if not isinstance(error, TimeoutError):
        return OmniError(
            instance.subject,
            f"a move of it broke off: {type(error).__name__}: {error}",
            "see the log of the agent",
            reason=Reason.INTERNAL,
        )
    return OmniError(
        instance.subject,
        f"its image was not copied to the device within {_COPY_SECONDS:g} s",
        "see whether the machine is overloaded or its disk is failing",
        reason=Reason.LOAD_TIMEOUT,
    )
