"""Keeps the disk from filling up: removes images, sources and environments that no model here needs, and only those.

Models come and go, and what was fetched and published for them stays, so that one that comes back serves at once. It
goes when a person says so, or, the least recently used first, when a new one would not fit.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnimodel.agent.environments import Environments
from omnimodel.agent.sources import Sources
from omnimodel.agent.stored import Stored
from omnimodel.memory.store import Store

log = logging.getLogger(__name__)

FREE_SHARE = 0.1  # of the file system: with less, the disk is short, and others than models may need it too


@dataclass(frozen=True)
class Needs:
    """What must stay.

    Args:
        specs: process specs of every model that is here, of revisions that come and go too.
        image_keys: of the images that they are served from.
        digests: of images that a process is served from now.
    """

    specs: Sequence[Mapping[str, Any]]
    image_keys: frozenset[str]
    digests: frozenset[str]


class Housekeeping:
    """See the module.

    Args:
        root: on the file system that is kept free.
        needs: asked in the event loop, right before anything is removed; None when everything is needed.
        tell: hears what went because the disk was short.
    """

    def __init__(
        self,
        root: Path,
        store: Store,
        sources: Sources,
        environments: Environments,
        needs: Callable[[], Needs | None] = lambda: None,
        tell: Callable[[Sequence[Stored]], None] = lambda _gone: None,
    ) -> None:
        self.needs = needs
        self.tell = tell
        self._root = root
        self._store = store
        self._sources = sources
        self._environments = environments
        self._removing = asyncio.Lock()

    async def quiet(self) -> None:
        """Wait until nothing is being removed.

        Whoever looks something up afterwards, for a model that is known here, is safe: a removal that begins later
        knows what that model needs.
        """
        async with self._removing:
            pass

    async def prune(self, *, dry_run: bool) -> list[Stored]:
        """Remove everything that nobody needs.

        Args:
            dry_run: only say what would go.

        Returns:
            What went, the least recently used first.
        """
        async with self._removing:
            needs = self.needs()
            if needs is None:
                return []
            found = await asyncio.to_thread(self._unneeded, needs)
            if not dry_run:
                await asyncio.to_thread(self._remove, found, needs)
            return found

    async def make_room(self, wanted_bytes: int = 0) -> list[Stored]:
        """Remove what nobody needs, the least recently used first, until there is room.

        Args:
            wanted_bytes: that something new will take, as far as it is known.

        Returns:
            What went; it is told as well.
        """
        if not await asyncio.to_thread(self._short, wanted_bytes):
            return []
        async with self._removing:
            needs = self.needs()
            gone = await asyncio.to_thread(self._free, needs, wanted_bytes) if needs is not None else []
        if gone:
            self.tell(gone)
        return gone

    def _short(self, wanted_bytes: int) -> bool:
        usage = shutil.disk_usage(self._root)
        return usage.free < wanted_bytes + usage.total * FREE_SHARE

    def _free(self, needs: Needs, wanted_bytes: int) -> list[Stored]:
        gone = []
        for item in self._unneeded(needs):
            if not self._short(wanted_bytes):
                break
            self._remove([item], needs)
            gone.append(item)
        return gone

    def _unneeded(self, needs: Needs) -> list[Stored]:
        """What nobody needs, the least recently used first."""
        found: list[Stored] = [
            Stored("image", image.digest, image.what, image.size_bytes, image.used_seconds)
            for image in self._store.stored()
            if not (image.keys & needs.image_keys or image.digest in needs.digests)
        ]
        sources = {self._sources.key(spec["source"]) for spec in needs.specs if spec["source"]}
        found += [item for item in self._sources.stored() if item.name not in sources]
        environments = self._environments.keys(spec["environment"]["requirements"] for spec in needs.specs)
        found += [item for item in self._environments.stored() if item.name not in environments]
        return sorted(found, key=lambda item: (item.used_seconds, item.kind, item.name))

    def _remove(self, items: Iterable[Stored], needs: Needs) -> None:
        for item in items:
            if item.kind == "image":
                self._store.remove(item.name, kept_keys=needs.image_keys)
            elif item.kind == "source":
                self._sources.remove(item.name)
            else:
                self._environments.remove(item.name)
            log.info("pruned kind=%s name=%s bytes=%d what=%r", item.kind, item.name, item.size_bytes, item.what)
