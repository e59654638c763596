"""Processes that outlived their agent, as the next one finds them: by the journal and the descriptors that were kept.

While a process serves, all of it that would be lost with its agent is in the store of descriptors; what is no
descriptor (`Facts`) is written into one, in memory: it changes with every swap, and never half. Whatever does not fit
together to the last descriptor is no survivor, and is ended like any leftover.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnimodel.agent.journal import Entry, has_ended, start_ticks
from omnimodel.errors import OmniError
from omnimodel.isolation import Reached, SandboxPlan
from omnimodel.memory.image import read_index
from omnimodel.memory.store import ImageRef

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """What a process serves, as far as another agent must know it.

    Args:
        model: `namespace/name`.
        hash, declared_bytes: of its spec: the hash, and `deviceMemoryBytes`.
        image, digest, store: of its image, see `ImageRef`; empty for a foreign engine.
        source, environment: folders; empty for none.
        device, frame_bytes, threads: as it was started with.
        working_bytes: that it was granted beside its weights.
        coming_bytes: see `Instance`.
        on_device: whether it may be resident: from before a wake is sent until after an evict is acknowledged.
        frames: id and inode of each frame that it may have mapped, in the order of the image.
        since_seconds: when it came where it is.
    """

    model: str
    hash: str
    declared_bytes: int
    image: str
    digest: str
    store: str
    source: str
    environment: str
    device: str
    frame_bytes: int
    threads: int
    working_bytes: int
    coming_bytes: int
    on_device: bool
    frames: tuple[tuple[int, int], ...]
    since_seconds: float

    @property
    def device_bytes(self) -> int:
        """What it holds on the device, if it is there."""
        return len(self.frames) * self.frame_bytes + self.working_bytes if self.on_device else 0


@dataclass(frozen=True)
class Facts:
    """All of a process that is neither a descriptor nor in its journal entry.

    Args:
        subject, generation, plan, reached, started_seconds: see `ModelProcess`.
        group, group_missing: name of its control group, and see `Group`.
        log_path: of its output.
        shared_bytes: see `PrivateMemory`; None when nobody has measured it.
        agents: how many agents it has had.
    """

    subject: str
    generation: int
    plan: SandboxPlan
    reached: Reached
    started_seconds: float
    group: str
    group_missing: tuple[str, ...]
    log_path: str
    shared_bytes: int | None
    agents: int
    served: Served

    def write(self) -> int:
        """A new descriptor with the facts, for the store; the receiver's to close.

        Raises:
            OSError: none can be made.
        """
        descriptor = os.memfd_create("facts", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, json.dumps(asdict(self)).encode())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> Facts:
        """The facts that `write` wrote.

        Raises:
            ValueError, KeyError, TypeError: they are of another version.
        """
        body: dict[str, Any] = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        body["plan"] = SandboxPlan.from_json(body["plan"])
        body["reached"] = Reached.from_json(body["reached"])
        body["group_missing"] = tuple(body["group_missing"])
        frames = tuple((number, inode) for number, inode in body["served"]["frames"])
        body["served"] = Served(**{**body["served"], "frames": frames})
        return cls(**body)


@dataclass(frozen=True)
class Survivor:
    """A process that lives, and everything that it takes to go on with it; its descriptors are the receiver's.

    Args:
        held: its descriptors by their names without the process: `facts`, and those of `ModelProcess.held`.
        frames: descriptors by the ids of frames, in the order of the image.
        image: None for a foreign engine.
    """

    entry: Entry
    facts: Facts
    held: Mapping[str, int]
    frames: Mapping[int, int]
    image: ImageRef | None

    @property
    def names(self) -> list[str]:
        """What its descriptors are called in the store."""
        instance = self.entry.instance
        return [
            *(f"{instance}/{name}" for name in self.held),
            *(frame_name(instance, number) for number in self.frames),
        ]


def facts_name(instance: str) -> str:
    """What the facts of a process are called in the store."""
    return f"{instance}/facts"


def frames_name(instance: str) -> str:
    """What the descriptors of all frames of a process are below, in the store."""
    return f"{instance}/frame"


def frame_name(instance: str, number: int) -> str:
    """What the descriptor of a frame is called in the store."""
    return f"{frames_name(instance)}/{number}"


def find_survivors(entries: Iterable[Entry], found: Mapping[str, int]) -> list[Survivor]:
    """Those that can be gone on with.

    Args:
        entries: of the journal.
        found: descriptors that were kept, by name.
    """
    survivors = []
    for entry in entries:
        if facts_name(entry.instance) not in found:
            continue
        try:
            survivors.append(_survivor(entry, found))
        except (OmniError, KeyError, TypeError, ValueError, OSError) as error:
            log.warning("not_gone_on_with instance=%s error=%r", entry.instance, str(error))
    return survivors


def _survivor(entry: Entry, found: Mapping[str, int]) -> Survivor:
    """Put a process together; raises when anything of it is missing, or is not what it should be."""
    held = {name: found[f"{entry.instance}/{name}"] for name in ("facts", "channel", "output", "pidfd")}
    facts = Facts.read(held["facts"])
    if start_ticks(entry.pid) != entry.start_ticks or has_ended(held["pidfd"]):
        raise ValueError("it has ended")
    served = facts.served
    frames = {}
    for number, inode in served.frames:
        frames[number] = found[frame_name(entry.instance, number)]
        status = os.fstat(frames[number])
        if (status.st_ino, status.st_size) != (inode, served.frame_bytes):
            raise ValueError(f"frame {number} is another one")
    image = None
    if served.image:
        index = read_index(Path(served.image))
        if index.digest != served.digest:
            raise ValueError("its image is another one")
        image = ImageRef(Path(served.image), index.digest, index.bytes, index, served.store)
    return Survivor(entry, facts, held, frames, image)
