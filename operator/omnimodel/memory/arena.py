"""The arena: images in host memory, ready to be copied into frames.

With CUDA an image is read into pinned memory; on a machine without, it is mapped and read into the page cache. What
is staged stays until its bytes are wanted for something worth more. An image that has no room there, whatever goes, is
read while it is copied where the device can do that; it takes room for parts of it, and only meanwhile. One task owns
an arena (the agent's broker).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from omnimodel.errors import LedgerError
from omnimodel.memory.devices import Device
from omnimodel.memory.ledger import Account, Kind
from omnimodel.memory.store import ImageRef

log = logging.getLogger(__name__)


@dataclass
class _Entry:
    """An image that is staged or being staged; `users` copy from it just now.

    Args:
        held_bytes: what it takes.
        streamed: whether only parts of it are here at a time.
    """

    ref: ImageRef
    held_bytes: int
    streamed: bool
    staging: asyncio.Task[Any] = field(repr=False)
    users: int = 0
    unwanted: bool = False


class Arena:
    """Images in host memory under a budget.

    Args:
        device: stages and unstages them. Where it pins memory for them, the arena holds all of that from the start,
            and has nothing to give up for others.
        account: the ledger's host account.
        budget_bytes: what the arena may hold of it; None for whatever is free there.
    """

    def __init__(self, device: Device, account: Account, budget_bytes: int | None = None) -> None:
        self.device = device
        self._host = account
        self._pinned = device.pinned_bytes > 0
        if self._pinned:
            account.hold("arena", Kind.ARENA, device.pinned_bytes)
            account = Account("arena", device.pinned_bytes, measured=True)
        self.account = account
        self.budget_bytes = budget_bytes
        self._entries: dict[str, _Entry] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all images in it."""
        return self.account.held_bytes(kind=Kind.ARENA)

    def holds(self, digest: str) -> bool:
        """Whether an image is staged and a wake need not wait for the disk."""
        entry = self._entries.get(digest)
        return entry is not None and entry.staging.done() and not entry.streamed

    @asynccontextmanager
    async def staged(self, ref: ImageRef, worth: Callable[[str], float]) -> AsyncIterator[Any]:
        """Have an image in the arena while the context is entered; afterwards it stays until it must go.

        Args:
            ref: the image.
            worth: of an image by its digest; the least worth goes first, and nothing that is in use.

        Yields:
            The handle for `Device.copy`.

        Raises:
            LedgerError: it cannot fit, whatever goes; naming both numbers.
            ImageError: the image cannot be read.
        """
        entry = self._entries.get(ref.digest)
        if entry is None:
            entry = self._begin(ref, worth)
        entry.users += 1
        entry.unwanted = False
        try:
            yield await asyncio.shield(entry.staging)
        finally:
            entry.users -= 1
            if (entry.unwanted or entry.streamed) and not entry.users:
                self.drop(ref.digest)

    async def stage(self, ref: ImageRef, worth: Callable[[str], float]) -> None:
        """Bring an image in and leave it there, if there is room."""
        async with self.staged(ref, worth):
            pass

    def short_bytes(self, ref: ImageRef) -> int:
        """How many bytes others must give up, even if all images went that are not in use; 0 when it fits, or is here.

        Nobody else has any of what a device has pinned.
        """
        return 0 if self._pinned else self._short_bytes(ref)

    def _short_bytes(self, ref: ImageRef) -> int:
        if ref.digest in self._entries:
            return 0
        return max(0, self._bytes(ref) - self._room_bytes() - sum(entry.held_bytes for entry in self._idle()))

    def _bytes(self, ref: ImageRef) -> int:
        """What an image takes of the arena."""
        return -(-ref.stored_bytes // self.device.page_bytes) * self.device.page_bytes

    def drop(self, digest: str) -> None:
        """Take an image out, at the end of its use; harmless when it is not there."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        if entry.users or not entry.staging.done():
            entry.unwanted = True
            return
        self._remove(entry)

    def give_up(self, needed_bytes: int, worth: Callable[[str], float]) -> int:
        """Free host bytes for someone else. Returns how many came free, which may be fewer."""
        return 0 if self._pinned else self._free_up(needed_bytes, worth)

    def follow(self) -> None:
        """Have no more, and leave the rest to others, when the device could not pin all that it was to."""
        if self._pinned and self.account.capacity_bytes != self.device.pinned_bytes:
            log.warning("arena_smaller bytes=%d of=%d", self.device.pinned_bytes, self.account.capacity_bytes)
            self.account.resize(self.device.pinned_bytes)
            self._host.set("arena", Kind.ARENA, self.device.pinned_bytes)

    async def close(self) -> None:
        """Take everything out; nothing may be in use."""
        await asyncio.gather(*(entry.staging for entry in self._entries.values()), return_exceptions=True)
        for entry in list(self._entries.values()):
            self._remove(entry)

    def _room_bytes(self) -> int:
        self.follow()
        if self.budget_bytes is None:
            return self.account.free_bytes
        return min(self.account.free_bytes, self.budget_bytes - self.held_bytes)

    def _begin(self, ref: ImageRef, worth: Callable[[str], float]) -> _Entry:
        room_bytes, needed_bytes, whole = self._room_bytes(), self._bytes(ref), True
        if needed_bytes > room_bytes:
            if short_bytes := self._short_bytes(ref):
                possible_bytes = max(0, needed_bytes - short_bytes)
                whole = not 0 < self.device.stream_bytes <= possible_bytes
                if whole:
                    raise LedgerError(
                        f"image {ref.digest[:12]}",
                        f"needs {needed_bytes} bytes of the arena, {possible_bytes} could be free",
                        "raise the pool's hostMemory",
                    )
                needed_bytes = self.device.stream_bytes
            self._free_up(needed_bytes - room_bytes, worth)
        self.account.hold(_holder(ref.digest), Kind.ARENA, needed_bytes)
        staging = asyncio.to_thread(self.device.stage, str(ref.image), ref.bytes, whole=whole)
        task = asyncio.ensure_future(staging)
        entry = _Entry(ref, needed_bytes, not whole, task)
        self._entries[ref.digest] = entry
        task.add_done_callback(lambda _: self._staged(entry))
        return entry

    def _staged(self, entry: _Entry) -> None:
        if entry.staging.cancelled() or entry.staging.exception() is not None or (entry.unwanted and not entry.users):
            self._remove(entry)

    def _idle(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if not entry.users and entry.staging.done()]

    def _free_up(self, needed_bytes: int, worth: Callable[[str], float]) -> int:
        freed_bytes = 0
        for entry in sorted(self._idle(), key=lambda idle: worth(idle.ref.digest)):
            if freed_bytes >= needed_bytes:
                break
            self._remove(entry)
            freed_bytes += entry.held_bytes
            log.info("image_left_arena digest=%s bytes=%d", entry.ref.digest, entry.held_bytes)
        return freed_bytes

    def _remove(self, entry: _Entry) -> None:
        if self._entries.get(entry.ref.digest) is not entry:
            return
        del self._entries[entry.ref.digest]
        if not entry.staging.cancelled() and entry.staging.exception() is None:
            self.device.unstage(entry.staging.result())
        self.account.give_back(_holder(entry.ref.digest), Kind.ARENA)


def _holder(digest: str) -> str:
    return f"image {digest}"
