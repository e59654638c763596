"""Which models leave the device because nobody uses them, and which warm processes are worth no longer their memory.

The process of an evicted model stays for a while, ready for the next request, and then goes: a fork costs little. It
stays for good where the manifest says `idleTier: warm`. On a CPU machine a frozen process returns nothing to the host,
and a fork costs as little as a thaw: `parked` there means the same as to say nothing. On a device with memory of its
own a warm process holds a context, and is parked before it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True)
class IdleConstants:
    """The numbers of the idle steps.

    Args:
        warm_seconds: so long the process of an evicted model stays, unless its `idleTier` is `warm`.
        park_seconds: so long it stays on a device with memory of its own, unless its `idleTier` is `warm`.
        warm_processes: how many processes of models that are not resident stay at most.
        warm_bytes: how much private memory they hold at most, in all: what the host's budget leaves them.
    """

    warm_seconds: float = 300.0
    park_seconds: float = 30.0
    warm_processes: int = 256
    warm_bytes: int = 4 << 30


@dataclass(frozen=True)
class IdleModel:
    """A model with a process, at one moment.

    Args:
        resident: its weights are on the device.
        busy: a request is in flight, frozen or held, or the process is on its way up or down: nothing happens to it.
        idle_since: when the last byte of its last answer went out, or when it was woken if that was later.
        evicted_since: when it left the device; meaningless while resident.
        private_bytes: what its process holds on the host.
        idle_after_seconds, idle_tier, keep_resident, priority: of the manifest; None = never.
        min_resident_until: it stays on the device until then.
        parks: its process is warm and holds device memory that parking would give back.
    """

    name: str
    resident: bool
    busy: bool
    idle_since: float
    evicted_since: float = -inf
    private_bytes: int = 0
    idle_after_seconds: float | None = None
    idle_tier: str = "parked"
    keep_resident: bool = False
    priority: int = 500
    min_resident_until: float = -inf
    parks: bool = False


@dataclass(frozen=True)
class IdleStep:
    """What to give up now, and when to ask again.

    Args:
        evict: residents that leave the device.
        park: warm processes that leave the device.
        stop: processes that end; one that is in `evict` too is evicted first.
        look_again_at: None when only an event can change the answer.
        reasons: a sentence for each model that goes.
    """

    evict: tuple[str, ...] = ()
    park: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    look_again_at: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def idle_steps(now: float, models: Sequence[IdleModel], constants: IdleConstants) -> IdleStep:
    """Decide which models go down a tier because nobody uses them.

    An idle time counts from the last byte of the last answer, with or without pressure on the device; a model with a
    request is never touched, however long the request runs.

    Args:
        now: on the clock of the models' times.
        models: those that have a process.
        constants: of the pool.
    """
    evict: list[str] = []
    park: list[str] = []
    stop: list[str] = []
    reasons: dict[str, str] = {}
    again_at = inf
    warm: list[IdleModel] = []
    for model in models:
        if model.busy:
            continue
        if model.resident:
            goes_at = _leaves_device_at(model)
            if goes_at > now:
                again_at = min(again_at, goes_at)
                continue
            evict.append(model.name)
            reasons[model.name] = f"idle for {now - model.idle_since:.0f} s, its idleAfter is over"
            if model.idle_tier == "cold":
                stop.append(model.name)
            continue
        stops_at = inf if model.idle_tier == "warm" else model.evicted_since + constants.warm_seconds
        if stops_at <= now:
            stop.append(model.name)
            reasons[model.name] = f"not resident for {now - model.evicted_since:.0f} s, its process goes"
            continue
        warm.append(model)
        parks = model.parks and model.idle_tier != "warm"
        parks_at = model.evicted_since + constants.park_seconds if parks else inf
        if parks_at <= now:
            park.append(model.name)
            reasons[model.name] = f"not resident for {now - model.evicted_since:.0f} s, parked"
        again_at = min(again_at, stops_at, parks_at if parks_at > now else inf)
    for model in _too_many(warm, constants):
        stop.append(model.name)
        park = [name for name in park if name != model.name]
        reasons[model.name] = "the warm processes hold more than the host has for them, and this one waits longest"
    return IdleStep(tuple(evict), tuple(park), tuple(stop), None if again_at == inf else again_at, reasons)


def _leaves_device_at(model: IdleModel) -> float:
    if model.keep_resident or model.idle_after_seconds is None:
        return inf
    return max(model.idle_since + model.idle_after_seconds, model.min_resident_until)


def _too_many(warm: list[IdleModel], constants: IdleConstants) -> list[IdleModel]:
    """The warm processes beyond the limits: least priority first, then the longest unused."""
    order = sorted(warm, key=lambda m: (m.priority, m.idle_since, m.name))
    held_bytes = sum(model.private_bytes for model in order)
    goes: list[IdleModel] = []
    while order and (len(order) > constants.warm_processes or held_bytes > constants.warm_bytes):
        model = order.pop(0)
        held_bytes -= model.private_bytes
        goes.append(model)
    return goes
