"""Device memory in frames: one protocol, two backends (`host`, `cuda`).

The agent's side is a `Device`: it creates frames once, copies images into them and recycles them. The side of a
model's process is a `Window`: a reserved range of addresses that never changes, into which the frames are mapped
read-only at a wake, and out of which they are unmapped at an evict; tensors are bound to the window once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from omnimodel.errors import OmniError, ProcessError

if TYPE_CHECKING:
    import torch


@dataclass
class Frame:
    """One frame of a device, owned by the agent.

    Args:
        id: stays the same while the frame lives.
        descriptor: what a model's process is sent; it can map the frame read-only through it and no more.
        handle: the backend's own (an address, a driver handle).
    """

    id: int
    descriptor: int
    handle: Any


class Copy(Protocol):
    """A copy of an image into frames that is under way."""

    @property
    def fence_base(self) -> int | None:
        """What the fence says when nothing has arrived; None where copies have none."""

    def wait(self, timeout_seconds: float | None = None) -> float:
        """Wait for its end; seconds that the copy took. Raises ImageError when it failed, TimeoutError when late."""

    def done_bytes(self) -> int:
        """Bytes that have arrived so far, from the start of the image on."""


class Fence(Protocol):
    """See `Device.fence`; it is a process's for life."""

    descriptor: int  # what the process is sent

    def close(self) -> None:
        """Let go of it; no copy may be under way."""


class RestoreFailedError(ProcessError):
    """A process that cannot be brought back: kill it and start it cold."""


class Meter(Protocol):
    """The driver's own word on a device with memory of its own. Calls block; OmniError when it does not answer."""

    def process_bytes(self) -> dict[int, int]:
        """Bytes of each process on the device, by its pid as this process sees it; who has none is not there."""

    def watts(self) -> float | None:
        """Power that the device draws now; None where it cannot tell."""

    def joules(self) -> float | None:
        """Energy that the device has used since the driver was loaded; None where it cannot tell."""


class Parking(Protocol):
    """Takes all that a process has on a device to host memory, and brings it back. Calls block, one at a time."""

    def park(self, pid: int, *, frames_mapped: bool) -> float:
        """Take it; the process stands still as soon as it uses the device. Seconds that it took.

        Raises:
            RestoreFailedError: it failed half-way, and the process is to be killed.
            OmniError: it is refused, and the process runs on.
        """

    def unpark(self, pid: int) -> float:
        """Bring it back; its bytes must be free before. Seconds that it took.

        Raises:
            RestoreFailedError: it cannot be brought back, and the process is to be killed.
        """


class Device(Protocol):
    """The agent's side. Calls block: the agent makes them in a thread. Every call may be made from any thread.

    Args:
        name: `host`, `cuda:0`.
        frame_bytes: size of a frame.
        on_host: whether its memory is the machine's, so that what a process holds in private counts on it.
        page_bytes: what an image takes of it is a multiple of this.
        stream_bytes: what an image takes of it that is read while it is copied; 0 where images must be there whole.
        context_bytes: what a process is expected to hold on it beside frames and working memory.
        meter: None where its memory is the machine's, or where the driver does not tell; `unmetered` says why then.
        parking: None where processes cannot be parked.
    """

    name: str
    frame_bytes: int
    on_host: bool
    page_bytes: int
    stream_bytes: int
    context_bytes: int
    meter: Meter | None
    unmetered: str
    parking: Parking | None

    @property
    def pinned_bytes(self) -> int:
        """Host memory that it takes for images, and nobody else can have; 0 when it takes none.

        It becomes less when not all of it can be had.
        """

    @property
    def pinning(self) -> str:
        """How far it is with that, or why it became less, in words; empty when there is nothing to say."""

    def create(self, count: int) -> list[Frame]:
        """Create frames. Raises LedgerError when the device has no room; then none was created."""

    def adopt(self, descriptors: Mapping[int, int]) -> list[Frame]:
        """Take over frames of an agent that is gone, with what they hold.

        Args:
            descriptors: by the frames' ids; they are the device's from then on.

        Raises:
            LedgerError: they are no frames of this device; then none was taken over.
        """

    def destroy(self, frames: Sequence[Frame]) -> None:
        """Give frames back to the device for good."""

    def stage(self, path: str, image_bytes: int, *, whole: bool = True) -> Any:
        """Bring an image file into the arena (mapped, or read into pinned memory): a handle for `copy`.

        Args:
            path: of the file.
            image_bytes: of the image.
            whole: False: only make room for parts of it; each copy reads the file. One copy at a time.
        """

    def unstage(self, staged: Any) -> None:
        """Take an image out of the arena."""

    def decodes(self) -> bool:
        """Whether images may be packed, see `codec_file`. It may take its time at the first call."""

    def fence(self) -> Fence | None:
        """What tells one process how far copies into its frames are; None: it maps frames when the copy is over."""

    def copy(
        self, staged: Any, frames: Sequence[Frame], *, valid: Sequence[bool] = (), fence: Any | None = None
    ) -> Copy:
        """Start copying an image into frames, in order; the rest of the last frame is zeroed.

        Args:
            staged: from `stage`.
            frames: as many as the image needs.
            valid: per frame, whether it already holds its part of this image (partial residency); default: none does.
            fence: from `fence`, of the process that will have the frames.
        """

    def free_bytes(self) -> int:
        """Bytes the device itself says are free (driver, or MemAvailable)."""

    def fault(self) -> str:
        """What is wrong with it for good, so that nothing can be copied to it any more; empty when nothing is."""

    def close(self) -> None:
        """Destroy everything."""


