"""What a decision about residency is made from, and what it looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from omnimodel.errors import Reason, advised


@dataclass(frozen=True)
class Constants:
    """The numbers of the policy.

    Source: a study on three real traces; each was varied alone, and the ones not named here did not matter.

    Args:
        fair_seconds: a waiter older than this comes before all younger ones, whatever it costs.
        patience_seconds: so long a waiter waits before a model with requests in flight is drained for it.
        freeze_patience_seconds: so long it waits before one is frozen between two tokens, which costs nobody's batch.
        gap_weight: how far one silence moves the mean gap between requests.
        drains: how many wakes may wait for busy victims at the same time.
        targets: how many waiting models are tried in one decision.
        wake_fixed_seconds: the part of a wake that does not grow with bytes, as measured by the agent.
        copy_bytes_per_second: how fast an image is copied into frames, as measured by the agent.
        slice_seconds, slice_wakes: so long, or so many times its own wake if that is longer, a text generation runs
            after a wake before it may be frozen; without it, many overdue models would freeze each other before any
            of them made a token.
        background_seconds: a model used by an interactive request within this time is not given up for waiters of
            the background class alone.
    """

    fair_seconds: float = 30.0
    patience_seconds: float = 4.0
    freeze_patience_seconds: float = 1.0
    gap_weight: float = 0.2
    drains: int = 1
    targets: int = 8
    wake_fixed_seconds: float = 0.010
    copy_bytes_per_second: float = 4e9
    slice_seconds: float = 1.0
    slice_wakes: float = 2.0
    background_seconds: float = 10.0


@dataclass(frozen=True)
class ModelState:
    """One model at one moment. Times are seconds of one clock, whichever the caller uses.

    Args:
        name: unique.
        weights_bytes, working_bytes: the footprint on the device.
        valid_bytes: of an evicted model: bytes of it that still lie in frames nobody has taken.
        resident: its weights are in frames and it is not leaving at this very moment.
        draining: resident, and a victim that admits no more.
        in_flight: admitted requests; of a model that is not resident: requests frozen between two tokens.
        queue: arrival times of the requests not yet admitted, oldest first.
        background: how many of the queue are of the background class.
        owed: requests it was woken for and has not admitted yet; before it has, it is nobody's victim.
        last_arrival, gap: of its requests (see `next_gap`).
        priority: of the manifest, 0 to 1000; more is more important.
        resident_since: of its last wake.
        min_resident_until: before this it is nobody's victim; `min_resident_seconds` is what a wake would set.
        keep_resident: it is never a victim.
        freezable: its requests can be stopped between two tokens.
        frozen_bytes: working memory that it holds although it is not resident.
        frozen_since: when its requests in flight were frozen.
        wanted_since: since when it shall be resident without a request (preload, `omni wake`).
        loadable: it has an image and a measured size, so that a wake can be tried now.
        start_seconds: what a wake takes beyond the copy, such as the start of a foreign engine.
    """

    name: str
    weights_bytes: int
    working_bytes: int = 0
    valid_bytes: int = 0
    resident: bool = False
    draining: bool = False
    in_flight: int = 0
    queue: tuple[float, ...] = ()
    background: int = 0
    owed: int = 0
    last_arrival: float = -inf
    gap: float = inf
    priority: int = 500
    resident_since: float = -inf
    min_resident_until: float = -inf
    min_resident_seconds: float = 0.0
    keep_resident: bool = False
    freezable: bool = False
    frozen_bytes: int = 0
    frozen_since: float | None = None
    wanted_since: float | None = None
    loadable: bool = True
    start_seconds: float = 0.0

    @property
    def footprint_bytes(self) -> int:
        """What it holds when it is resident."""
        return self.weights_bytes + self.working_bytes

    @property
    def need_bytes(self) -> int:
        """What a wake needs beyond what the model holds already."""
        return self.weights_bytes + max(0, self.working_bytes - self.frozen_bytes)

    @property
    def waiters(self) -> int:
        """How many wait for a wake: requests held, requests frozen, and whoever wants it without a request."""
        if self.resident:
            return len(self.queue)
        return len(self.queue) + self.in_flight + (self.wanted_since is not None or self.keep_resident)

    def oldest(self, now: float) -> float:
        """When the oldest waiter came; `now` when nobody waits."""
        times = [now, *self.queue[:1]]
        if not self.resident:
            times += [since for since in (self.frozen_since, self.wanted_since) if since is not None]
        return min(times)


@dataclass(frozen=True)
class Drain:
    """A wake that waits until its victims have finished their requests. The target's need is reserved already."""

    target: str
    victims: tuple[str, ...]


@dataclass(frozen=True)
class Blocked:
    """Why a model can never be resident as things are.

    Args:
        reason: in one word.
        sentence: in one sentence, with both numbers.
        cure: what to do about it.
    """

    reason: Reason
    sentence: str
    cure: str

    @property
    def message(self) -> str:
        """What is wrong and what to do about it."""
        return advised(self.reason, self.sentence, self.cure)


@dataclass(frozen=True)
class Step:
    """What to do now. Ask again after applying it, until nothing comes: one decision starts one copy at most.

    Args:
        wake: the model whose image is to be copied now, when `evict` and `freeze` are done.
        target: for whom `evict`, `freeze` and `drain` make room; equal to `wake` unless it has to wait for a drain.
        evict: residents without requests, to give up at once.
        freeze: residents whose requests are to be frozen between two tokens, at once; they keep working memory.
        drain: residents that shall admit no more. With them, remember `Drain(target, drain)` and reserve the
            target's `need_bytes` now.
        abandon: targets of drains that nobody waits for any more, or that cannot be woken now: forget the drain, its
            victims admit again.
        look_again_at: when to ask again if nothing else happens; None when only an event can change the answer.
        reasons: a sentence for each model that waits or moves.
        blocked: models that can never be resident as things are, and why.
    """

    wake: str | None = None
    target: str | None = None
    evict: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    abandon: tuple[str, ...] = ()
    look_again_at: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    blocked: dict[str, Blocked] = field(default_factory=dict)

    @property
    def acts(self) -> bool:
        """Whether there is anything to apply."""
        return bool(self.wake or self.evict or self.freeze or self.drain or self.abandon)


def full_wake_seconds(model: ModelState, constants: Constants) -> float:
    """How long a wake takes when none of its bytes is in a frame."""
    return constants.wake_fixed_seconds + model.start_seconds + model.weights_bytes / constants.copy_bytes_per_second


def wake_seconds(model: ModelState, constants: Constants) -> float:
    """How long a wake takes now; bytes that are still valid in frames are not copied again."""
    valid_bytes = min(model.valid_bytes, model.weights_bytes)
    return full_wake_seconds(model, constants) - valid_bytes / constants.copy_bytes_per_second


def worth(model: ModelState, now: float, constants: Constants) -> float:
    """Expected seconds of waiting that one byte of its residency saves per second: the least goes first.

    The rate is that of the mean gap, or of the silence so far when that is longer. A model seen once is worth 0.
    """
    silence = max(now - model.last_arrival, model.gap, 1e-9)
    return full_wake_seconds(model, constants) / max(1, model.footprint_bytes) / silence


def next_gap(gap: float, last_arrival: float, now: float, constants: Constants) -> float:
    """The mean gap after an arrival at `now`; infinite as long as only one request was seen."""
    if last_arrival == -inf:
        return inf
    silence = now - last_arrival
    return silence if gap == inf else gap + constants.gap_weight * (silence - gap)


def bytes_text(size_bytes: int) -> str:
    """A size for a sentence, exact enough to compare two of them: `5.46 GiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} bytes"
