"""Which devices an instance is on, and how one that is spread over several gets its room on all of them or on none.

Each device decides alone. So the room of a model that needs several is made on one after another, in the order of their
numbers: a device whose turn it is not does not look at it, one that has made the room sets it aside, and the last one
wakes the model. Whoever waits for a device has set aside only what comes before it, so no two models wait for each
other. Nothing is set aside any more for a model that nobody waits for, or that cannot be woken now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

Leaving = list[asyncio.Task[None]]  # moves of victims, which a wake waits for


class Spread:
    """See the module.

    Args:
        count: how many devices the model needs.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.devices: tuple[str, ...] = ()  # that it is placed on, in order; empty for none
        self._aside: dict[str, Leaving] = {}

    def __str__(self) -> str:
        return ", ".join(self.devices)

    @property
    def waits(self) -> bool:
        """Whether its room is set aside on some of its devices, and not yet on all."""
        return bool(self._aside)

    def has_aside(self, device: str) -> bool:
        """Whether a device keeps room for it until the others have made theirs."""
        return device in self._aside

    def is_turn_of(self, device: str) -> bool:
        """Whether a device is the one to make room for it now."""
        return next((name for name in self.devices if name not in self._aside), device) == device

    def set_aside(self, device: str, leaving: Leaving) -> Leaving | None:
        """Note that a device has room for it as soon as victims have left: on the last, it may be woken.

        Returns:
            Who leaves for it on all its devices, once all have room; None before.
        """
        self._aside[device] = leaving
        if len(self._aside) < len(self.devices):
            return None
        everywhere = [move for moves in self._aside.values() for move in moves]
        self._aside.clear()
        return everywhere

    def give_up(self) -> None:
        """Set nothing aside any more."""
        self._aside.clear()

    def place(self, devices: Sequence[str]) -> None:
        """Put it on these devices, in this order."""
        self.give_up()
        self.devices = tuple(devices)
