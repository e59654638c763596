"""The devices of a pod: a broker each, which models are placed on which, and what they share.

Host memory, the arena and the zygotes are common; frames, their account and the residency policy are each device's own.
A model that waits is placed anew before its broker decides about it (`placement.devices`). It goes to another device
only at rest, and its process ends before: one process has a context on one device. A server that spreads its model
over several is an instance of each of them (`spread`), and stays as long as it has a process and is not refused there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from omnimodel.agent.broker import Broker
from omnimodel.agent.instance import Instance, State
from omnimodel.agent.relief import relieve_host
from omnimodel.agent.reporting import device_report
from omnimodel.agent.views import model_state
from omnimodel.errors import OmniError, Reason, lost
from omnimodel.placement.devices import Choice, DeviceState, Stay, choose_device, choose_devices
from omnimodel.placement.state import Blocked

if TYPE_CHECKING:
    from omnimodel.agent.events import EventLog
    from omnimodel.agent.moves import DeviceMemory, Moves
    from omnimodel.placement.state import ModelState
    from omnimodel.protocol.report import DeviceReport

log = logging.getLogger(__name__)

_SHUN_SECONDS = 60.0  # for which a model goes to others than a device that had no memory for it
_NO_DEVICE = "the pool"  # who refuses an instance that there are too few devices for
_FEWER = "write fewer resources.devices, or raise device.count of the OmniPool"


class Devices:
    """See the module.

    Args:
        memories: of each device; they share one arena and one host account.
        events: where moves are told to people.
        zygote_bytes: measures the private memory of all zygotes.
        changed: called when something that is reported may have changed.
        tell_lost: told of a device that is lost.
    """

    def __init__(
        self,
        memories: list[DeviceMemory],
        events: EventLog,
        *,
        zygote_bytes: Callable[[], int] = lambda: 0,
        changed: Callable[[], None] = lambda: None,
        tell_lost: Callable[[OmniError], None] = lambda _: None,
    ) -> None:
        self._tell_lost = tell_lost
        self.under_way: dict[str, asyncio.Task[None]] = {}
        self.brokers: dict[str, Broker] = {}
        for number, memory in enumerate(memories):
            self.brokers[memory.device.name] = Broker(
                memory, events, self, zygote_bytes=None if number else zygote_bytes, changed=changed
            )
        self.watched = set(self.brokers)  # whose loss was not told yet
        self.first = next(iter(self.brokers.values()))

    @property
    def instances(self) -> Mapping[str, Instance]:
        """Those of all devices."""
        return {name: instance for broker in self.brokers.values() for name, instance in broker.instances.items()}

    @property
    def on_host(self) -> bool:
        """Whether their memory is the machine's."""
        return self.first.memory.device.on_host

    def of(self, instance: Instance) -> Broker:
        """Who decides about an instance, of several devices the first; before it is placed, the first of all."""
        return self.brokers.get(instance.device, self.first)

    def all_of(self, instance: Instance) -> list[Broker]:
        """Who decide about an instance; before it is placed, the first of all."""
        return [self.brokers[name] for name in instance.spread.devices] or [self.first]

    def moves_of(self, instance: Instance) -> list[Moves]:
        """The moves of each of its devices."""
        return [broker.moves for broker in self.all_of(instance)]

    def kick(self, instance: Instance) -> None:
        """Have its devices look again: something has changed."""
        for broker in self.all_of(instance):
            broker.kick()

    def forget(self, instance: Instance) -> None:
        """Decide about an instance no more."""
        for broker in self.all_of(instance):
            broker.instances.pop(instance.name, None)
            broker.kick()

    def start(self) -> None:
        """Begin deciding."""
        for broker in self.brokers.values():
            broker.start()

    def resize(self, budgets: Mapping[str, int], host_bytes: int) -> None:
        """Change the budgets; see `Broker.resize`."""
        for name, budget_bytes in budgets.items():
            if name in self.brokers:
                self.brokers[name].resize(budget_bytes, host_bytes)

    def relieve_host(self, short_bytes: int) -> bool:
        """See `relief.relieve_host`."""
        return relieve_host(self.brokers.values(), short_bytes, self.worth_of_image)

    def worth_of_image(self, digest: str) -> float:
        """What an image is worth to any model."""
        return max(broker.worth_of_image(digest) for broker in self.brokers.values())

    def reports(self) -> tuple[DeviceReport, ...]:
        """What is held of each."""
        return tuple(device_report(broker.moves) for broker in self.brokers.values())

    # A device that is lost

    @property
    def usable(self) -> list[Broker]:
        """Those of devices that are not lost."""
        return [broker for broker in self.brokers.values() if broker.lost is None]

    async def lose(self, name: str, problem: str) -> None:
        """Give a device up, until the agent is started again: its processes end, and its models go to the others.

        Requests in flight there fail; those that are held wait for another device, and are refused where there is
        none.
        """
        if name not in self.watched:
            return
        broker, why = self.brokers[name], lost(name, problem)
        self.watched.remove(name)
        broker.moves.lost = why
        log.error("device_lost device=%s problem=%r", name, problem)
        self._tell_lost(why)
        await asyncio.gather(*(self._end(broker, instance, why) for instance in list(broker.instances.values())))
        for each in self.brokers.values():
            each.kick()

    async def _end(self, broker: Broker, instance: Instance, lost_device: OmniError) -> None:
        problem = f"its device {broker.name} is lost ({lost_device.problem})"
        why = OmniError(instance.subject, problem, lost_device.cure, reason=Reason.DEVICE_LOST)
        if instance.state is State.STARTING:
            await broker.moves.give_up(instance)
        if not await instance.kill(why):
            broker.memory.frames.quarantine(instance.name)
        instance.wish_again()

    # Who is where

    def add(self, instance: Instance, device: str = "") -> None:
        """Take an instance in, on a device if its process is there already; harmless when it is in.

        Raises:
            OmniError: it needs more devices than there are.
        """
        if instance.device:
            return
        if refusal := self._too_few(instance):
            raise OmniError(instance.subject, refusal, _FEWER, reason=Reason.TOO_LARGE)
        if device or len(self.brokers) == 1:
            self._put(instance, [device or self.first.name])
            return
        now = time.monotonic()
        self._put(instance, [choice.device for choice in self._choices(instance, now, self._states(now))])

    def _put(self, instance: Instance, devices: Sequence[str]) -> None:
        instance.spread.place(devices)
        instance.blocked_by = instance.device if instance.blocked else ""
        for broker in self.all_of(instance):
            broker.instances[instance.name] = instance

    def _too_few(self, instance: Instance) -> str:
        """That an instance needs more devices than there are, in words; empty when it does not."""
        count, there = instance.spread.count, len(self.usable)
        if count == 1 or count <= there:
            return ""
        lost = [f"; {broker.name} is lost: {broker.lost.problem}" for broker in self.brokers.values() if broker.lost]
        return f"is spread over {count} devices, and its pool has {there} here that can be used{''.join(lost)}"

    def place(self, now: float) -> None:
        """Give every model that waits, and is at rest, the device where it waits least.

        Args:
            now: monotonic.
        """
        if len(self.brokers) == 1:
            return
        going = [instance for instance in self.instances.values() if self._may_go(instance, now)]
        if not going or not self.usable:
            return
        states = self._states(now)
        for instance in sorted(going, key=lambda i: self._model_state(i, now).oldest(now)):
            if refusal := self._too_few(instance):
                self._refuse(instance, Blocked(Reason.TOO_LARGE, refusal, _FEWER))
                continue
            choices = self._choices(instance, now, states)
            if tuple(choice.device for choice in choices) != instance.spread.devices:
                self._send(instance, choices, now)
                states = self._states(now)

    def _refuse(self, instance: Instance, why: Blocked) -> None:
        if instance.blocked != why:
            instance.blocked, instance.blocked_by = why, _NO_DEVICE
            self.of(instance).moves.tell(instance, why.reason, why.message, warning=True)
        instance.line.refuse(instance.door.refusal)

    def shun(self, instance: Instance) -> bool:
        """Have an instance woken on another device, as its own has less memory than it should: somebody else has it.

        Returns:
            Whether there is another; if not, the next time any device may be tried again.
        """
        now = time.monotonic()
        if instance.spread.count == 1 and _is_at_rest(instance):
            instance.shunned[instance.device] = now + _SHUN_SECONDS
            (choice,) = self._choices(instance, now, self._states(now))
            if choice.device not in _shunned(instance, now):
                return True
        instance.shunned.clear()
        return False

    def _may_go(self, instance: Instance, now: float) -> bool:
        broker = self.of(instance)
        if not _is_at_rest(instance) or not (instance.wanted or instance.blocked) or instance.name in broker.moves:
            return False
        if instance.spread.count > 1 and instance.process is not None:
            return bool(instance.blocked)
        if instance.state is State.COLD or instance.device in _shunned(instance, now):
            return True
        # A wait costs one process at most, however often the room is gone when the next one is there.
        return self._model_state(instance, now).oldest(now) > instance.moved_seconds

    def _send(self, instance: Instance, choices: Sequence[Choice], now: float) -> None:
        source, target = str(instance.spread), [choice.device for choice in choices]
        said = "; ".join(dict.fromkeys(choice.why for choice in choices))
        why = f"goes from {source} to {', '.join(target)}: {said}"
        if instance.state is not State.COLD:  # and is placed when its process is gone
            instance.moved_seconds = now
            self.of(instance).moves.step_off(instance, why, "device", stop=True)
            return
        log.info("model_placed model=%s source=%s target=%s why=%r", instance.name, source, ",".join(target), said)
        if instance.history.wakes:
            self.of(instance).moves.tell(instance, "Moved", why)
        self.forget(instance)
        self._put(instance, target)
        self.kick(instance)

    # As the policy sees them

    @property
    def _rate(self) -> float | None:
        """How fast any of them copies: what is not measured on one yet is taken to be as on the others."""
        rates = (broker.moves.loads.costs.copy_bytes_per_second for broker in self.brokers.values())
        return next((rate for rate in rates if rate), None)

    def _choices(self, instance: Instance, now: float, states: list[DeviceState]) -> tuple[Choice, ...]:
        model, spread = self._model_state(instance, now), instance.spread
        if spread.count > 1:
            return choose_devices(model, spread.devices, states, spread.count)
        again = max(0, instance.history.wakes - instance.wakes_before - 1)
        stay = Stay(
            device=instance.device,
            warm=instance.process is not None,
            seconds=now - instance.lifetime.started_seconds,
            paid_seconds=again * instance.history.last_wake_seconds,
            restart_seconds=instance.history.last_start_seconds,
            shunned=_shunned(instance, now),
        )
        return (choose_device(model, stay, states),)

    def _model_state(self, instance: Instance, now: float) -> ModelState:
        keeps = instance.residency.keep_resident and not instance.removed
        return replace(model_state(instance, now, self.of(instance).moves), keep_resident=keeps)

    def _states(self, now: float) -> list[DeviceState]:
        digests = {
            instance.name: instance.prepared.image.digest
            for instance in self.instances.values()
            if instance.wanted and not instance.resident and instance.prepared and instance.prepared.image
        }
        return [self._state(broker, now, digests) for broker in self.usable or self.brokers.values()]

    def _state(self, broker: Broker, now: float, digests: Mapping[str, str]) -> DeviceState:
        memory, rate = broker.memory, broker.moves.loads.costs.copy_bytes_per_second or self._rate
        targets = broker.reserving
        waiting = {
            name: instance.need_bytes
            for name, instance in broker.instances.items()
            if instance.wanted and not instance.resident and not instance.reserved
        }
        return DeviceState(
            name=broker.name,
            now=now,
            budget_bytes=broker.budget_bytes,
            free_bytes=broker.free_bytes,
            models={name: self._model_state(instance, now) for name, instance in broker.instances.items()},
            coming={name: need for name, need in waiting.items() if name not in targets},
            reserved={name: need for name, need in waiting.items() if name in targets},
            valid_bytes={
                name: memory.frames.valid_frames(digest) * memory.device.frame_bytes for name, digest in digests.items()
            },
            constants=replace(broker.constants, copy_bytes_per_second=rate) if rate else broker.constants,
        )


def _is_at_rest(instance: Instance) -> bool:
    """Whether it can be woken on another device."""
    resting = instance.state in {State.COLD, State.PARKED, State.WARM}
    return resting and not instance.removed and not instance.draining


def _shunned(instance: Instance, now: float) -> frozenset[str]:
    return frozenset(name for name, until in instance.shunned.items() if now < until)
