"""The exact account of device and host bytes: who holds what, what is promised, what is free.

Pure: no I/O, no clock. One task owns it (the agent's broker), so nothing here locks. No call ever leaves an account
below zero or over its capacity: it raises, and nothing has changed. Only host memory can be over: what a process was
measured to hold is a fact, which the account records; it then grants nothing until there is room again.

The life of a wake's bytes: `promise` (nobody else can get them), `grant` (they are the model's frames and working
memory), `release_frames`. Frames are elastic: they are made when first promised, stay when they are released, and the
free ones go when working memory needs their room (`surplus_frames`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from omnimodel.errors import LedgerError


class Kind(StrEnum):
    """What bytes are held for."""

    FRAMES = "frames"  # weights of a resident model
    PROMISE = "promise"  # of a wake in progress; on the host of a move that brings bytes there
    WORKING = "working"  # private memory of a process that is resident, or frozen
    CONTEXT = "context"  # of a process beside frames and working memory, on a device with memory of its own
    QUARANTINE = "quarantine"  # frames that a process may still have mapped
    ARENA = "arena"  # an image in host memory
    PROCESS = "process"  # private memory of a process that is not resident
    ZYGOTE = "zygote"


@dataclass(frozen=True)
class AccountSnapshot:
    """An account at one moment.

    Args:
        free_bytes: below zero when processes were measured to hold more than there is.
        held: holder -> kind -> bytes, both in order of their names; no zeroes.
    """

    capacity_bytes: int
    free_bytes: int
    held: Mapping[str, Mapping[Kind, int]]

    def total_bytes(self, kind: Kind) -> int:
        """Bytes that are held for one kind."""
        return sum(kinds.get(kind, 0) for kinds in self.held.values())


@dataclass(frozen=True)
class LedgerSnapshot:
    """Both accounts at one moment; `frames` is how many there are, `free_frames` how many no model owns."""

    device: AccountSnapshot
    host: AccountSnapshot
    frame_bytes: int
    frames: int
    free_frames: int


class Account:
    """Bytes of one capacity, by holder and kind.

    Args:
        name: `device` or `host`, for messages.
        capacity_bytes: what there is in all.
        measured: `set` records more than there is, and `resize` goes below what is held.
    """

    def __init__(self, name: str, capacity_bytes: int, *, measured: bool = False) -> None:
        _whole(name, capacity_bytes)
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._measured = measured
        self._held: dict[str, dict[Kind, int]] = {}
        self._held_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes nobody holds; of a measured account below zero when more is held than there is."""
        return self.capacity_bytes - self._held_bytes

    def held_bytes(self, holder: str | None = None, kind: Kind | None = None) -> int:
        """Bytes of a holder, of a kind, of both, or of everyone."""
        if holder is None and kind is None:
            return self._held_bytes
        kinds = self._held.values() if holder is None else (self._held.get(holder, {}),)
        return sum(sum(held.values()) if kind is None else held.get(kind, 0) for held in kinds)

    def hold(self, holder: str, kind: Kind, more_bytes: int) -> None:
        """Take bytes in addition to what the holder has.

        Raises:
            LedgerError: there are not that many free; naming both numbers.
        """
        _whole(holder, more_bytes)
        if more_bytes and more_bytes > self.free_bytes:
            raise self._too_much(holder, kind, more_bytes)
        self._put(holder, kind, self.held_bytes(holder, kind) + more_bytes)

    def give_back(self, holder: str, kind: Kind, fewer_bytes: int | None = None) -> int:
        """Give bytes back; all of them by default. Returns how many that was.

        Raises:
            LedgerError: the holder has fewer than that; naming both numbers.
        """
        held_bytes = self.held_bytes(holder, kind)
        if fewer_bytes is None:
            fewer_bytes = held_bytes
        _whole(holder, fewer_bytes)
        if fewer_bytes > held_bytes:
            raise LedgerError(
                holder, f"gives back {fewer_bytes} bytes of {kind} on the {self.name}, it holds {held_bytes}"
            )
        self._put(holder, kind, held_bytes - fewer_bytes)
        return fewer_bytes

    def set(self, holder: str, kind: Kind, size_bytes: int) -> None:
        """Hold exactly that many bytes, as measured.

        Raises:
            LedgerError: it has grown by more than is free, and the account is no measured one; it still says what it
                said before.
        """
        _whole(holder, size_bytes)
        more_bytes = size_bytes - self.held_bytes(holder, kind)
        if more_bytes > self.free_bytes and not self._measured:
            raise self._too_much(holder, kind, more_bytes)
        self._put(holder, kind, size_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity, after an edit of the pool.

        Raises:
            LedgerError: more is held than that, and the account is no measured one; naming both numbers.
        """
        _whole(self.name, capacity_bytes)
        if capacity_bytes < self._held_bytes and not self._measured:
            raise LedgerError(
                f"{self.name} budget",
                f"cannot become {capacity_bytes} bytes while {self._held_bytes} are held",
                "evict models first",
            )
        self.capacity_bytes = capacity_bytes

    def snapshot(self) -> AccountSnapshot:
        """The account as it is now."""
        held = {holder: dict(sorted(kinds.items())) for holder, kinds in sorted(self._held.items())}
        return AccountSnapshot(self.capacity_bytes, self.free_bytes, held)

    def _put(self, holder: str, kind: Kind, size_bytes: int) -> None:
        kinds = self._held.setdefault(holder, {})
        self._held_bytes += size_bytes - kinds.pop(kind, 0)
        if size_bytes:
            kinds[kind] = size_bytes
        elif not kinds:
            del self._held[holder]

    def _too_much(self, holder: str, kind: Kind, more_bytes: int) -> LedgerError:
        return LedgerError(
            holder,
            f"needs {more_bytes} more bytes of {kind} on the {self.name}, {self.free_bytes} of "
            f"{self.capacity_bytes} are free",
        )


@dataclass(frozen=True)
class Promise:
    """Bytes that a wake will need and nobody else can get."""

    model: str
    frames: int
    working_bytes: int


class DeviceAccount(Account):
    """The device: frames besides bytes.

    Args:
        capacity_bytes: the device budget.
        frame_bytes: size of a frame.
    """

    def __init__(self, capacity_bytes: int, frame_bytes: int) -> None:
        super().__init__("device", capacity_bytes)
        if frame_bytes <= 0:
            raise LedgerError("device", f"frames of {frame_bytes} bytes")
        self.frame_bytes = frame_bytes
        self.frames = 0
        self._promises: dict[str, Promise] = {}

    @property
    def free_frames(self) -> int:
        """Frames that exist and no model owns; some may be promised."""
        return self.frames - self._owned_frames()

    def promise(self, model: str, frames: int, working_bytes: int = 0) -> Promise:
        """Set aside what a wake needs.

        Args:
            model: who wakes; it has no other promise.
            frames: for its weights.
            working_bytes: beyond what it holds as working memory already.

        Raises:
            LedgerError: the bytes are not there; naming both numbers.
        """
        _whole(model, frames)
        _whole(model, working_bytes)
        if model in self._promises:
            raise LedgerError(model, "has a promise already: two wakes of one model at once")
        self.hold(model, Kind.PROMISE, frames * self.frame_bytes + working_bytes)
        self._promises[model] = Promise(model, frames, working_bytes)
        return self._promises[model]

    def promised(self, model: str) -> Promise | None:
        """The promise to a model, if there is one."""
        return self._promises.get(model)

    def cancel(self, model: str) -> None:
        """Take a promise back; harmless when there is none."""
        if self._promises.pop(model, None):
            self.give_back(model, Kind.PROMISE)

    def grant(self, model: str) -> Promise:
        """Turn a promise into frames and working memory.

        Raises:
            LedgerError: nothing was promised, or the frames do not exist yet.
        """
        promise = self._promises.get(model)
        if promise is None:
            raise LedgerError(model, "was promised nothing")
        if promise.frames > self.free_frames:
            raise LedgerError(model, f"was promised {promise.frames} frames, {self.free_frames} are free")
        if surplus := self.surplus_frames():
            raise LedgerError(model, f"cannot be granted while {surplus} frames stand in the way of working memory")
        self.cancel(model)
        self.hold(model, Kind.FRAMES, promise.frames * self.frame_bytes)
        self.hold(model, Kind.WORKING, promise.working_bytes)
        return promise

    def adopt(self, model: str, frames: int, working_bytes: int) -> None:
        """Count what a model has had since before this account began: frames that exist, and working memory.

        Raises:
            LedgerError: there is no room for so much.
        """
        self.created(frames)
        try:
            self.hold(model, Kind.FRAMES, frames * self.frame_bytes)
            self.hold(model, Kind.WORKING, working_bytes)
        except LedgerError:
            self.give_back(model, Kind.FRAMES)
            self.destroyed(frames)
            raise

    def release_frames(self, model: str, frames: int | None = None) -> int:
        """Take frames back from a model; all by default. Returns how many. They stay and are free."""
        fewer_bytes = None if frames is None else frames * self.frame_bytes
        return self.give_back(model, Kind.FRAMES, fewer_bytes) // self.frame_bytes

    def quarantine(self, model: str) -> int:
        """Set a model's frames apart until its process is seen to be gone. Returns how many."""
        released_bytes = self.give_back(model, Kind.FRAMES)
        self.hold(model, Kind.QUARANTINE, released_bytes)
        return released_bytes // self.frame_bytes

    def recover(self, model: str) -> int:
        """Make a model's quarantined frames free. Returns how many."""
        return self.give_back(model, Kind.QUARANTINE) // self.frame_bytes

    def missing_frames(self) -> int:
        """How many frames must be made for the promises there are."""
        return max(0, sum(promise.frames for promise in self._promises.values()) - self.free_frames)

    def surplus_frames(self) -> int:
        """How many free frames must be destroyed so that working memory, promised or held, has its room."""
        return max(0, -(-(self._physical_bytes() - self.capacity_bytes) // self.frame_bytes))

    def spare_frames(self) -> int:
        """How many more frames could be made now without standing in anyone's way."""
        return max(0, (self.capacity_bytes - self._physical_bytes()) // self.frame_bytes)

    def created(self, count: int) -> None:
        """Say that frames are being made: before they are, so that two makers cannot take the same room.

        Raises:
            LedgerError: they have no room beside working memory and the other frames.
        """
        _whole("device", count)
        needed_bytes = count * self.frame_bytes
        room_bytes = self.capacity_bytes - self._physical_bytes()
        if needed_bytes > room_bytes:
            raise LedgerError("device", f"{count} frames need {needed_bytes} bytes, there is room for {room_bytes}")
        self.frames += count

    def destroyed(self, count: int) -> None:
        """Say that free frames are gone: after they are.

        Raises:
            LedgerError: not that many are free.
        """
        _whole("device", count)
        if count > self.free_frames:
            raise LedgerError("device", f"{count} frames were destroyed, {self.free_frames} were free")
        self.frames -= count

    def _owned_frames(self) -> int:
        owned_bytes = self.held_bytes(kind=Kind.FRAMES) + self.held_bytes(kind=Kind.QUARANTINE)
        return owned_bytes // self.frame_bytes

    def _physical_bytes(self) -> int:
        """Bytes of all frames that exist, and of other memory that exists or may come into being at any moment."""
        promised_bytes = sum(promise.working_bytes for promise in self._promises.values())
        others_bytes = self.held_bytes(kind=Kind.WORKING) + self.held_bytes(kind=Kind.CONTEXT)
        return self.frames * self.frame_bytes + others_bytes + promised_bytes


class Ledger:
    """Device and host together.

    Args:
        device_bytes: budget of the device: frames, promises, working memory of resident processes, and contexts.
        host_bytes: budget of host memory: arena, other processes, zygotes.
        frame_bytes: size of a frame.
        host: the account of host memory, where several devices share one.
    """

    def __init__(self, device_bytes: int, host_bytes: int, frame_bytes: int, host: Account | None = None) -> None:
        self.device = DeviceAccount(device_bytes, frame_bytes)
        self.host = host or Account("host", host_bytes, measured=True)

    def snapshot(self) -> LedgerSnapshot:
        """Everything, for a report."""
        return LedgerSnapshot(
            self.device.snapshot(),
            self.host.snapshot(),
            self.device.frame_bytes,
            self.device.frames,
            self.device.free_frames,
        )

    def held_by(self, holder: str) -> tuple[int, int]:
        """Bytes that a holder has on the device and on the host."""
        return self.device.held_bytes(holder), self.host.held_bytes(holder)

    def forget(self, holder: str) -> None:
        """Give back all that a holder has but frames, which `FramePool` releases. Its process must be gone."""
        self.device.cancel(holder)
        for account in (self.device, self.host):
            for kind in list(Kind):
                if kind not in {Kind.FRAMES, Kind.QUARANTINE}:
                    account.give_back(holder, kind)


def _whole(subject: str, number: int) -> None:
    if number < 0:
        raise LedgerError(subject, f"{number} is below zero")
