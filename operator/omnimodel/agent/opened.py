"""A pool's device and store, opened once in an agent's life, and what of a later spec takes effect only after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnimodel.agent.devices import Devices
from omnimodel.agent.events import EventLog
from omnimodel.agent.forms import Forms
from omnimodel.agent.kept import FOLDER_VARIABLE, KeptLock, kept_folder, published_folders
from omnimodel.agent.layout import Layout
from omnimodel.agent.moves import DeviceMemory
from omnimodel.agent.preparation import Preparation
from omnimodel.agent.spawner import Spawner
from omnimodel.agent.supply import Supply
from omnimodel.api import OmniPool
from omnimodel.errors import OmniError
from omnimodel.memory.arena import Arena
from omnimodel.memory.devices import open_devices
from omnimodel.memory.devices.cuda_driver import is_mig_instance
from omnimodel.memory.frames import FramePool
from omnimodel.memory.ledger import Account, Ledger
from omnimodel.placement.state import bytes_text

if TYPE_CHECKING:
    from omnimodel.agent.health import Health


@dataclass(frozen=True)
class OpenedPool:
    """What serves a pool.

    Args:
        supply: what the devices were opened with.
        layout: folders of the agent and of the store.
        devices: who is on them is decided there.
        preparation: fetches and publishes into the store.
        lock: of the store, where it is not the agent's own folder.
        published: folders of stores that others filled, by name.
        health: watches the devices; None where they are the machine's own memory.
    """

    supply: Supply
    layout: Layout
    devices: Devices
    preparation: Preparation
    lock: KeptLock | None
    published: Mapping[str, Path]
    health: Health | None

    @classmethod
    def open(
        cls,
        pool: OmniPool,
        found: Supply,
        root: Path,
        spawner: Spawner,
        *,
        least_device_bytes: int,
        events: EventLog,
        doubt: Callable[[OmniError], None],
        tell_lost: Callable[[OmniError], None],
        changed: Callable[[], None],
    ) -> OpenedPool:
        """Open the devices, and begin to decide about them; when that fails, nothing has changed.

        Args:
            pool: whose devices and store.
            found: the pool in numbers.
            root: the agent's own folder.
            spawner: makes the processes that publish.
            least_device_bytes: what is on the device already, whatever the budget says.
            events: what a person is told.
            doubt: told of what cannot be used in a store that others filled.
            tell_lost: told of a device that is lost.
            changed: called when a report may have changed.

        Raises:
            OmniError: the device does not give what the pool asks for, or the store cannot be opened.
        """
        kept, published = kept_folder(pool, root), published_folders(pool)
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(contextlib.closing(KeptLock(pool.subject, kept))) if kept != root else None
            layout = Layout(root, kept if lock else None)
            preparation = Preparation(
                layout,
                spawner,
                found.device,
                found.frame_bytes,
                found.threads,
                published=published,
                forms=lambda: found.forms if all(each.decodes() for each in opened) else Forms(found.auto_dtype),
                doubt=doubt,
            )
            loop = asyncio.get_running_loop()
            opened = open_devices(
                list(found.budgets),
                found.frame_bytes,
                arena_bytes=found.arena_bytes,
                told=lambda: _told(loop, changed),
            )
            undo.pop_all()
        host = Account("host", found.host_bytes, measured=True)
        arena = Arena(opened[0], host)
        memories = []
        for device, budget_bytes in zip(opened, found.budgets.values(), strict=True):
            ledger = Ledger(max(budget_bytes, least_device_bytes), found.host_bytes, found.frame_bytes, host)
            memories.append(DeviceMemory(device, ledger, FramePool(device, ledger.device), arena))
        devices = Devices(
            memories, events, zygote_bytes=spawner.zygotes.private_bytes, changed=changed, tell_lost=tell_lost
        )
        devices.resize(found.budgets, found.host_bytes)
        devices.start()
        health = None
        if not devices.on_host:
            from omnimodel.agent.health import Health

            health = Health(devices)
            health.start()
        return cls(found, layout, devices, preparation, lock, published, health)

    async def close(self, spawner: Spawner) -> None:
        """End every process, then give the devices and the store back."""
        if self.health is not None:
            await self.health.close()
        brokers = list(self.devices.brokers.values())
        await asyncio.gather(*(broker.close() for broker in brokers))
        await spawner.close()
        await brokers[0].memory.arena.close()
        for broker in reversed(brokers):  # what the first has pinned the others copy from
            await broker.memory.frames.close()
            await asyncio.to_thread(broker.memory.device.close)
        if self.lock is not None:
            self.lock.close()

    def without_effect(self, pool: OmniPool, found: Supply) -> list[str]:
        """What a pool asks for and this agent does not do, or not yet, in sentences.

        Args:
            pool: as it is written now.
            found: the same in numbers.
        """
        notes = [
            f"what processes hold on {name} is not measured: {broker.memory.device.unmetered}"
            for name, broker in self.devices.brokers.items()
            if broker.memory.device.unmetered
        ]
        if found.frame_bytes != self.supply.frame_bytes:
            notes.append(
                f"device.frameSize {bytes_text(found.frame_bytes)} takes effect when the agent is started again; "
                f"until then frames have {bytes_text(self.supply.frame_bytes)}"
            )
        count, there = pool.spec.device.count, len(self.supply.budgets)
        if count > 1 and self.supply.device == "host":
            notes.append(f"device.count {count} has no effect: the memory of a machine is one device")
        elif found.device == self.supply.device and len(found.budgets) != there:
            notes.append(f"device.count takes effect when the agent is started again; until then it is {there}")
        elif count > there and found.device == self.supply.device:
            notes.append(_fewer_gpus(count, there))
        if found.arena_bytes != self.supply.arena_bytes:
            notes.append("hostMemory takes effect on pinned memory when the agent is started again")
        if found.device != self.supply.device:
            notes.append(
                f"device.type takes effect when the agent is started again; until then it is {self.supply.device}"
            )
        kept = self.layout.kept
        if kept_folder(pool, self.layout.root) != kept:
            notes.append(f"store takes effect when the agent is started again; until then it is {kept}")
        elif FOLDER_VARIABLE not in os.environ and pool.spec.store is not None and pool.spec.store.of_a_cluster:
            notes.append(f"claims of store have no effect on one machine: the store is {kept}")
        if published_folders(pool) != self.published:
            notes.append("store.published takes effect when the agent is started again")
        mounted = [volume for volume in pool.spec.volumes if volume.path is None]
        absent = [f"{volume.name} ({volume.folder})" for volume in mounted if not Path(volume.folder).is_dir()]
        if absent:
            notes.append(f"volumes: there is no {', '.join(absent)}: only pods have claims and images mounted")
        missing = [f"{name} ({folder})" for name, folder in self.published.items() if not folder.is_dir()]
        if missing:
            notes.append(f"store.published: there is no {', '.join(missing)}: what it should have is published anew")
        return notes


def _told(loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # nobody is left to be told
        loop.call_soon_threadsafe(changed)


def _fewer_gpus(count: int, there: int) -> str:
    """That there are fewer GPUs than a pool asks for."""
    if is_mig_instance("cuda:0"):
        return (
            f"device.count {count}: CUDA shows a process one MIG instance, so an agent serves one; write count: 1, and "
            "as many replicas as there are instances"
        )
    return f"device.count {count}: this machine shows {there}, which serve"