class Window(Protocol):
    """A model process's side: a reserved address range of `frames` x `frame_bytes`."""

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """A flat uint8 tensor over `size` bytes at `offset`; it must not be touched while nothing is mapped."""

    def follow(self, descriptor: int) -> None:
        """Use the fence of the agent from the next wake on; closes the descriptor."""

    def map(self, descriptors: Sequence[int], *, fence_base: int | None = None) -> None:
        """Map frames read-only over the whole range; closes the descriptors.

        Args:
            descriptors: one a frame, in order.
            fence_base: of the copy that is still under way; None when it is over.
        """

    def wait(self, end_offset: int) -> None:
        """Let the device's current stream wait until the image has arrived up to `end_offset`."""

    def settle(self) -> None:
        """Wait in this thread until the whole image has arrived, and may be read on any stream."""

    def unmap(self) -> None:
        """Fence, then take the frames out of the range."""


def open_device(
    name: str, frame_bytes: int, *, arena_bytes: int | None = None, told: Callable[[], None] = lambda: None
) -> Device:
    """Open the agent's side of a device.

    Args:
        name: `host`, `cuda` or `cuda:0`.
        frame_bytes: size of a frame, a multiple of 2 MiB.
        arena_bytes: host memory to pin for images; None: half of what is available. A host device pins none.
        told: called, from any thread, when `pinning` says something else.

    Raises:
        OmniError: there is no such device here.
    """
    if name == "host":
        from omnimodel.memory.devices.host import HostDevice

        return HostDevice(frame_bytes)
    if name.partition(":")[0] == "cuda":
        from omnimodel.memory.devices.cuda import CudaDevice

        return CudaDevice(name, frame_bytes, arena_bytes, told=told)
    raise OmniError(f"device {name}", "there is no such device", "use host or cuda:0")


def open_devices(
    names: Sequence[str],
    frame_bytes: int,
    *,
    arena_bytes: int | None = None,
    told: Callable[[], None] = lambda: None,
) -> list[Device]:
    """Open the agent's side of several devices; what the first pins for images, all copy from.

    Args:
        names: `host`, or as many of `cuda:0`, `cuda:1` as there are.
        frame_bytes, arena_bytes, told: see `open_device`.

    Raises:
        OmniError: one of them is not here; then none is open.
    """
    opened = [open_device(names[0], frame_bytes, arena_bytes=arena_bytes, told=told)]
    try:
        for name in names[1:]:
            from omnimodel.memory.devices.cuda import CudaDevice

            first = opened[0]
            assert isinstance(first, CudaDevice), f"{first.name} is the only device of its kind"
            opened.append(CudaDevice(name, frame_bytes, arena=first.arena))
    except BaseException:
        for device in reversed(opened):
            device.close()
        raise
    return opened


def open_window(device: str, frames: int, frame_bytes: int) -> Window:
    """Reserve the addresses of a model's process.

    Args:
        device: the name of the agent's device.
        frames: as many as the image needs.
        frame_bytes: size of a frame.
    """
    if device == "host":
        from omnimodel.memory.devices.host_window import HostWindow

        return HostWindow(frames, frame_bytes)
    if device.partition(":")[0] == "cuda":
        from omnimodel.memory.devices.cuda_window import CudaWindow

        return CudaWindow(device, frames, frame_bytes)
    raise OmniError(f"device {device}", "there is no such device", "use host or cuda:0")
