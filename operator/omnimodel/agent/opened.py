"""A pool's device and store, opened once in an agent's life, and what of a later spec takes effect only after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omnimodel.agent.broker import Broker
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
from omnimodel.memory.devices import open_device
from omnimodel.memory.frames import FramePool
from omnimodel.memory.ledger import Ledger
from omnimodel.placement.state import bytes_text


@dataclass(frozen=True)
class OpenedPool:
    """What serves a pool.

    Args:
        supply: what the device was opened with.
        layout: folders of the agent and of the store.
        broker: decides who is on the device.
        preparation: fetches and publishes into the store.
        lock: of the store, where it is not the agent's own folder.
        published: folders of stores that others filled, by name.
    """

    supply: Supply
    layout: Layout
    broker: Broker
    preparation: Preparation
    lock: KeptLock | None
    published: Mapping[str, Path]

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
        changed: Callable[[], None],
    ) -> OpenedPool:
        """Open the device, and begin to decide about it; when that fails, nothing has changed.

        Args:
            pool: whose device and store.
            found: the pool in numbers.
            root: the agent's own folder.
            spawner: makes the processes that publish.
            least_device_bytes: what is on the device already, whatever the budget says.
            events: what a person is told.
            doubt: told of what cannot be used in a store that others filled.
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
                forms=lambda: found.forms if device.decodes() else Forms(found.auto_dtype),
                doubt=doubt,
            )
            device = open_device(found.device, found.frame_bytes, arena_bytes=found.arena_bytes)
            undo.pop_all()
        ledger = Ledger(max(found.budget_bytes, least_device_bytes), found.host_bytes, found.frame_bytes)
        frames = FramePool(device, ledger.device)
        broker = Broker(
            DeviceMemory(device, ledger, frames, Arena(device, ledger.host)),
            events,
            zygote_bytes=spawner.zygotes.private_bytes,
            changed=changed,
        )
        broker.resize(found.budget_bytes, found.host_bytes)
        broker.start()
        return cls(found, layout, broker, preparation, lock, published)

    async def close(self, spawner: Spawner) -> None:
        """End every process, then give the device and the store back."""
        await self.broker.close()
        await spawner.close()
        memory = self.broker.memory
        await memory.arena.close()
        await memory.frames.close()
        await asyncio.to_thread(memory.device.close)
        if self.lock is not None:
            self.lock.close()

    def without_effect(self, pool: OmniPool, found: Supply) -> list[str]:
        """What a pool asks for and this agent does not do, or not yet, in sentences.

        Args:
            pool: as it is written now.
            found: the same in numbers.
        """
        notes = []
        if unmetered := self.broker.memory.device.unmetered:
            notes.append(f"what processes hold on the device is not measured: {unmetered}")
        if found.frame_bytes != self.supply.frame_bytes:
            notes.append(
                f"device.frameSize {bytes_text(found.frame_bytes)} takes effect when the agent is started again; "
                f"until then frames have {bytes_text(self.supply.frame_bytes)}"
            )
        if (count := pool.spec.device.count or 1) > 1:
            why = "the memory of a machine is one device" if self.supply.device == "host" else "the first one serves"
            notes.append(f"device.count {count} has no effect: {why}")
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
