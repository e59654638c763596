"""Decides who is on the device: one task asks the policy whenever something changed, and begins the moves it names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from omnimodel.agent.accounting import Accounting
from omnimodel.agent.instance import Instance, State
from omnimodel.agent.moves import DeviceMemory, Moves
from omnimodel.errors import DispatchError, LedgerError, Reason
from omnimodel.memory.ledger import Kind
from omnimodel.placement.idle import IdleConstants, IdleModel, idle_steps
from omnimodel.placement.residency import next_step
from omnimodel.placement.state import Constants, Drain, ModelState, Step, worth

if TYPE_CHECKING:
    from omnimodel.agent.events import EventLog

log = logging.getLogger(__name__)

SMALLEST_WORKING_BYTES = 32 << 20  # what a process takes before it has computed anything, with room to start
LARGEST_GRANT_BYTES = 1 << 30  # for a model whose size is not known yet
_AHEAD_SHARE = 0.5  # of the budget that frames are made for at boot, in the background


class Broker:
    """See the module.

    Args:
        memory: of the device.
        events: where moves are told to people.
        zygote_bytes: measures the private memory of all zygotes.
        changed: called when something that is reported may have changed.
        constants: of the policy; the measured ones are kept up to date here.
        idle: of the idle steps.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        events: EventLog,
        *,
        zygote_bytes: Callable[[], int] = lambda: 0,
        changed: Callable[[], None] = lambda: None,
        constants: Constants | None = None,
        idle: IdleConstants | None = None,
    ) -> None:
        self.memory = memory
        self.instances: dict[str, Instance] = {}
        self.constants = constants or Constants()
        self.idle_constants = idle or IdleConstants()
        self.reasons: dict[str, str] = {}
        self._budget_bytes = memory.ledger.device.capacity_bytes
        self._changed = changed
        self._drains: list[Drain] = []
        self.accounting = Accounting(memory, self.instances, zygote_bytes, self._relieve_host)
        self.moves = Moves(
            memory, events, worth=self._worth_of_image, measure=self.accounting.measure, changed=self.kick
        )
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._shrinking: asyncio.Task[None] | None = None

    @property
    def budget_bytes(self) -> int:
        """What the device shall hold at most; after an edit of the pool it holds more until enough has left."""
        return self._budget_bytes

    def kick(self) -> None:
        """Look again: something has changed."""
        self._wake.set()
        self._changed()

    def start(self) -> None:
        """Begin deciding."""
        self._tasks = [
            asyncio.create_task(self._run(), name="broker"),
            asyncio.create_task(self.accounting.run(), name="accounting"),
            asyncio.create_task(self._create_ahead(), name="frames"),
        ]

    async def close(self) -> None:
        """Decide nothing any more; moves under way are finished first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.moves.finish()

    async def _create_ahead(self) -> None:
        """Make frames before anybody waits for them: fresh pages cost more than the copy into them."""
        count = int(self.budget_bytes * _AHEAD_SHARE) // self.memory.device.frame_bytes
        try:
            await self.memory.frames.create_ahead(count)
        except LedgerError as error:
            log.warning("frames_not_made error=%r", str(error))

    # Deciding

    async def _run(self) -> None:
        look_again_at: float | None = None
        while True:
            timeout_seconds = None if look_again_at is None else max(0.0, look_again_at - time.monotonic())
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                look_again_at = self._decide()
            except Exception:
                log.exception("decision_failed")
                look_again_at = time.monotonic() + 1.0

    def _decide(self) -> float | None:
        """Apply what the policy says until it says nothing; when to ask again."""
        now = time.monotonic()
        if self.moves.copy_bytes_per_second is not None:
            self.constants = replace(self.constants, copy_bytes_per_second=self.moves.copy_bytes_per_second)
        for instance in self.instances.values():
            instance.admit()
        self._settle_budget()
        self._grant_unknown()
        times = [self._start_ahead(now), self._step_down(now)]
        for _ in range(4 * len(self.instances) + 4):
            waiting = self._drains or any(self._wants(instance) for instance in self.instances.values())
            if not waiting and self._free_bytes() >= 0:
                break
            step = next_step(
                now,
                [self._state_of(instance, now) for instance in self.instances.values()],
                self._free_bytes(),
                self._drains,
                self.moves.copying,
                self.constants,
                budget_bytes=self.budget_bytes,
            )
            self.reasons = step.reasons
            self._refuse(step.blocked)
            if not step.acts:
                times.append(step.look_again_at)
                break
            self._apply(step)
        return min((at for at in times if at is not None), default=None)

    def _grant_unknown(self) -> None:
        """Give models whose size is not known yet a working memory to be measured under: what the kept ones leave."""
        kept_bytes = sum(
            instance.weights_bytes + instance.working_bytes
            for instance in self.instances.values()
            if instance.residency.keep_resident and instance.measured
        )
        for instance in self.instances.values():
            if not instance.measured and not instance.held_bytes:
                room_bytes = self.budget_bytes - kept_bytes - instance.weights_bytes
                instance.working_bytes = max(SMALLEST_WORKING_BYTES, min(room_bytes, LARGEST_GRANT_BYTES))

    @staticmethod
    def _wants(instance: Instance) -> bool:
        return instance.state is not State.RESIDENT and instance.wanted

    def _state_of(self, instance: Instance, now: float) -> ModelState:
        line, residency = instance.line, instance.residency
        frozen = instance.state is State.FROZEN
        return ModelState(
            name=instance.name,
            weights_bytes=instance.weights_bytes,
            working_bytes=instance.working_bytes,
            valid_bytes=self._valid_bytes(instance),
            resident=instance.state is State.RESIDENT and not instance.leaving,
            draining=instance.draining or instance.name in self.moves,
            in_flight=line.in_flight,
            queue=tuple(waiter.arrived_seconds for waiter in line.waiting),
            background=sum(waiter.background for waiter in line.waiting),
            owed=line.owed,
            last_arrival=line.last_arrival_seconds,
            gap=line.gap_seconds,
            priority=residency.priority,
            resident_since=instance.woken_seconds,
            min_resident_until=instance.woken_seconds + residency.min_resident_seconds,
            min_resident_seconds=residency.min_resident_seconds,
            keep_resident=residency.keep_resident and instance.verified and not instance.removed,
            freezable=instance.freezable,
            frozen_bytes=instance.working_bytes if frozen else 0,
            frozen_since=instance.frozen_since_seconds if frozen else None,
            wanted_since=instance.wanted_since_seconds,
            loadable=self._loadable(instance, now),
            start_seconds=instance.start_seconds,
        )

    def _loadable(self, instance: Instance, now: float) -> bool:
        """Whether a wake can be tried now. Sizes that are not known yet are measured one model at a time."""
        if (
            instance.prepared is None
            or instance.removed
            or instance.name in self.moves
            or now < instance.retry_at_seconds
        ):
            return False
        return instance.measured or self.moves.measuring in {None, instance.name}

    def _valid_bytes(self, instance: Instance) -> int:
        image = instance.prepared.image if instance.prepared else None
        if image is None or instance.state is State.RESIDENT:
            return 0
        return self.memory.frames.valid_frames(image.digest) * self.memory.device.frame_bytes

    def _free_bytes(self) -> int:
        """Budget less what is held and reserved; what victims on their way out still hold counts as free."""
        held = sum(instance.held_bytes for instance in self.instances.values())
        reserved = sum(
            self.instances[drain.target].need_bytes for drain in self._drains if drain.target in self.instances
        )
        quarantined = self.memory.ledger.device.held_bytes(kind=Kind.QUARANTINE)
        return self.budget_bytes - quarantined - held - reserved

    def _refuse(self, blocked: dict[str, str]) -> None:
        """Answer at once for models that can never be resident as things are."""
        for name, sentence in blocked.items():
            instance = self.instances[name]
            if instance.blocked != sentence:
                instance.blocked = sentence
                self.moves.tell(instance, "Refused", sentence, warning=True)
            instance.line.refuse(instance.refusal)
        for instance in self.instances.values():
            if instance.name not in blocked:
                instance.blocked = ""

    def _apply(self, step: Step) -> None:
        for target in step.abandon:
            self._forget_drain(target)
        if step.drain:
            assert step.target is not None
            self._drains.append(Drain(step.target, step.drain))
            for name in step.drain:
                self.instances[name].draining = True
        for_whom = step.wake or step.target or ""
        leaving = [self.moves.let_go(self.instances[name], freeze=False, for_whom=for_whom) for name in step.evict]
        leaving += [self.moves.let_go(self.instances[name], freeze=True, for_whom=for_whom) for name in step.freeze]
        if step.wake:
            self._forget_drain(step.wake)
            self.moves.wake(self.instances[step.wake], leaving)

    def _forget_drain(self, target: str) -> None:
        for drain in self._drains:
            if drain.target == target:
                for name in drain.victims:
                    if name in self.instances and not self.instances[name].leaving:
                        self.instances[name].draining = False
        self._drains = [drain for drain in self._drains if drain.target != target]

    def _start_ahead(self, now: float) -> float | None:
        """Start the processes of models that somebody waits for, so that they are warm when their turn comes."""
        again_at = None
        for instance in self.instances.values():
            if instance.state is not State.COLD or instance.prepared is None or instance.name in self.moves:
                continue
            if not instance.wanted or instance.blocked:
                continue
            if now >= instance.retry_at_seconds:
                self.moves.start(instance)
            else:
                again_at = min(again_at or instance.retry_at_seconds, instance.retry_at_seconds)
        return again_at

    def _step_down(self, now: float) -> float | None:
        """Let go what nobody has used for a while."""
        models = [
            IdleModel(
                name=instance.name,
                resident=instance.state is State.RESIDENT,
                busy=instance.line.busy
                or instance.name in self.moves
                or instance.wanted_since_seconds is not None
                or not instance.verified,
                idle_since=instance.idle_seconds,
                evicted_since=instance.evicted_seconds,
                private_bytes=self.memory.ledger.host.held_bytes(instance.name, Kind.PROCESS),
                idle_after_seconds=instance.residency.idle_after_seconds,
                idle_tier=instance.residency.idle_tier,
                keep_resident=instance.residency.keep_resident,
                priority=instance.residency.priority,
                min_resident_until=instance.woken_seconds + instance.residency.min_resident_seconds,
            )
            for instance in self.instances.values()
            if instance.state in {State.RESIDENT, State.WARM}
        ]
        step = idle_steps(now, models, self.idle_constants)
        for name in sorted({*step.evict, *step.stop}):
            instance = self.instances[name]
            self.moves.step_off(instance, step.reasons[name], "idle", stop=name in step.stop)
        return step.look_again_at

    # Measuring

    def _worth_of_image(self, digest: str) -> float:
        now = time.monotonic()
        values = [
            worth(self._state_of(instance, now), now, self.constants)
            for instance in self.instances.values()
            if instance.prepared and instance.prepared.image and instance.prepared.image.digest == digest
        ]
        return max(values, default=-1.0)

    def learn_working(self, instance: Instance, working_bytes: int) -> None:
        """Set what a model needs beside its weights, now that it was measured; what it does not need is given back."""
        account = self.memory.ledger.device
        held_bytes = account.held_bytes(instance.name, Kind.WORKING)
        if held_bytes > working_bytes:
            account.give_back(instance.name, Kind.WORKING, held_bytes - working_bytes)
        # It cannot have been measured to hold more than it was granted: the headroom on top may be cut short.
        instance.working_bytes = min(working_bytes, held_bytes) if held_bytes else working_bytes
        instance.measured = True
        self.kick()

    def _relieve_host(self, short_bytes: int) -> None:
        """Give up images of the arena, then the warm processes that are missed least, since host memory is short."""
        short_bytes -= self.memory.arena.give_up(short_bytes, self._worth_of_image)
        if short_bytes <= 0:
            return
        warm = [
            instance
            for instance in self.instances.values()
            if instance.state is State.WARM and not instance.line.busy and instance.name not in self.moves
        ]
        for instance in sorted(warm, key=lambda i: (i.residency.priority, i.line.last_arrival_seconds)):
            self.moves.step_off(instance, "host memory is short", "host", stop=True)
            short_bytes -= instance.private_bytes
            if short_bytes <= 0:
                return

    # What controllers ask

    def resize(self, budget_bytes: int, host_bytes: int) -> None:
        """Change the budgets. When more is held now, residents leave until the new budget is kept."""
        host = self.memory.ledger.host
        host.resize(max(host_bytes, host.held_bytes()))
        self._budget_bytes = budget_bytes
        self.kick()

    def _settle_budget(self) -> None:
        """Bring the ledger to the budget as far as what is held allows, and give frames that are too many back."""
        device = self.memory.ledger.device
        wanted_bytes = max(self._budget_bytes, device.held_bytes())
        if device.capacity_bytes == wanted_bytes:
            return
        device.resize(wanted_bytes)
        if device.surplus_frames() and (self._shrinking is None or self._shrinking.done()):
            self._shrinking = asyncio.create_task(self.memory.frames.make_room(self._worth_of_image), name="shrink")

    async def wake(self, instance: Instance, deadline_seconds: float) -> None:
        """Make an instance resident, as if a request waited for it.

        Raises:
            DispatchError: it could not, or not in time.
        """
        instance.check_room_in_line()
        waiter = instance.line.arrive(time.monotonic(), system=True)
        self.kick()
        try:
            async with asyncio.timeout(deadline_seconds):
                await waiter.admitted
        except TimeoutError:
            reason = self.reasons.get(instance.name) or instance.message
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
                while instance.line.in_flight or instance.name in self.moves:
                    await self.moves.settle(instance)
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
            await self.moves.step_off(instance, why, "hand", stop=False)

    async def stop(self, instance: Instance, why: str) -> None:
        """Take an idle instance off the device and end its process; a request that comes starts a new one."""
        await self.moves.settle(instance)
        if instance.process is not None and not instance.line.in_flight:
            await self.moves.step_off(instance, why, "end", stop=True)

    async def remove(self, instance: Instance, why: str, drain_seconds: float) -> None:
        """Take an instance away for good: its requests finish, its process goes, its bytes are free."""
        instance.draining = True
        instance.removed = why
        try:
            async with asyncio.timeout(drain_seconds):
                await instance.line.quiet()
        except TimeoutError:
            log.warning("drain_late model=%s in_flight=%d", instance.name, instance.line.in_flight)
        await self.moves.settle(instance)
        if instance.state is State.RESIDENT:
            await self.moves.step_off(instance, why, "end", stop=True)
        elif instance.process is not None:
            await instance.stop(why)
        await instance.kill()
        self.moves.on_exit(instance, None)
        self.instances.pop(instance.name, None)
        instance.line.refuse(instance.refusal)
        self.kick()
