"""One agent at the table of a routing gateway: where it is, what it knows, and which requests it has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from omnimodel.gateway.order import Closeness, Load, Place
from omnimodel.gateway.remote import RemoteAgent
from omnimodel.protocol.ingress import Snapshot


@dataclass(frozen=True)
class Address:
    """Where an agent is.

    Args:
        url: such as `http://10.0.0.7:8710`.
        name: of its pod.
        place: its region and zone.
        namespace: of its pod; pods of two namespaces may have the same name.
        tokens: that it may know, the newest first; it stays the same agent when they change.
    """

    url: str
    name: str = ""
    place: Place = field(default=Place())
    namespace: str = ""
    tokens: tuple[str, ...] = field(default=(), compare=False, repr=False)


class Seat:
    """One agent at the table."""

    def __init__(self, address: Address, closeness: Closeness) -> None:
        self.address = address
        self.closeness = closeness
        self.agent = RemoteAgent(address.url, address.name, address.tokens)
        self.snapshot: Snapshot | None = None  # None while it is out of the table
        self.last: Snapshot | None = None  # what it knew when it left the table
        self.left_seconds = 0.0
        self.problem = "it has not answered yet"
        self.open: dict[str, int] = {}  # requests of this gateway, by model
        self.open_total = 0
        self.told: dict[str, int] = {}  # the same, when the agent told last
        self.task: asyncio.Task[None] | None = None
        self.again = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def label(self) -> str:
        """What it is called in metrics: no other seat is."""
        namespace = self.address.namespace
        return self.agent.name if namespace in ("", "default") else f"{namespace}/{self.agent.name}"

    @property
    def there(self) -> bool:
        """Whether it is in the table."""
        return self.snapshot is not None

    def load(self, key: str, *, entered: int = 0) -> Load:
        """Requests of a model, less those that have just been counted."""
        report = self.snapshot.models.get(key) if self.snapshot else None
        reported = report.waiting + report.in_flight if report else 0
        return Load(self.open.get(key, 0) - entered, max(0, reported - self.told.get(key, 0)))

    def enter(self, key: str) -> None:
        """A request goes to it."""
        self.open[key] = self.open.get(key, 0) + 1
        self.open_total += 1
        self.idle.clear()

    def leave(self, key: str) -> None:
        """A request has ended."""
        left = self.open[key] - 1
        if left:
            self.open[key] = left
        else:
            del self.open[key]
        self.open_total -= 1
        if not self.open_total:
            self.idle.set()
