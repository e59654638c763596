"""How much memory models need beside their weights: as their manifests say, or measured once and remembered.

Where the device is host memory, the kernel says how much a process came to hold until its first answer. On a device
with memory of its own its driver is asked, when the process has left its frames, but has not emptied its caches.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from omnimodel.agent.broker import SMALLEST_WORKING_BYTES
from omnimodel.agent.preparation import Footprint
from omnimodel.errors import OmniError

if TYPE_CHECKING:
    from omnimodel.agent.devices import Devices
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.layout import Layout
    from omnimodel.agent.process import ModelProcess

log = logging.getLogger(__name__)

_MIB = 1 << 20
WORKING_STEP_BYTES = 4 * _MIB
WORKING_HEADROOM_BYTES = 16 * _MIB  # beside a quarter more than was measured: other requests ask for more


def working_from_measured(peak_bytes: int, coming_bytes: int = 0) -> int:
    """The working memory a model is granted.

    Args:
        peak_bytes: the most that its process held until its first answer.
        coming_bytes: what its engine knows that it will need beyond that, such as a cache of keys and values; 0 when
            it does not know.
    """
    wanted = peak_bytes + max(coming_bytes, peak_bytes // 4) + WORKING_HEADROOM_BYTES
    return -(-max(wanted, SMALLEST_WORKING_BYTES) // WORKING_STEP_BYTES) * WORKING_STEP_BYTES


class Sizes:
    """See the module.

    Args:
        devices: whose brokers grant what is needed.
        layout: where it is remembered.
    """

    def __init__(self, devices: Devices, layout: Layout) -> None:
        self._devices = devices
        self._layout = layout

    @property
    def _on_host(self) -> bool:
        return self._devices.on_host

    def find(self, instance: Instance) -> None:
        """Set its working memory: as the manifest says, or as measured before; else it gets a grant to be measured.

        What the manifest says of a model over several devices is their sum, of which each grants an equal part.
        """
        declared = instance.spec["deviceMemoryBytes"]
        measures = self._on_host or self._devices.of(instance).moves.contexts.measured
        known = Footprint.load(self._layout, self._name(instance)) if measures else None
        if declared:
            each_bytes = -(-declared // instance.spread.count)
            instance.working_bytes = max(each_bytes - instance.weights_bytes, WORKING_STEP_BYTES)
            instance.measured = True
        elif known is not None:
            instance.working_bytes = known.working_bytes
            instance.measured = True
        else:
            instance.measured = False

    async def measure(self, instance: Instance, process: ModelProcess) -> None:
        """Learn what it needs after its first answer; on a device with memory of its own it keeps its grant yet."""
        if not self._on_host:
            self._devices.of(instance).learn_working(instance, instance.working_bytes)
            return
        peak_bytes = max(process.group.peak_bytes() or 0, instance.private_bytes)
        await self._learn(instance, peak_bytes)

    async def apply(self, instance: Instance) -> None:
        """Let its process go, which still has its grant for a limit; on a device, let it leave, and learn its size."""
        if self._on_host:
            await self._devices.of(instance).orders.stop(instance, "its size is known now")
        elif not instance.foreign:
            peak_bytes = await self._devices.of(instance).moves.weigh(instance)
            if peak_bytes is not None:
                await self._learn(instance, peak_bytes)

    async def _learn(self, instance: Instance, peak_bytes: int) -> None:
        self._devices.of(instance).learn_working(instance, working_from_measured(peak_bytes, instance.coming_bytes))
        await asyncio.to_thread(self._remember, instance)

    def outgrown(self, instance: Instance) -> None:
        """Grant more working memory to a model that ran out of what was measured, lest it dies of it again."""
        if instance.spec["deviceMemoryBytes"] or instance.spec["limits"]["memoryBytes"]:
            return
        most_bytes = self._devices.of(instance).budget_bytes - instance.weights_bytes - instance.context_bytes
        wanted_bytes = min(instance.working_bytes * 3 // 2, most_bytes) // WORKING_STEP_BYTES * WORKING_STEP_BYTES
        if instance.working_bytes < wanted_bytes:
            instance.working_bytes = wanted_bytes
            self._remember(instance)

    def _remember(self, instance: Instance) -> None:
        """Save what was measured, so that it is measured once; a full disk only means to measure again."""
        try:
            Footprint(instance.working_bytes).save(self._layout, self._name(instance))
        except OmniError as error:
            log.warning("size_not_saved model=%s problem=%r", instance.name, error.problem)

    def _name(self, instance: Instance) -> str:
        """Under which its size is remembered: what a process holds on the host is not what it holds on a GPU."""
        process_hash = str(instance.spec["hash"])
        return process_hash if self._on_host else f"{process_hash}-gpu"
