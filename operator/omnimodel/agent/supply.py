"""What an OmniPool means on this machine: in bytes, and in isolation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from omnimodel.agent.forms import Forms
from omnimodel.api import OmniPool
from omnimodel.errors import IsolationError, OmniError
from omnimodel.isolation import Level, Reached
from omnimodel.memory.devices.available import available_bytes, total_bytes
from omnimodel.memory.devices.cuda_driver import available, device_bytes, device_count
from omnimodel.placement.state import bytes_text
from omnimodel.quantity import AUTO, parse_bytes, parse_share

HOST_FRAME_BYTES = 4 << 20  # on a CPU machine most models are small, and a frame is the least a model takes
AUTO_DEVICE_SHARE = 0.5  # of the memory that is available when the pool is first served
AUTO_HOST_SHARE = 0.5
AUTO_CUDA_SHARE = 0.9  # of a GPU; the agent's own context and what the driver keeps are beside the budget
CUDA_DTYPE = "bfloat16"  # what dtype `auto` is there
ARENA_SHARE = 0.75  # of hostMemory that is pinned for images; processes and zygotes have the rest


@dataclass(frozen=True)
class Machine:
    """The memory of this machine, or of the control group that the agent is in, at one moment."""

    total_bytes: int
    available_bytes: int

    @classmethod
    def now(cls) -> Machine:
        """Measure it."""
        return cls(total_bytes(), available_bytes())


@dataclass(frozen=True)
class Supply:
    """A pool in numbers.

    Args:
        budgets: of each device (`host`, or `cuda:0` and those after it): frames, working memory of resident models
            and, on a GPU, contexts of processes.
        host_bytes: arena and all other processes.
        arena_bytes: what of that the device pins for images; 0 when it pins nothing.
        threads: of one forward pass, where a manifest leaves it open.
        auto_dtype: what dtype `auto` of a manifest is; as the processor computes when it is empty.
    """

    budgets: Mapping[str, int]
    frame_bytes: int
    host_bytes: int
    arena_bytes: int
    threads: int
    auto_dtype: str = ""

    @property
    def device(self) -> str:
        """What a process sees, whichever it is of several: `host` or `cuda:0`."""
        return next(iter(self.budgets))

    @property
    def budget_bytes(self) -> int:
        """Of all devices."""
        return sum(self.budgets.values())

    @property
    def forms(self) -> Forms:
        """In which images are looked for, the best first, where the device can decode what is packed."""
        return Forms(self.auto_dtype, 0 if self.device == "host" else self.frame_bytes)


def supply(pool: OmniPool, machine: Machine | None = None) -> Supply:
    """Resolve a pool on this machine.

    Args:
        pool: what is wished.
        machine: as it was before the pool held any of its memory; None for now.

    Raises:
        OmniError: it asks for a device, or for more memory, than is here.
    """
    wish = pool.spec.device
    machine = machine or Machine.now()
    auto_host_bytes = int(machine.available_bytes * AUTO_HOST_SHARE)
    host_bytes = _bytes(pool, "hostMemory", pool.spec.host_memory, machine.total_bytes, auto_host_bytes)
    devices = _devices(pool)
    if devices == ["host"]:
        frame_bytes, arena_bytes, auto_dtype = HOST_FRAME_BYTES, 0, ""
        auto_bytes = int(machine.available_bytes * AUTO_DEVICE_SHARE)
        sizes = {"host": (machine.total_bytes, auto_bytes)}
    else:
        from omnimodel.memory.devices.cuda import FRAME_BYTES

        frame_bytes, arena_bytes, auto_dtype = FRAME_BYTES, int(host_bytes * ARENA_SHARE), CUDA_DTYPE
        whole = {name: device_bytes(name) for name in devices}
        sizes = {name: (size, int(size * AUTO_CUDA_SHARE)) for name, size in whole.items()}
    if wish.frame_size is not None:
        frame_bytes = parse_bytes(wish.frame_size)
    budgets = {
        name: _bytes(pool, "device.memory", wish.memory, *size) // frame_bytes * frame_bytes
        for name, size in sizes.items()
    }
    return Supply(budgets, frame_bytes, host_bytes, arena_bytes, auto_threads(), auto_dtype)


def auto_threads() -> int:
    """Threads of one forward pass, where a manifest leaves it open."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def forms_elsewhere(pool: OmniPool, auto_dtype: str = "") -> Forms:
    """In which forms images are published for a pool that may be on another machine, by what its document says.

    Args:
        pool: that will serve them.
        auto_dtype: that `auto` stands for there; empty for the pool's own, or what suits this machine.
    """
    if pool.spec.device.type != "cuda":
        return Forms(auto_dtype)
    from omnimodel.memory.devices.cuda import FRAME_BYTES
    from omnimodel.memory.packing import can_pack

    wish = pool.spec.device.frame_size
    frame_bytes = FRAME_BYTES if wish is None else parse_bytes(wish)
    return Forms(auto_dtype or CUDA_DTYPE, frame_bytes if can_pack(frame_bytes) else 0)


def _devices(pool: OmniPool) -> list[str]:
    """`host`, or GPUs where they are wished by their name: what has not run on hardware is nobody's default.

    Raises:
        OmniError: cuda is wished, and there is none.
    """
    wish = pool.spec.device
    if wish.type != "cuda":
        return ["host"]
    if available():
        return [f"cuda:{number}" for number in range(min(wish.count, device_count()))]
    raise OmniError(
        pool.subject,
        "spec.device.type: cuda is asked for, and this machine has no NVIDIA GPU that can be used",
        "install the NVIDIA driver and omnimodel[cuda], or write cpu, or auto",
    )


def too_weak(pool: OmniPool, reached: Reached) -> IsolationError | None:
    """What to say where this machine isolates less than the pool asks for; None where it does not."""
    minimum = Level(pool.spec.isolation.level if pool.spec.isolation else Level.PROCESS)
    if reached.level.strength >= minimum.strength:
        return None
    missing = "; ".join(reached.missing)
    return IsolationError(
        pool.subject,
        f"isolation.level {minimum} is asked for, this machine gives {reached.level} ({missing})",
        "allow a lower isolation.level, or give the agent the privileges that are missing",
    )


def _bytes(pool: OmniPool, field: str, value: int | str | None, whole_bytes: int, auto_bytes: int) -> int:
    if value is None or value == AUTO:
        return auto_bytes
    if isinstance(value, str) and value.endswith("%"):
        return int(whole_bytes * parse_share(value))
    if (wished_bytes := parse_bytes(value)) > whole_bytes:
        raise OmniError(
            pool.subject,
            f"spec.{field}: {value} is asked for, and there are {bytes_text(whole_bytes)}",
            "write less, a share such as 80%, or auto",
        )
    return wished_bytes
