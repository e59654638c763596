"""Keeps what the ledger says of host memory in line with what the kernel says of processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from omnimodel.agent.instance import Instance, State
from omnimodel.errors import OmniError
from omnimodel.memory.ledger import Kind

if TYPE_CHECKING:
    from omnimodel.agent.moves import DeviceMemory

log = logging.getLogger(__name__)

_SECONDS = 1.0


async def _nothing() -> None:
    """Where the device is host memory, nothing else is to be looked after."""


class Accounting:
    """Measures processes and zygotes, and asks for host memory when there is too little.

    Args:
        memory: whose ledger it keeps.
        instances: all there are.
        zygote_bytes: measures the private memory of all zygotes; None where another one does.
        give_up: frees about so many bytes of host memory; asked again as long as there are too few.
        watch: looks after what processes hold on the device.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        instances: Mapping[str, Instance],
        zygote_bytes: Callable[[], int] | None,
        give_up: Callable[[int], object],
        watch: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._memory = memory
        self._instances = instances
        self._zygote_bytes = zygote_bytes
        self._give_up = give_up
        self._watch = watch
        self._over = False

    async def run(self) -> None:
        """Keep what the ledger says of processes outside the device in line with what the kernel says."""
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                for instance in list(self._instances.values()):
                    await self.measure(instance)
                if self._zygote_bytes is not None:
                    self._hold_on_host("zygotes", Kind.ZYGOTE, self._zygote_bytes())
                await self._watch()
            except Exception:
                log.exception("not_measured")

    def _hold_on_host(self, holder: str, kind: Kind, measured_bytes: int) -> None:
        """Note what was measured; when it is more than there is, somebody else has to give."""
        host = self._memory.ledger.host
        host.set(holder, kind, measured_bytes)
        over_bytes = -host.free_bytes - host.held_bytes(kind=Kind.PROMISE)  # of those, some may be measured already
        over = over_bytes > 0
        if over and not self._over:
            log.warning("host_over_budget holder=%s bytes=%d over=%d", holder, measured_bytes, over_bytes)
        self._over = over
        if over:
            self._give_up(over_bytes)

    async def measure(self, instance: Instance) -> None:
        """Note the private memory of one process; where the device is host memory, what it was granted covers it."""
        process, busy = instance.process, instance.line.busy
        if process is None:
            return
        try:
            private_bytes = await asyncio.to_thread(process.private_bytes)
        except (OSError, OmniError):
            return
        if instance.process is not process:
            return
        instance.private_bytes = private_bytes
        # Beside frames on the device it may keep what it computed with, until it leaves.
        at_rest = instance.state is State.WARM or (instance.state is State.RESIDENT and not instance.history.idle_bytes)
        if at_rest and not busy and not instance.line.busy and instance.history.note_idle(private_bytes):
            instance.line.changed()
        on_device = instance.state in {State.RESIDENT, State.FROZEN, State.WAKING, State.EVICTING}
        covered = on_device and self._memory.device.on_host
        self._hold_on_host(instance.name, Kind.PROCESS, 0 if covered else private_bytes)
