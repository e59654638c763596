"""Which agent gets a request: ordered comparators, one line a criterion. Pure.

Residency first: a model that is there beats one that has to come, and one that has to come where there is room beats
one that has to push another out. Then closeness, then load.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from omnimodel.protocol.dispatch import ModelCard
from omnimodel.protocol.ingress import Snapshot
from omnimodel.protocol.report import ModelReport


class Residency(IntEnum):
    """How an agent stands to a model, the best first."""

    FREE_PLACE = 0  # resident, and it can begin at once
    PLACE_SOON = 1  # resident, with at most one more round of requests before it; or on its way for a request of ours
    WARM = 2  # its process waits for weights; or it is resident and its queue is long
    IDLE_ROOM = 3  # no process, but there is room
    MUST_EVICT = 4  # others have to leave first
    BROKEN = 5  # it failed here


class Closeness(IntEnum):
    """Where an agent is, seen from here."""

    SAME_ZONE = 0
    SAME_REGION = 1
    ELSEWHERE = 2


@dataclass(frozen=True)
class Place:
    """Where something is; empty for unknown."""

    region: str = ""
    zone: str = ""

    def closeness(self, other: Place) -> Closeness:
        """How far away the other is. What is unknown counts as elsewhere, so that it is never preferred."""
        if self.zone and self.zone == other.zone and self.region == other.region:
            return Closeness.SAME_ZONE
        if self.region and self.region == other.region:
            return Closeness.SAME_REGION
        return Closeness.ELSEWHERE


@dataclass(frozen=True)
class Load:
    """Requests of a model on an agent: of this gateway, and of others when the agent told last."""

    own: int
    foreign: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.own + self.foreign


def order(
    snapshot: Snapshot, key: str, load: Load, closeness: Closeness, agent_load: int
) -> tuple[Residency, bool, Closeness, int, int]:
    """The sort key of an agent for a model: the least is asked first.

    Args:
        snapshot: what the agent knows.
        key: `namespace/name` of the model.
        load: of the model on this agent.
        closeness: of the agent.
        agent_load: of all models on this agent.
    """
    card, report = snapshot.cards[key], snapshot.models.get(key)
    residency = residency_of(snapshot, card, report, load)
    pushes = residency > Residency.PLACE_SOON and not has_room(snapshot, report)
    return residency, pushes, closeness, load.total, agent_load


def residency_of(snapshot: Snapshot, card: ModelCard, report: ModelReport | None, load: Load) -> Residency:
    """How an agent stands to a model."""
    if not card.ready:
        return Residency.BROKEN
    places = card.concurrency or 1
    if card.tier == "resident":
        if load.total < places:
            return Residency.FREE_PLACE
        return Residency.PLACE_SOON if load.total < 2 * places else Residency.WARM
    if 0 < load.own < places:  # it is being woken for a request that is there already
        return Residency.PLACE_SOON
    if card.tier == "warm":
        return Residency.WARM
    return Residency.IDLE_ROOM if has_room(snapshot, report) else Residency.MUST_EVICT


def has_room(snapshot: Snapshot, report: ModelReport | None) -> bool:
    """Whether the model fits beside those that are there."""
    needed_bytes = report.weights_bytes + report.working_bytes if report else 0
    return snapshot.pool.free_bytes >= needed_bytes
