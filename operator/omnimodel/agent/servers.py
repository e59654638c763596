"""Servers of foreign engines on a device with memory of its own: what they hold there is what the driver says.

A server that can sleep is put to sleep, and stopped when that does not give the memory back. What stays of one that
sleeps is in the ledger, and goes when a wake needs the room: the sleeper that is missed least is stopped.

A process tree is not parked by the driver's checkpoint: of servers with several processes it has not come back, or
hung. Source: NVIDIA/cuda-checkpoint#27, #45, #47.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from omnimodel.agent.instance import Instance, State
from omnimodel.errors import ProcessError, Reason
from omnimodel.placement.state import bytes_text
from omnimodel.protocol.process import SLEEP_SECONDS, Evict

if TYPE_CHECKING:
    from pathlib import Path

    from omnimodel.agent.moves import DeviceMemory
    from omnimodel.agent.process import ModelProcess

SLEEPERS = frozenset({"vllm", "sglang"})
ASLEEP_SHARE = 0.25  # of what it held awake may stay of one that sleeps: its context, graphs, buffers of libraries
_SETTLED_SECONDS = 5.0  # from an answer to the driver's word: some answer before they have let go
_LOOK_SECONDS = 0.02
_MARGIN_SECONDS = 5.0  # beyond what a server is given, so that its own word on why it was late arrives


def serves(instance: Instance, memory: DeviceMemory) -> bool:
    """Whether what it has on the device is a server's, and no frames."""
    return instance.foreign and not memory.device.on_host


async def leave(instance: Instance, memory: DeviceMemory, process: ModelProcess) -> str:
    """Have a server off the device: asleep, or stopped; what stays is `instance.asleep_bytes`.

    Returns:
        What has become of the server.

    Raises:
        OmniError: it has not left; its process is to be killed.
    """
    seconds = instance.limits.drain_seconds + _MARGIN_SECONDS
    if await _may_sleep(instance, process, memory):
        held_bytes = await _bytes(process, memory)
        reply = await process.command(Evict(sleep=True), (), seconds + SLEEP_SECONDS)
        most_bytes = int(held_bytes * ASLEEP_SHARE)
        left_bytes = await _settled(process, memory, most_bytes)
        if reply.values.get("asleep") is not True:
            instance.sleepless = "it did not fall asleep"
        elif left_bytes > most_bytes:
            instance.sleepless = f"it kept {bytes_text(left_bytes)} of {bytes_text(held_bytes)} in its sleep"
        else:
            instance.asleep, instance.asleep_bytes = True, left_bytes
            return "its server sleeps"
    await process.command(Evict(), (), seconds)
    if memory.device.meter is not None and (left_bytes := await _settled(process, memory, 0)):
        raise ProcessError(
            instance.subject,
            f"{bytes_text(left_bytes)} of the device are still its own after its server was stopped",
            "see its log for what it leaves in the background",
            reason=Reason.EVICT_TIMEOUT,
        )
    return f"its server was stopped: {instance.sleepless}" if instance.sleepless else "its server was stopped"


async def check_woken(instance: Instance, process: ModelProcess, memory: DeviceMemory) -> None:
    """Hold a server that has just been woken to what its manifest says it takes.

    Raises:
        ProcessError: it has more than that, which nobody has set aside.
    """
    if memory.device.meter is None:
        return
    held_bytes = await _bytes(process, memory)
    if held_bytes > instance.working_bytes:
        raise ProcessError(
            instance.subject,
            f"its server holds {bytes_text(held_bytes)} of the device, of {bytes_text(instance.working_bytes)} granted",
            "raise resources.deviceMemory, or have its engine take less",
            reason=Reason.OUT_OF_MEMORY,
        )


def sleepers(instances: Iterable[Instance], busy: Callable[[str], bool], short_bytes: int) -> list[Instance]:
    """Who has to be stopped for so many bytes to come free: those that sleep, the least missed first.

    Args:
        instances: all there are.
        busy: whether one, by its name, is in a move.
        short_bytes: that are missing.
    """
    asleep = [instance for instance in instances if instance.asleep and instance.asleep_bytes]
    short_bytes -= sum(instance.asleep_bytes for instance in asleep if busy(instance.name) and _going(instance))
    resting = [instance for instance in asleep if instance.state is State.WARM and not busy(instance.name)]
    chosen = []
    for instance in sorted(resting, key=lambda i: (i.line.busy, i.residency.priority, i.line.last_arrival_seconds)):
        if short_bytes <= 0:
            break
        chosen.append(instance)
        short_bytes -= instance.asleep_bytes
    return chosen


def _going(instance: Instance) -> bool:
    return instance.state is State.STOPPING


async def _may_sleep(instance: Instance, process: ModelProcess, memory: DeviceMemory) -> bool:
    """Whether a server can be put to sleep: what it says can be checked, and the host has room for its weights."""
    if instance.spec["engine"] not in SLEEPERS or instance.sleepless or memory.device.meter is None:
        return False
    source = instance.prepared.source if instance.prepared else None
    if source is None or not await _bytes(process, memory):  # a driver that does not see it awake cannot say it sleeps
        return False
    return memory.ledger.host.free_bytes >= await asyncio.to_thread(_weights_bytes, source)


def _weights_bytes(source: Path) -> int:
    """What a server moves to host memory when it sleeps, by the files that it was loaded from."""
    files = source.rglob("*") if source.is_dir() else (source,)
    return sum(file.stat().st_size for file in files if file.is_file())


async def _settled(process: ModelProcess, memory: DeviceMemory, most_bytes: int) -> int:
    """What a process and its children have on the device, once it is as little as that, or after a while."""
    deadline = time.monotonic() + _SETTLED_SECONDS
    while True:
        left_bytes = await _bytes(process, memory)
        if left_bytes <= most_bytes or time.monotonic() > deadline:
            return left_bytes
        await asyncio.sleep(_LOOK_SECONDS)


async def _bytes(process: ModelProcess, memory: DeviceMemory) -> int:
    """What the driver says that a process and its children have on the device."""
    meter = memory.device.meter
    assert meter is not None

    def measure() -> int:
        held = meter.process_bytes()
        return sum(held.get(pid, 0) for pid in _tree(process))

    return await asyncio.to_thread(measure)


def _tree(process: ModelProcess) -> set[int]:
    """The pids of a process and of all that it has started, which are in its group where it has one."""
    pids = {process.pid, *process.group.pids()}
    with suppress(psutil.NoSuchProcess):
        pids.update(child.pid for child in psutil.Process(process.pid).children(recursive=True))
    return pids
