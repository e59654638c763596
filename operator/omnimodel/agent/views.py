"""Instances as the policy sees them: one snapshot a decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from omnimodel.agent.instance import Instance, State
from omnimodel.memory.ledger import Kind
from omnimodel.placement.idle import IdleModel
from omnimodel.placement.state import ModelState

if TYPE_CHECKING:
    from omnimodel.agent.moves import DeviceMemory, Moves

_RESTING = frozenset({State.COLD, State.PARKED, State.WARM, State.FROZEN})  # from these a wake can begin


def model_state(instance: Instance, now: float, moves: Moves) -> ModelState:
    """One instance for the residency policy."""
    line, residency = instance.line, instance.residency
    frozen = instance.state is State.FROZEN
    return ModelState(
        name=instance.name,
        weights_bytes=instance.weights_bytes,
        working_bytes=instance.beside_bytes,
        valid_bytes=_valid_bytes(instance, moves.memory),
        resident=instance.state is State.RESIDENT and not instance.leaving,
        draining=instance.draining or instance.name in moves,
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
        frozen_bytes=instance.beside_bytes if frozen else 0,
        frozen_since=instance.frozen_since_seconds if frozen else None,
        wanted_since=instance.wanted_since_seconds,
        loadable=loadable(instance, now, moves) and _is_asked(instance, moves.memory.device.name),
        start_seconds=instance.start_seconds,
    )


def _is_asked(instance: Instance, device: str) -> bool:
    """Whether a device is to make room for it now, as far as its others are concerned."""
    return instance.spread.is_turn_of(device) and (not instance.blocked or instance.blocked_by == device)


def loadable(instance: Instance, now: float, moves: Moves) -> bool:
    """Whether a wake can be tried now. Sizes that are not known yet are measured one model at a time."""
    if instance.prepared is None or instance.name in moves or instance.state not in _RESTING:
        return False
    if instance.removed and instance.state is not State.FROZEN:  # frozen requests finish before it goes
        return False
    if now < instance.failures.retry_at_seconds:
        return False
    return instance.measured or moves.measuring in {None, instance.name}


def _valid_bytes(instance: Instance, memory: DeviceMemory) -> int:
    image = instance.prepared.image if instance.prepared else None
    if image is None or instance.state is State.RESIDENT:
        return 0
    return memory.frames.valid_frames(image.digest) * memory.device.frame_bytes


def idle_models(instances: Iterable[Instance], moves: Moves) -> list[IdleModel]:
    """Those that have a process at rest, for the idle steps."""
    host = moves.memory.ledger.host
    return [
        IdleModel(
            name=instance.name,
            resident=instance.state is State.RESIDENT,
            parks=instance.state is State.WARM and moves.parks.can(instance),
            busy=instance.line.busy
            or instance.name in moves
            or instance.wanted_since_seconds is not None
            or not instance.verified,
            idle_since=instance.idle_seconds,
            evicted_since=instance.evicted_seconds,
            private_bytes=host.held_bytes(instance.name, Kind.PROCESS),
            idle_after_seconds=instance.residency.idle_after_seconds,
            idle_tier=instance.residency.idle_tier,
            keep_resident=instance.residency.keep_resident,
            priority=instance.residency.priority,
            min_resident_until=instance.woken_seconds + instance.residency.min_resident_seconds,
        )
        for instance in instances
        if instance.state in {State.RESIDENT, State.WARM, State.PARKED}
    ]


def free_bytes(instances: Mapping[str, Instance], reserving: Iterable[str], budget_bytes: int, lost_bytes: int) -> int:
    """Budget less what is held and reserved; what victims on their way out, and warm ones, still hold counts as free.

    Args:
        instances: all of the device, by name.
        reserving: names of those whose needs are reserved.
        budget_bytes: of the device.
        lost_bytes: what nobody can have: it was set apart, or its process has ended and it did not come back.
    """
    held = sum(instance.held_bytes for instance in instances.values())
    reserved = sum(instances[name].need_bytes for name in reserving if name in instances)
    return budget_bytes - lost_bytes - held - reserved
