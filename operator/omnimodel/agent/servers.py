"""Servers of foreign engines on a device with memory of its own: what they hold there is what the driver says.

A server that can sleep is put to sleep, and stopped when that does not give the memory back. What stays of one that
sleeps is in the ledger, and goes when a wake needs the room: it is parked (`parking`), and stopped where that cannot
be. All of that holds for each device of a server that spreads its model over several.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omnimodel.agent.instance import MARGIN_SECONDS, Instance
from omnimodel.errors import OmniError, ProcessError, Reason
from omnimodel.memory.ledger import Kind
from omnimodel.placement.state import bytes_text
from omnimodel.protocol.process import SLEEP_SECONDS, Evict

if TYPE_CHECKING:
    from pathlib import Path

    from omnimodel.agent.moves import DeviceMemory
    from omnimodel.agent.process import ModelProcess

log = logging.getLogger(__name__)

SLEEPERS = frozenset({"vllm", "sglang"})
ASLEEP_SHARE = 0.25  # of what it held awake may stay of one that sleeps: its context, graphs, buffers of libraries
_SETTLED_SECONDS = 5.0  # from an answer to the driver's word: some answer before they have let go
_LOOK_SECONDS = 0.02


def serves(instance: Instance, memory: DeviceMemory) -> bool:
    """Whether what it has on the device is a server's, and no frames."""
    return instance.foreign and not memory.device.on_host


async def leave(instance: Instance, memories: Sequence[DeviceMemory], process: ModelProcess) -> str:
    """Have a server off its devices: asleep, or stopped; what stays on each is `instance.rest.asleep_bytes`.

    Returns:
        What has become of the server.

    Raises:
        OmniError: it has not left; its process is to be killed.
    """
    seconds = instance.limits.drain_seconds + MARGIN_SECONDS
    if held := await _held_before_sleep(instance, process, memories):
        reply = await process.command(Evict(sleep=True), (), seconds + SLEEP_SECONDS)
        most = {name: int(held_bytes * ASLEEP_SHARE) for name, held_bytes in held.items()}
        left = await _settled(instance, process, memories, most)
        kept = next((name for name in left if left[name] > most[name]), None)
        if reply.values.get("asleep") is not True:
            instance.rest.sleepless = "it did not fall asleep"
        elif kept is not None:
            instance.rest.sleepless = f"it kept {bytes_text(left[kept])} of {bytes_text(held[kept])} in its sleep"
        else:
            instance.rest.asleep, instance.rest.asleep_bytes = True, left
            return "its server sleeps"
    await process.command(Evict(), (), seconds)
    left = await _settled(instance, process, memories, {})
    if left_bytes := sum(left.values()):
        raise ProcessError(
            instance.subject,
            f"{bytes_text(left_bytes)} of the device are still its own after its server was stopped",
            "see its log for what it leaves in the background",
            reason=Reason.EVICT_TIMEOUT,
        )
    why = _why_sleepless(instance)
    return f"its server was stopped: {why}" if why else "its server was stopped"


def _why_sleepless(instance: Instance) -> str:
    """Why a server is stopped where others sleep: one whose wake nobody could check is not put to sleep.

    Some wake with other weights and call themselves healthy. Source: vllm-project/vllm#29341.
    """
    if instance.rest.sleepless or instance.spec["engine"] not in SLEEPERS or instance.spec["probe"]:
        return instance.rest.sleepless
    return "without a probe in its manifest nobody could tell whether it wakes as it was"


async def check_woken(instance: Instance, process: ModelProcess, memories: Sequence[DeviceMemory]) -> None:
    """Hold a server that has just been woken to what its manifest says it takes, where the driver says what it has.

    Raises:
        ProcessError: it has more of a device than that, which nobody has set aside.
    """
    granted_bytes = instance.working_bytes
    for name, held_bytes in (await _told(instance, process, memories)).items():
        if held_bytes > granted_bytes:
            where = "the device" if len(memories) == 1 else name
            raise ProcessError(
                instance.subject,
                f"its server holds {bytes_text(held_bytes)} of {where}, of {bytes_text(granted_bytes)} granted",
                "raise resources.deviceMemory, or have its engine take less",
                reason=Reason.OUT_OF_MEMORY,
            )


async def _held_before_sleep(
    instance: Instance, process: ModelProcess, memories: Sequence[DeviceMemory]
) -> dict[str, int]:
    """What a server has on each device that can be put to sleep; nothing for one that cannot.

    What it says of its sleep can be checked then, and the host has room for its weights, which is its own until its
    move is over.
    """
    if instance.spec["engine"] not in SLEEPERS or _why_sleepless(instance):
        return {}
    held = await _told(instance, process, memories)
    if len(held) < len(memories) or not all(held.values()):  # a driver that does not see it awake cannot say it sleeps
        return {}
    source = instance.prepared.source if instance.prepared else None
    if source is None:
        return {}
    weights_bytes = await asyncio.to_thread(weights_of, source)
    host = memories[0].ledger.host
    if host.free_bytes < weights_bytes:
        return {}
    host.hold(instance.name, Kind.PROMISE, weights_bytes)
    return held


def weights_of(source: Path) -> int:
    """What a server moves to host memory when it sleeps, by the files that it was loaded from."""
    files = source.rglob("*") if source.is_dir() else (source,)
    return sum(file.stat().st_size for file in files if file.is_file())


async def _settled(
    instance: Instance, process: ModelProcess, memories: Sequence[DeviceMemory], most: Mapping[str, int]
) -> dict[str, int]:
    """What a process and its children have on each device, once it is as little as that, or after a while.

    Raises:
        OmniError: the driver has not said, to the end.
    """
    deadline = time.monotonic() + _SETTLED_SECONDS
    while True:
        last = time.monotonic() > deadline
        try:
            left = await _bytes(instance, process, memories)
        except OmniError:
            if last:
                raise
        else:
            if last or all(left_bytes <= most.get(name, 0) for name, left_bytes in left.items()):
                return left
        await asyncio.sleep(_LOOK_SECONDS)


async def _told(instance: Instance, process: ModelProcess, memories: Sequence[DeviceMemory]) -> dict[str, int]:
    """The same as `_bytes`; nothing when the driver does not answer."""
    try:
        return await _bytes(instance, process, memories)
    except OmniError as error:
        log.warning("device_not_measured model=%s problem=%r", instance.name, str(error))
        return {}


async def _bytes(instance: Instance, process: ModelProcess, memories: Sequence[DeviceMemory]) -> dict[str, int]:
    """What the driver says that a process and its children have on each device that it tells of.

    Raises:
        OmniError: it does not answer.
    """

    def measure() -> dict[str, int]:
        meters = {memory.device.name: memory.device.meter for memory in memories}
        told = {name: meter.process_bytes() for name, meter in meters.items() if meter is not None}
        pids = process.pids()
        holders.update(pid for held in told.values() for pid in pids & held.keys())
        return {name: sum(held.get(pid, 0) for pid in pids) for name, held in told.items()}

    holders: set[int] = set()
    found = await asyncio.to_thread(measure)
    if instance.process is process:
        instance.rest.pids |= holders
    return found
