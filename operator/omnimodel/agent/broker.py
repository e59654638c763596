"""Decides who is on the device: one task asks the policy whenever something changed, and begins the moves it names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from omnimodel.agent import tokens
from omnimodel.agent.accounting import Accounting
from omnimodel.agent.instance import Instance, State
from omnimodel.agent.moves import DeviceMemory, Moves
from omnimodel.agent.orders import Orders
from omnimodel.agent.views import free_bytes, idle_models, loadable, model_state
from omnimodel.errors import DispatchError, LedgerError, OmniError, Reason
from omnimodel.memory.ledger import Kind
from omnimodel.placement.idle import IdleConstants, idle_steps
from omnimodel.placement.residency import next_step
from omnimodel.placement.state import Blocked, Constants, Drain, Step, worth

if TYPE_CHECKING:
    from omnimodel.agent.devices import Devices
    from omnimodel.agent.events import EventLog

log = logging.getLogger(__name__)

SMALLEST_WORKING_BYTES = 32 << 20  # what a process takes before it has computed anything, with room to start
LARGEST_GRANT_BYTES = 1 << 30  # for a model whose size is not known yet
_AHEAD_SHARE_OF_HOST = 0.5  # of a budget of host memory that frames are made for at boot; a GPU's becomes frames whole


class Broker:
    """See the module.

    Args:
        memory: of the device.
        events: where moves are told to people.
        devices: of which this one is one.
        zygote_bytes: measures the private memory of all zygotes; None where the broker of another device does.
        changed: called when something that is reported may have changed.
        constants: of the policy; the measured ones are kept up to date here.
        idle: of the idle steps; how much memory warm processes may hold follows from the host's budget.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        events: EventLog,
        devices: Devices,
        *,
        zygote_bytes: Callable[[], int] | None = lambda: 0,
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
        self._devices = devices
        self.drains: list[Drain] = []
        self.accounting = Accounting(memory, self.instances, zygote_bytes, devices.relieve_host, self._watch_device)
        self.moves = Moves(
            memory,
            events,
            devices.under_way,
            everywhere=devices.moves_of,
            worth=self.worth_of_image,
            worth_in_arena=devices.worth_of_image,
            relieve=devices.relieve_host,
            vacate=self._vacate_device,
            elsewhere=devices.shun,
            measure=self.accounting.measure,
            changed=devices.kick,
        )
        self.orders = Orders(
            self.moves, forget=devices.forget, kick=self.kick, reason=lambda name: self.reasons.get(name, "")
        )
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._shrinking: asyncio.Task[None] | None = None
        self._given_up: dict[str, asyncio.Task[None]] = {}

    @property
    def name(self) -> str:
        """Of its device."""
        return self.memory.device.name

    @property
    def budget_bytes(self) -> int:
        """What the device shall hold at most; after an edit of the pool it holds more until enough has left."""
        return self._budget_bytes

    @property
    def lost(self) -> OmniError | None:
        """Why the device can do nothing any more; None as long as it can."""
        return self.moves.lost

    def kick(self) -> None:
        """Look again: something has changed."""
        self._wake.set()
        self._changed()

    def start(self) -> None:
        """Begin deciding."""
        self._tasks = [
            asyncio.create_task(self._run(), name="broker"),
            asyncio.create_task(self.accounting.run(), name="accounting"),
            asyncio.create_task(tokens.run(self.instances), name="tokens"),
            asyncio.create_task(self._create_ahead(), name="frames"),
        ]

    async def close(self) -> None:
        """Decide nothing any more, and end every process and every move."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.moves.close(list(self.instances.values()))

    async def _create_ahead(self) -> None:
        """Make frames before anybody waits for them: fresh pages cost more than the copy into them."""
        share = _AHEAD_SHARE_OF_HOST if self.memory.device.on_host else 1.0
        count = int(self.budget_bytes * share) // self.memory.device.frame_bytes
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
        self._devices.place(now)
        if self.lost is not None:
            self._give_up(self.lost)
            return None
        self.constants = self.moves.loads.costs.learned(self.constants)
        for instance in self.instances.values():
            instance.door.admit()
            self._keep_aside(instance, now)
        self._settle_budget()
        self._grant_unknown()
        self._give_up_unwanted()
        times = [self._start_ahead(now), self._step_down(now)]
        for _ in range(4 * len(self.instances) + 4):
            waiting = self.drains or any(self._asks(instance) for instance in self.instances.values())
            if not waiting and self.free_bytes >= 0:
                break
            step = next_step(
                now,
                [model_state(instance, now, self.moves) for instance in self.instances.values()],
                self.free_bytes,
                self.drains,
                self.moves.loads.copying,
                self.constants,
                budget_bytes=self.budget_bytes,
            )
            self.reasons = step.reasons
            self._refuse(step.blocked)
            if not step.acts:
                times.append(step.look_again_at)
                break
            self._apply(step)
        self._keep_spare()
        return min((at for at in times if at is not None), default=None)

    def _give_up_unwanted(self) -> None:
        """End wakes of servers that nobody wants any more while others wait: they may take minutes for nothing."""
        everybody = list(self.instances.values())
        if not any(instance.line.waiting and instance.state is not State.RESIDENT for instance in everybody):
            return
        for instance in everybody:
            unwanted = instance.foreign and instance.state is State.WAKING and not instance.wanted
            if unwanted and instance.name in self.moves and instance.name not in self._given_up:
                log.info("wake_given_up model=%s", instance.name)
                task = asyncio.create_task(self.moves.give_up(instance), name=f"give up {instance.name}")
                self._given_up[instance.name] = task
                task.add_done_callback(partial(self._gave_up, instance.name))

    def _gave_up(self, name: str, task: asyncio.Task[None]) -> None:
        del self._given_up[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("not_given_up model=%s problem=%r", name, str(error))

    def _keep_spare(self) -> None:
        """Park a process ahead, so that the next one that comes to the device finds room for its context."""
        short_bytes = self.memory.device.context_bytes - self.memory.ledger.device.free_bytes
        if self.memory.device.context_bytes and short_bytes > 0 and self.moves.loads.copying is None:
            self._vacate_device(short_bytes, needed=False)

    def _give_up(self, lost: OmniError) -> None:
        """Refuse whoever waits for a device that is lost; a model that can wait for another one is placed there."""
        if self._devices.usable:
            return
        for instance in self.instances.values():
            instance.line.refuse(partial(_lost, instance, lost))

    def _grant_unknown(self) -> None:
        """Give models whose size is not known yet a working memory to be measured under: what the kept ones leave."""
        kept_bytes = sum(
            instance.weights_bytes + instance.beside_bytes
            for instance in self.instances.values()
            if instance.residency.keep_resident and instance.measured
        )
        for instance in self.instances.values():
            if not instance.measured and not instance.held_bytes:
                room_bytes = self.budget_bytes - kept_bytes - instance.weights_bytes - instance.context_bytes
                instance.working_bytes = max(SMALLEST_WORKING_BYTES, min(room_bytes, LARGEST_GRANT_BYTES))

    @staticmethod
    def _asks(instance: Instance) -> bool:
        """Whether the policy has to look at it: somebody waits for it, or it was refused and may no longer be."""
        return bool(instance.blocked) or (instance.state is not State.RESIDENT and instance.wanted)

    def _keep_aside(self, instance: Instance, now: float) -> None:
        """Keep room that is set aside for an instance only as long as it is waited for and may be woken."""
        may_be_woken = instance.wanted and not instance.blocked and loadable(instance, now, self.moves)
        if instance.spread.waits and not may_be_woken:
            instance.spread.give_up()
            self._devices.kick(instance)

    @property
    def reserving(self) -> set[str]:
        """Names of the models whose needs are reserved, until victims have drained or their other devices have room."""
        aside = {name for name, instance in self.instances.items() if instance.spread.has_aside(self.name)}
        return aside.union(drain.target for drain in self.drains)

    @property
    def free_bytes(self) -> int:
        """What the policy may give away; below zero while victims drain."""
        lost_bytes = self.memory.ledger.device.held_bytes(kind=Kind.QUARANTINE) + self.moves.contexts.lost_bytes
        return free_bytes(self.instances, self.reserving, self.budget_bytes, lost_bytes)

    def _refuse(self, blocked: dict[str, Blocked]) -> None:
        """Answer at once for models that can never be resident as things are."""
        for name, why in blocked.items():
            instance = self.instances[name]
            spread = instance.spread.count > 1
            said = replace(why, sentence=f"on {self.name} it {why.sentence}") if spread else why
            if instance.blocked != said and instance.blocked_by in {"", self.name}:
                instance.blocked, instance.blocked_by = said, self.name
                self._devices.kick(instance)  # another device may hold it
                self.moves.tell(instance, said.reason, said.message, warning=True)
            instance.line.refuse(instance.door.refusal)
        for instance in self.instances.values():
            if instance.name not in blocked and instance.blocked_by == self.name:
                instance.blocked, instance.blocked_by = None, ""

    def _apply(self, step: Step) -> None:
        for target in step.abandon:
            self._forget_drain(target)
        if step.drain:
            assert step.target is not None
            self.drains.append(Drain(step.target, step.drain))
            for name in step.drain:
                self.instances[name].draining = True
        for_whom = step.wake or step.target or ""
        leaving = [self.moves.let_go(self.instances[name], freeze=False, for_whom=for_whom) for name in step.evict]
        leaving += [self.moves.let_go(self.instances[name], freeze=True, for_whom=for_whom) for name in step.freeze]
        if (asker := self.instances.get(for_whom)) is not None and not asker.verified:
            for name in step.evict:  # for no request of a client: what was wished for comes back
                self.instances[name].wish_again()
        if step.wake:
            self._forget_drain(step.wake)
            instance = self.instances[step.wake]
            if (everywhere := instance.spread.set_aside(self.name, leaving)) is not None:
                self.moves.wake(instance, everywhere)
            else:
                self._devices.kick(instance)  # it is the next one's turn

    def _forget_drain(self, target: str) -> None:
        for drain in self.drains:
            if drain.target == target:
                for name in drain.victims:
                    if name in self.instances and not self.instances[name].leaving:
                        self.instances[name].draining = False
        self.drains = [drain for drain in self.drains if drain.target != target]

    def _start_ahead(self, now: float) -> float | None:
        """Start the processes of models that somebody waits for, so that they are warm when their turn comes."""
        again_at = None
        for instance in self.instances.values():
            if instance.state is not State.COLD or instance.prepared is None or instance.name in self.moves:
                continue
            if not instance.wanted or instance.blocked:
                continue
            if instance.context_bytes > self.memory.ledger.device.free_bytes and not instance.foreign:
                continue  # its wake starts it, when its room has been made
            retry_at = instance.failures.retry_at_seconds
            if now >= retry_at:
                self.moves.start(instance)
            else:
                again_at = min(again_at or retry_at, retry_at)
        return again_at

    def _step_down(self, now: float) -> float | None:
        """Let go what nobody has used for a while."""
        host = self.memory.ledger.host
        own_bytes = sum(host.held_bytes(name, Kind.PROCESS) for name in self.instances)
        others_bytes = host.held_bytes(kind=Kind.ZYGOTE) + host.held_bytes(kind=Kind.PROCESS) - own_bytes
        warm_bytes = max(0, host.capacity_bytes - others_bytes)
        constants = replace(self.idle_constants, warm_bytes=warm_bytes)
        step = idle_steps(now, idle_models(self.instances.values(), self.moves), constants)
        for name in sorted(step.park):
            self.moves.park(self.instances[name], step.reasons[name], needed=False)
        for name in sorted({*step.evict, *step.stop}):
            instance = self.instances[name]
            self.moves.step_off(instance, step.reasons[name], "idle", stop=name in step.stop)
        return step.look_again_at

    # Measuring

    def worth_of_image(self, digest: str) -> float:
        """What an image is worth to the models of this device; below zero when none has it."""
        now = time.monotonic()
        values = [
            worth(model_state(instance, now, self.moves), now, self.constants)
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

    def _vacate_device(self, short_bytes: int, *, needed: bool = True) -> bool:
        """Park warm processes, those that are missed least, since device memory is short.

        Args:
            short_bytes: how much.
            needed: what cannot be parked ends, and who is wanted is parked, too.

        Returns:
            Whether any bytes are free now that were not, or will be in a moment.
        """
        moving = (i for i in self.instances.values() if i.name in self.moves)
        coming_bytes = sum(self._resting_bytes(instance) for instance in moving if _leaves(instance))
        warm = [
            instance
            for instance in self.instances.values()
            if instance.state is State.WARM
            and instance.name not in self.moves
            and (needed or (self.moves.parks.can(instance) and instance.verified and not instance.wanted))
        ]
        for instance in sorted(warm, key=lambda i: (i.wanted, i.residency.priority, i.line.last_arrival_seconds)):
            held_bytes = self._resting_bytes(instance)
            if coming_bytes >= short_bytes:
                break
            if held_bytes:
                self.moves.park(instance, "its device memory is needed", needed=needed)
                coming_bytes += held_bytes
        return coming_bytes > 0

    def _resting_bytes(self, instance: Instance) -> int:
        """What a warm process holds on the device, and does not when it is parked or ended."""
        if instance.foreign:
            return instance.rest.asleep_bytes.get(self.name, 0)
        return self.memory.ledger.device.held_bytes(instance.name, Kind.CONTEXT)

    async def _watch_device(self) -> None:
        """End processes that hold more of the device than they may."""
        everybody = list(self.instances.values())
        for instance, error in await self.moves.contexts.watch(everybody, self.moves.__contains__):
            if instance.name not in self.moves:
                await instance.kill(error)

    # What controllers ask

    def resize(self, budget_bytes: int, host_bytes: int) -> None:
        """Change the budgets. When more is held now, residents leave until the new budget is kept."""
        self.memory.ledger.host.resize(host_bytes)
        grows, self._budget_bytes = budget_bytes > self._budget_bytes, budget_bytes
        if grows and self._tasks:
            self._settle_budget()
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._create_ahead(), name="frames"))
        self.kick()

    def _settle_budget(self) -> None:
        """Bring the ledger to the budget as far as what is held allows, and give frames that are too many back."""
        device = self.memory.ledger.device
        wanted_bytes = max(self._budget_bytes, device.held_bytes())
        if device.capacity_bytes != wanted_bytes:
            device.resize(wanted_bytes)
        if device.surplus_frames() and (self._shrinking is None or self._shrinking.done()):
            self._shrinking = asyncio.create_task(self.memory.frames.make_room(self.worth_of_image), name="shrink")


def _leaves(instance: Instance) -> bool:
    """Whether what an instance in a move holds at rest will be free; one that is started ahead can be parked then."""
    if instance.state is State.STARTING:
        return not instance.reserved
    return instance.going is not None or instance.state is State.STOPPING


def _lost(instance: Instance, lost: OmniError) -> DispatchError:
    """What is said to requests of a model that no device is left for."""
    problem = f"{lost.subject} is lost: {lost.problem}"
    return DispatchError(instance.subject, problem, lost.cure, reason=Reason.DEVICE_LOST, status=503)
