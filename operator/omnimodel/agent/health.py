"""Watches the GPUs of an agent: one that can do nothing any more is given up, and its models go to the others.

Either the driver's management library tells a fault, or the agent's own context on the GPU answers with an error for
good, or the GPU does not answer at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnimodel.errors import OmniError
from omnimodel.memory.devices.cuda_driver import bus_id, device_uuid, is_mig_instance
from omnimodel.memory.devices.cuda_health import Faults
from omnimodel.memory.devices.cuda_mig import instance_of

if TYPE_CHECKING:
    from omnimodel.agent.devices import Devices

log = logging.getLogger(__name__)

_SECONDS = 1.0  # between two looks
_ANSWER_SECONDS = 60.0  # registering memory may hold the driver for some


class Health:
    """See the module.

    Args:
        devices: that are watched.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._faults: Faults | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name="health")

    async def close(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            self._faults = await asyncio.to_thread(self._open)
        except OmniError as error:
            log.warning("faults_not_told error=%r", str(error))
        while True:
            for name, problem in await self._found():
                await self._devices.lose(name, problem)

    def _open(self) -> Faults:
        names = list(self._devices.brokers)
        instances = {name: instance_of(name, device_uuid(name))[0] for name in names if is_mig_instance(name)}
        return Faults({name: bus_id(name) for name in names}, instances)

    async def _found(self) -> Sequence[tuple[str, str]]:
        """Faults of this second."""
        told: Sequence[tuple[str, str]] = ()
        try:
            if self._faults is None:
                await asyncio.sleep(_SECONDS)
            else:
                told = await asyncio.to_thread(self._faults.wait, _SECONDS)
        except OmniError as error:
            log.warning("faults_not_told error=%r", str(error))
            self._faults = None
        asked = sorted(self._devices.watched)
        problems = await asyncio.gather(*(self._ask(name) for name in asked))
        return [*told, *((name, problem) for name, problem in zip(asked, problems, strict=True) if problem)]

    async def _ask(self, name: str) -> str:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await asyncio.to_thread(self._devices.brokers[name].memory.device.fault)
        except TimeoutError:
            return f"it has not answered for {_ANSWER_SECONDS:g} s"
