"""Loads of instances: an image is copied into frames, and the process maps them, behind the copy where it can.

A process with a fence waits for each byte before it reads it, so it maps its frames as the copy begins and computes
while it goes on; any other maps them once all of it has arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from omnimodel.agent import servers
from omnimodel.agent.proof import prove, proves_wakes
from omnimodel.agent.wake_costs import WakeCosts
from omnimodel.errors import CURES, LedgerError, OmniError, Reason
from omnimodel.memory.ledger import Kind
from omnimodel.placement.state import bytes_text

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.moves import DeviceMemory
    from omnimodel.memory.devices import Copy, Device, Frame
    from omnimodel.memory.store import ImageRef

_COPY_SECONDS = 120.0  # no image takes that long to copy
_SLOWEST_DISK_BYTES = 50_000_000  # a second, of an image that is read on the way
FREED_SECONDS = 15.0  # from a kill to the free frames


class Loads:
    """See the module. One image is copied at a time; the policy sees to that.

    Args:
        memory: of the device.
        everywhere: the loads of each device that an instance is on.
        worth: of an image by its digest; the least worth loses its frames first.
        worth_in_arena: the same in the arena, which other devices may share.
        relieve, vacate: asks for so many bytes of host, or device, memory; whether any are coming.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        everywhere: Callable[[Instance], Sequence[Loads]],
        worth: Callable[[str], float],
        worth_in_arena: Callable[[str], float],
        relieve: Callable[[int], bool],
        vacate: Callable[[int], bool],
    ) -> None:
        self.copying: str | None = None
        self.costs = WakeCosts()
        self.memory = memory
        self._everywhere = everywhere
        self._worth = worth
        self._worth_in_arena = worth_in_arena
        self._relieve = relieve
        self._vacate = vacate

    async def load(self, instance: Instance) -> bool:
        """WARM or FROZEN -> RESIDENT, or back; a process that does not map its frames is killed.

        Returns:
            Whether it is resident; if not, its process is at its end.

        Raises:
            OmniError: it cannot be loaded now; its process is where it was.
        """
        pool = self.memory.frames
        prepared, process = instance.prepared, instance.process
        assert prepared is not None
        image = prepared.image
        parts = [(each, each.working_bytes(instance)) for each in self._everywhere(instance)]
        instance.begin_wake()
        began = copy_seconds = 0.0
        copied_bytes = 0
        frames: tuple[Frame, ...] = ()
        mapping: asyncio.Task[None] | None = None  # by a process that waits for each byte before it reads it

        def begun(copy: Copy) -> None:
            nonlocal mapping
            if instance.fence is not None and instance.process is process:
                mapping = asyncio.create_task(self._map(instance, frames, 0.0, copy.fence_base))

        try:
            if image is not None:
                await self._room_on_host(image)
            for each, held_bytes in parts:
                await each.promise(instance, prepared.frame_count, max(0, instance.working_bytes - held_bytes))
            if image is None or not prepared.frame_count:
                for each, _ in parts:
                    await each.grant(instance)
            else:
                async with self.memory.arena.staged(image, self._worth_in_arena) as staged:
                    await self.make_room()
                    allocation = pool.take(instance.name, image.digest, self._worth)
                    frames, began = allocation.frames, time.perf_counter()
                    late_seconds = self._late_seconds(image)
                    copy_seconds = await pool.fill(allocation, staged, late_seconds, fence=instance.fence, begun=begun)
                copied_bytes = allocation.missing * self.memory.device.frame_bytes
                if self.memory.arena.holds(image.digest):
                    self.costs.note_copy(copied_bytes, copy_seconds)
        except (OmniError, OSError) as error:
            if instance.process is not process:  # it died meanwhile, and all is freed
                for each, _ in parts:
                    each.cancel(instance)
                return False
            if mapping is not None:  # what its streams wait for never comes: nothing of it may be answered
                if not await instance.kill(explained(instance, error)):
                    pool.quarantine(instance.name)
                return False
            pool.release(instance.name)
            for each, held_bytes in parts:
                each.cancel(instance, held_bytes)
            instance.wake_failed()
            raise explained(instance, error) from None
        except asyncio.CancelledError:
            if mapping is not None:
                mapping.cancel()
            raise
        finally:
            self.end_copying(instance)
            await asyncio.gather(*filter(None, [mapping]), return_exceptions=True)
            instance.proving = False
            self.drop_fence(instance)
        if instance.process is not process or process is None:  # it died while its image was copied
            self.free(instance)
            return False
        try:
            if mapping is None:
                await self._map(instance, frames, copy_seconds, None)
            else:
                mapping.result()
                instance.note_wake(time.perf_counter() - began)
        except OmniError as error:
            await instance.kill(error)
            if image is not None and error.reason is Reason.PROBE_FAILED:  # its copies in memory may be what is wrong
                pool.forget(image.digest)
                self.memory.arena.drop(image.digest)
            return False
        finally:
            instance.proving = False
        instance.history.note_copied(copied_bytes, copy_seconds)
        if frames and not proves_wakes(instance):
            self.costs.note_beyond(instance.history.last_wake_seconds - copy_seconds)
        return True

    async def _map(
        self, instance: Instance, frames: tuple[Frame, ...], copy_seconds: float, fence_base: int | None
    ) -> None:
        """Let the process map its frames, and prove that it can compute with what is in them; nobody is let in before.

        Raises:
            OmniError: it cannot; its process is to be killed.
        """
        if self.memory.device.on_host:
            self.memory.ledger.host.give_back(instance.name, Kind.PROCESS)
        proves, measures = proves_wakes(instance), servers.serves(instance, self.memory)
        instance.proving, slept, process = proves or measures, instance.rest.asleep, instance.process
        try:
            await instance.wake(frames, copy_seconds, fence_base)
            if process is not None and measures:
                await servers.check_woken(instance, process, [each.memory for each in self._everywhere(instance)])
            if proves:
                await prove(instance)
        except OmniError as error:
            if slept:
                instance.rest.sleepless = f"after its sleep {error.problem}"
            raise

    async def _room_on_host(self, image: ImageRef) -> None:
        """Have warm processes give way to an image that is to be woken; the arena says so when they cannot."""
        deadline = time.monotonic() + FREED_SECONDS
        while (short_bytes := self.memory.arena.short_bytes(image)) and time.monotonic() < deadline:
            if not self._relieve(short_bytes):
                return
            await asyncio.sleep(0.01)

    def working_bytes(self, instance: Instance) -> int:
        """What an instance holds of this device as working memory."""
        return self.memory.ledger.device.held_bytes(instance.name, Kind.WORKING)

    async def grant(self, instance: Instance) -> None:
        """Turn what was promised to an instance without frames into its own.

        Raises:
            LedgerError: it is not there; its server would find that out by failing, and nobody could say why.
        """
        await self.make_room()
        promise = self.memory.ledger.device.promised(instance.name)
        if promise is not None and not self.memory.device.on_host:
            await asyncio.to_thread(check_free, self.memory.device, promise.working_bytes)
        self.memory.ledger.device.grant(instance.name)

    def cancel(self, instance: Instance, working_bytes: int | None = None) -> None:
        """Take back what was promised for a wake, and what was granted beyond `working_bytes`."""
        account = self.memory.ledger.device
        account.cancel(instance.name)
        if working_bytes is not None:
            account.give_back(instance.name, Kind.WORKING, self.working_bytes(instance) - working_bytes)

    async def promise(self, instance: Instance, frame_count: int, working_bytes: int) -> None:
        """Have the bytes of a wake set aside. Victims were told to leave, but one that is killed takes a moment.

        Raises:
            LedgerError: they did not come free.
        """
        account, deadline = self.memory.ledger.device, time.monotonic() + FREED_SECONDS
        while True:
            try:
                account.promise(instance.name, frame_count, working_bytes)
                return
            except LedgerError:
                short_bytes = frame_count * account.frame_bytes + working_bytes - account.free_bytes
                if not self._vacate(short_bytes) and time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.01)

    async def make_room(self) -> None:
        """Bring frames into line with what is promised, until they are: others may be seen to hold more meanwhile.

        Raises:
            LedgerError: the device does not have the memory.
        """
        deadline = time.monotonic() + FREED_SECONDS
        while True:
            await self.memory.frames.make_room(self._worth)
            if not self.memory.ledger.device.surplus_frames() or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)

    def _late_seconds(self, image: ImageRef) -> float:
        """After which a copy of an image that is staged counts as failed."""
        from_disk = not self.memory.arena.holds(image.digest)
        return _COPY_SECONDS + (image.stored_bytes / _SLOWEST_DISK_BYTES if from_disk else 0.0)

    def free(self, instance: Instance) -> None:
        """Free what an instance held whose process is gone, on all its devices."""
        for each in self._everywhere(instance):
            each.memory.frames.recover(instance.name)
            each.memory.frames.release(instance.name)
            each.memory.ledger.forget(instance.name)
        self.drop_fence(instance)

    def drop_fence(self, instance: Instance) -> None:
        """Let go of the fence of a process that is gone, once no copy writes it any more."""
        if instance.fence is not None and instance.process is None and not self.memory.frames.filling(instance.name):
            instance.fence.close()
            instance.fence = None

    def end_copying(self, instance: Instance) -> None:
        """Let the next image be copied."""
        if self.copying == instance.name:
            self.copying = None


def check_free(device: Device, needed_bytes: int) -> None:
    """See that a device has memory that the ledger says is free.

    Raises:
        LedgerError: somebody else has it; naming both numbers.
    """
    free_bytes = device.free_bytes()
    if free_bytes < needed_bytes:
        problem = f"{bytes_text(needed_bytes)} of {device.name} are needed, it has {bytes_text(free_bytes)} free"
        raise LedgerError(f"device {device.name}", problem, CURES[Reason.DEVICE_FULL], reason=Reason.DEVICE_FULL)


def explained(instance: Instance, error: Exception) -> OmniError:
    """What broke a move off, as a person is told."""
    if isinstance(error, OmniError):
        return error
    if not isinstance(error, TimeoutError):
        return OmniError(
            instance.subject,
            f"a move of it broke off: {type(error).__name__}: {error}",
            "see the log of the agent",
            reason=Reason.INTERNAL,
        )
    return OmniError(
        instance.subject,
        "its image was not copied to the device in time",
        "see whether the machine is overloaded or its disk is failing",
        reason=Reason.LOAD_TIMEOUT,
    )
