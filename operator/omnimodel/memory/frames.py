"""The frames of a device: which model owns each, and what the free ones still hold.

One task owns the pool (the agent's broker): tables change only between its awaits. The device's own calls block and
run in threads. Every change of an owner goes through the ledger's device account, so that the two cannot disagree.

A frame that is free keeps the part of the image it held until someone takes it: the next wake of that model copies
only what is missing (partial residency).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from omnimodel.errors import LedgerError
from omnimodel.memory.devices import Copy, Device, Fence, Frame
from omnimodel.memory.ledger import DeviceAccount, Kind

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_BATCH_FRAMES = 4  # made at once in the background, so that a wake never waits long for its turn


@dataclass(frozen=True)
class Part:
    """What a frame holds: part `number` of the image `digest`."""

    digest: str
    number: int


@dataclass(frozen=True)
class Allocation:
    """Frames of a model, in the order of its image; `valid` says which hold their part already."""

    model: str
    digest: str
    frames: tuple[Frame, ...]
    valid: tuple[bool, ...]

    @property
    def missing(self) -> int:
        """How many frames must be copied."""
        return self.valid.count(False)


@dataclass(frozen=True)
class _Place:
    """One entry of the owner table.

    Args:
        owner: None when it is free.
        slot: which part of the owner's image is its place.
        part: what it holds; None while that is being copied.
        quarantined: whether it is set apart.
    """

    frame: Frame
    owner: str | None = None
    slot: int = 0
    part: Part | None = None
    quarantined: bool = False


def _worthless(_digest: str) -> float:
    return 0.0


class FramePool:
    """All frames of one device.

    Args:
        device: makes and destroys them.
        account: the ledger's device account.
    """

    def __init__(self, device: Device, account: DeviceAccount) -> None:
        self.device = device
        self.account = account
        self._places: dict[int, _Place] = {}
        self._kept: dict[str, Counter[int]] = {}  # digest -> its parts in free frames, and in how many each
        self._filling: dict[str, bool] = {}  # model -> whether it was released while its frames were being filled
        self._changing = asyncio.Lock()  # making and destroying frames, which takes several steps

    # What there is

    def owners(self) -> dict[int, str]:
        """Frame -> model, quarantined ones included."""
        return {number: place.owner for number, place in self._places.items() if place.owner is not None}

    def frames_of(self, model: str) -> list[Frame]:
        """Frames that a model owns, in the order of its image; without the quarantined."""
        owned = [place for place in self._places.values() if place.owner == model and not place.quarantined]
        return [place.frame for place in sorted(owned, key=_image_order)]

    def quarantined(self) -> dict[str, int]:
        """Model -> how many of its frames are set apart."""
        return dict(Counter(place.owner for place in self._places.values() if place.owner and place.quarantined))

    def valid_frames(self, digest: str) -> int:
        """How many parts of an image lie in free frames: bytes that a wake need not copy."""
        return len(self._kept.get(digest, ()))

    # Making and destroying

    async def make_room(self, worth: Callable[[str], float] = _worthless) -> None:
        """Bring frames into line with the ledger: destroy what stands in the way, make what is promised.

        Args:
            worth: of an image that free frames still hold; the least worth goes first.

        Raises:
            LedgerError: the device does not have the memory.
        """
        await _to_its_end(self._bring_into_line(worth))

    async def give_way(self, worth: Callable[[str], float] = _worthless) -> None:
        """Destroy frames that stand in the way of working memory; see `make_room`."""
        await _to_its_end(self._bring_into_line(worth, make=False))

    async def _bring_into_line(self, worth: Callable[[str], float], *, make: bool = True) -> None:
        async with self._changing:
            if surplus := self.account.surplus_frames():
                await self._destroy(list(islice(self._by_worth(worth), surplus)))
            if make and (missing := self.account.missing_frames()):
                await self._create(missing)

    async def create_ahead(self, count: int) -> None:
        """Make frames in the background until there are `count`, as far as there is room; a wake goes in between.

        Raises:
            LedgerError: the device does not have the memory.
        """
        while await _to_its_end(self._create_batch(count)):
            pass

    async def _create_batch(self, count: int) -> int:
        async with self._changing:
            batch = max(0, min(_BATCH_FRAMES, count - self.account.frames, self.account.spare_frames()))
            if batch:
                await self._create(batch)
            return batch

    async def _create(self, count: int) -> None:
        self.account.created(count)
        try:
            self._add(await asyncio.to_thread(self.device.create, count))
        except BaseException:
            self.account.destroyed(count)
            raise

    def _add(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self._put(_Place(frame))

    async def _destroy(self, places: list[_Place]) -> None:
        frames = [place.frame for place in places]
        for frame in frames:
            self._drop(frame.id)
        await asyncio.to_thread(self.device.destroy, frames)
        self.account.destroyed(len(frames))

    def adopt(self, model: str, digest: str, descriptors: Mapping[int, int], working_bytes: int) -> tuple[Frame, ...]:
        """Take over the frames of a model whose process outlived its agent.

        Args:
            model: that owns them.
            digest: of the image that they hold.
            descriptors: by the frames' ids, in the order of the image.
            working_bytes: that the process holds besides.

        Raises:
            LedgerError: they are no frames, or there is no room for so many.
        """
        self.account.adopt(model, len(descriptors), working_bytes)
        try:
            frames = tuple(self.device.adopt(descriptors))
        except BaseException:
            self.account.release_frames(model)
            self.account.give_back(model, Kind.WORKING)
            self.account.destroyed(len(descriptors))
            raise
        for number, frame in enumerate(frames):
            self._put(_Place(frame, model, number, Part(digest, number)))
        return frames

    # Taking and releasing

    def take(self, model: str, digest: str, worth: Callable[[str], float] = _worthless) -> Allocation:
        """Turn the ledger's promise to a model into frames, reusing those that hold parts of its image.

        What is not valid counts as empty until `arrived`.

        Args:
            model: was promised frames; `make_room` has been awaited since.
            digest: of its image.
            worth: of another image, parts of which would be lost; the least worth goes first.

        Raises:
            LedgerError: nothing was promised, or the frames are not there.
        """
        if model in self._filling:
            raise LedgerError(model, "its frames are still being filled for an earlier wake")
        free = self._free()
        promised = self.account.promised(model)
        if promised is not None and promised.frames > len(free):
            raise LedgerError(model, f"was promised {promised.frames} frames, {len(free)} have been made")
        promise = self.account.grant(model)
        kept = {
            place.part.number: place
            for place in free
            if place.part is not None and place.part.digest == digest and place.part.number < promise.frames
        }
        used = {place.frame.id for place in kept.values()}
        others = (place for place in self._by_worth(worth) if place.frame.id not in used)
        chosen = [kept.get(number) or next(others) for number in range(promise.frames)]
        valid = tuple(number in kept for number in range(promise.frames))
        for number, place in enumerate(chosen):
            self._put(_Place(place.frame, model, number, place.part if valid[number] else None))
        log.debug("frames_taken model=%s frames=%d valid=%d", model, promise.frames, sum(valid))
        return Allocation(model, digest, tuple(place.frame for place in chosen), valid)

    async def fill(
        self,
        allocation: Allocation,
        staged: Any,
        timeout_seconds: float,
        *,
        fence: Fence | None = None,
        begun: Callable[[Copy], None] = lambda _: None,
    ) -> float:
        """Copy what is missing of an image into its frames, and say that it has arrived.

        Ends only when nothing is written any more, also when it is cancelled or late: until then neither the frames
        nor the staged image may be given to anyone else.

        Args:
            staged: the image, from `Device.stage`; stays staged until this ends.
            timeout_seconds: after this the copy counts as failed.
            fence: of the model's process, which the copy advances.
            begun: called when the copy is under way.

        Returns:
            Seconds that the copy took.

        Raises:
            ImageError: the image cannot be read.
            TimeoutError: it took longer.
        """
        self._filling[allocation.model] = False
        try:
            copy = await _to_its_end(
                asyncio.to_thread(self.device.copy, staged, allocation.frames, valid=allocation.valid, fence=fence)
            )
            begun(copy)
            seconds = await self._end_of(copy, timeout_seconds)
            self.arrived(allocation)
            return seconds
        finally:
            if self._filling.pop(allocation.model):  # it was released meanwhile
                self.recover(allocation.model)

    @staticmethod
    async def _end_of(copy: Copy, timeout_seconds: float) -> float:
        end = asyncio.ensure_future(asyncio.to_thread(copy.wait))
        try:
            async with asyncio.timeout(timeout_seconds):
                return await asyncio.shield(end)
        except (TimeoutError, asyncio.CancelledError):
            while not end.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([end])
            end.exception()
            raise

    def filling(self, model: str) -> bool:
        """Whether a copy into a model's frames is under way."""
        return model in self._filling

    def arrived(self, allocation: Allocation) -> None:
        """Say that the copy has ended well: every frame holds its part of the image."""
        for number, frame in enumerate(allocation.frames):
            place = self._places.get(frame.id)
            if place is not None and place.owner == allocation.model:
                self._put(replace(place, part=Part(allocation.digest, number)))

    def release(self, model: str) -> int:
        """Make a model's frames free, after it acknowledged that they are unmapped; how many that were.

        While they are being filled they are set apart instead, and come free at the end of the copy.
        """
        if model in self._filling:
            self._filling[model] = True
            self.quarantine(model)
            return 0
        frames = self.frames_of(model)
        self.account.release_frames(model, len(frames))
        for frame in frames:
            self._put(_Place(frame, part=self._places[frame.id].part))
        return len(frames)

    def quarantine(self, model: str) -> int:
        """Set a model's frames apart: it did not acknowledge, so its process may still have them mapped."""
        frames = self.frames_of(model)
        self.account.quarantine(model)
        for frame in frames:
            self._put(replace(self._places[frame.id], quarantined=True))
        if frames:
            log.warning("frames_quarantined model=%s frames=%d", model, len(frames))
        return len(frames)

    def recover(self, model: str) -> int:
        """Make a model's quarantined frames free, after its process was seen to be gone; how many that were.

        While frames of the model are being filled, all of them come free at the end of the copy.
        """
        if model in self._filling:
            return 0
        apart = [place for place in self._places.values() if place.owner == model and place.quarantined]
        self.account.recover(model)
        for place in apart:
            self._put(_Place(place.frame, part=place.part))
        return len(apart)

    def forget(self, digest: str) -> None:
        """Let frames no longer count as holding parts of an image that is gone or was found damaged.

        Those that somebody owns count so no more, either, once they are free.
        """
        for place in list(self._places.values()):
            if place.part is not None and place.part.digest == digest:
                self._put(replace(place, part=None))

    async def close(self) -> None:
        """Destroy the free frames; owned ones are still mapped somewhere."""
        await _to_its_end(self._destroy_free())

    async def _destroy_free(self) -> None:
        async with self._changing:
            await self._destroy(self._free())

    # The table

    def _put(self, place: _Place) -> None:
        self._drop(place.frame.id)
        self._places[place.frame.id] = place
        if place.owner is None and place.part is not None:
            self._kept.setdefault(place.part.digest, Counter())[place.part.number] += 1

    def _drop(self, frame_id: int) -> None:
        place = self._places.pop(frame_id, None)
        if place is None or place.owner is not None or place.part is None:
            return
        parts = self._kept[place.part.digest]
        parts[place.part.number] -= 1
        if not parts[place.part.number]:
            del parts[place.part.number]
        if not parts:
            del self._kept[place.part.digest]

    # Choosing

    def _free(self) -> list[_Place]:
        return [place for place in self._places.values() if place.owner is None]

    def _by_worth(self, worth: Callable[[str], float]) -> Iterator[_Place]:
        """Free frames, the least loss first: empty ones, doubles, then by worth, the end of an image first.

        In the agent's event loop: each image is asked for its worth once, and nothing is sorted that is not needed.
        """
        only: dict[Part, _Place] = {}
        for place in self._free():
            if place.part is None or place.part in only:
                yield place
            else:
                only[place.part] = place
        images: dict[str, list[Part]] = {}
        for part in only:
            images.setdefault(part.digest, []).append(part)
        for digest in sorted(images, key=lambda digest: (worth(digest), digest)):
            for part in sorted(images[digest], key=lambda part: -part.number):
                yield only[part]


def _image_order(place: _Place) -> int:
    return place.slot


async def _to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await work that takes its steps to the end even when the caller is cancelled: a thread cannot be stopped."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # someone may have stopped waiting
    return await asyncio.shield(task)
