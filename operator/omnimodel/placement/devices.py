"""Which device of a pod a model is woken on: a pure decision, made anew while a model waits.

A process is bound to one device, so a model that goes to another is started anew there. Nobody knows what will be asked
for next; so a model pays for a start elsewhere once staying has cost it as much, and no sooner: by waiting for requests
in flight that stand in its way, or by being woken again and again where it could have stayed. In all, then, starts
cost no more than the waits that led to them. A model without a process has no such bond: it goes where there is room.
One that is spread over several devices takes the best, then the best of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from omnimodel.placement.state import Constants, ModelState, bytes_text, full_wake_seconds, worth

ALIKE_SECONDS = 0.1  # devices that differ by less are alike: rates are measured, and no two measures are equal


@dataclass(frozen=True)
class DeviceState:
    """One device at one moment.

    Args:
        name: `cuda:1`.
        now: on the clock of the models' times.
        budget_bytes: what it holds at most.
        free_bytes: as for `next_step`; what is reserved for a model is free for that model alone.
        models: those that are placed on it; `keep_resident` is what their manifests say.
        coming: needs, by model, of those that wait there and have nothing reserved yet.
        reserved: needs, by model, of those that a drain makes room for.
        valid_bytes: by model, bytes of an evicted one that still lie in frames of this device.
        constants: of the policy, as measured there.
    """

    name: str
    now: float
    budget_bytes: int
    free_bytes: int
    models: Mapping[str, ModelState] = field(default_factory=dict)
    coming: Mapping[str, int] = field(default_factory=dict)
    reserved: Mapping[str, int] = field(default_factory=dict)
    valid_bytes: Mapping[str, int] = field(default_factory=dict)
    constants: Constants = field(default_factory=Constants)

    @cached_property
    def placed_bytes(self) -> int:
        """Footprints of all its models."""
        return sum(model.footprint_bytes for model in self.models.values())

    @cached_property
    def kept_bytes(self) -> int:
        """Footprints of those that never leave it."""
        return sum(model.footprint_bytes for model in self.models.values() if model.keep_resident)

    @cached_property
    def coming_bytes(self) -> int:
        """Needs of all that wait there."""
        return sum(self.coming.values())

    @cached_property
    def victims(self) -> Sequence[ModelState]:
        """Residents that can be made to leave, the soonest gone first, and of those the one that is missed least."""
        there = [m for m in self.models.values() if m.resident and not m.draining and not m.keep_resident]
        return sorted(
            there,
            key=lambda m: (
                max(m.min_resident_until, self.now),
                _is_used(m),
                m.priority,
                worth(m, self.now, self.constants),
                m.name,
            ),
        )


def _is_used(model: ModelState) -> bool:
    return bool(model.in_flight or model.queue or model.owed)


@dataclass(frozen=True)
class Choice:
    """A device for a model, and in words what spoke for it."""

    device: str
    why: str


@dataclass(frozen=True)
class Stay:
    """What a model has where it is, and what that has cost.

    Args:
        device: that it is placed on; empty when it is on none.
        warm: it has a process there.
        seconds: for how long it has had it.
        paid_seconds: what its wakes there have taken, beyond the first.
        restart_seconds: what it takes to start its process.
        shunned: devices that had less memory for it than they should, lately; it goes there only if no other can
            ever hold it.
    """

    device: str = ""
    warm: bool = False
    seconds: float = 0.0
    paid_seconds: float = 0.0
    restart_seconds: float = 0.0
    shunned: frozenset[str] = frozenset()


def choose_device(model: ModelState, stay: Stay, devices: Sequence[DeviceState]) -> Choice:
    """Choose where a model is woken.

    Args:
        model: who waits.
        stay: what it has where it is.
        devices: all that can be used; at least one.
    """
    costs = [_Cost(model, stay, device) for device in devices]
    possible = [cost for cost in costs if not cost.never] or costs
    able = [cost for cost in possible if cost.device.name not in stay.shunned] or possible
    least_seconds = min(cost.seconds for cost in able)
    best = min(
        (cost for cost in able if cost.seconds <= least_seconds + ALIKE_SECONDS),
        key=lambda cost: (
            not stay.warm and cost.short_bytes > 0,  # where nobody has to leave for it
            cost.device.name != stay.device,
            cost.placed_bytes,  # where the fewest bytes are placed
            cost.device.name,
        ),
    )
    return Choice(best.device.name, best.why)


def choose_devices(
    model: ModelState, here: Collection[str], devices: Sequence[DeviceState], count: int
) -> tuple[Choice, ...]:
    """Choose where a model without a process is woken that needs several devices.

    Args:
        model: who waits; its bytes are those on one device.
        here: devices that it is placed on; of equals it stays on those.
        devices: all that can be used; at least `count`.
        count: how many it needs.

    Returns:
        A choice for each, in the order of `devices`.
    """
    left, chosen = list(devices), []
    for _ in range(count):
        stay = Stay(next((device.name for device in left if device.name in here), ""))
        chosen.append(choose_device(model, stay, left))
        left = [device for device in left if device.name != chosen[-1].device]
    places = [device.name for device in devices]
    return tuple(sorted(chosen, key=lambda choice: places.index(choice.device)))


class _Cost:
    """What a model pays for a device, in seconds: for the one it is on, what it has paid; for another, what it will."""

    def __init__(self, model: ModelState, stay: Stay, device: DeviceState) -> None:
        self.device = device
        placed = device.models.get(model.name)
        own_bytes = placed.footprint_bytes if placed else 0
        own_kept_bytes = own_bytes if placed and placed.keep_resident else 0
        self.never = model.footprint_bytes + device.kept_bytes - own_kept_bytes > device.budget_bytes
        self.placed_bytes = device.placed_bytes - own_bytes
        self.valid_bytes = min(device.valid_bytes.get(model.name, 0), model.weights_bytes)
        others_bytes = device.coming_bytes - device.coming.get(model.name, 0)
        free_bytes = device.free_bytes + device.reserved.get(model.name, 0)
        self.short_bytes = model.need_bytes + others_bytes - free_bytes
        self.waits = False
        copy_seconds = (model.weights_bytes - self.valid_bytes) / device.constants.copy_bytes_per_second
        waited_seconds = device.now - model.oldest(device.now)
        victims = self._victims()
        if device.name == stay.device and stay.warm:
            self.seconds = copy_seconds + stay.paid_seconds + (waited_seconds if self.waits else 0.0)
            return
        again_seconds = sum(
            full_wake_seconds(victim, device.constants) * _times(device, victim, stay) for victim in victims
        )
        self.seconds = stay.restart_seconds + copy_seconds + again_seconds
        if self.waits:
            self.seconds += max(device.constants.patience_seconds, waited_seconds)

    def _victims(self) -> list[ModelState]:
        """Who would have to leave; and note whether that can only be waited for."""
        chosen, short_bytes = [], self.short_bytes
        for victim in self.device.victims:
            if short_bytes <= 0:
                break
            short_bytes -= victim.footprint_bytes
            chosen.append(victim)
            self.waits = self.waits or _is_used(victim) or victim.min_resident_until > self.device.now
        self.waits = self.waits or short_bytes > 0  # what is in its way drains already, or comes before it
        return chosen

    @property
    def why(self) -> str:
        """What speaks for it, in words."""
        if self.valid_bytes:
            return f"{bytes_text(self.valid_bytes)} of it still lie there"
        if self.short_bytes <= 0:
            return "there is room for it"
        if self.waits:
            return "there is room for it the soonest"
        return "who leaves for it there is missed least"


def _times(device: DeviceState, victim: ModelState, stay: Stay) -> float:
    """How often a victim would have had to come back in the time of a stay; once where there was none."""
    if not stay.warm:
        return 1.0
    silence = max(device.now - victim.last_arrival, victim.gap, 1e-9)
    return stay.seconds / silence if silence <= stay.seconds else 0.0
