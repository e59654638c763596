"""Work that nobody waits for any more: its deadline has passed, or its client has left.

Most of it stops by itself. A function that computes cannot be stopped from outside, so a process that computes on gets
no new requests, which are held meanwhile; and when it does not end in time and nobody else is in it, it is ended. A
new one is there in less time than a model takes that never returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from omnimodel.errors import OmniError
from omnimodel.protocol.process import Ping

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.process import ModelProcess

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_PING_SECONDS = 2.0


async def until_stopped(instance: Instance, process: ModelProcess) -> None:
    """Return when the process computes for nobody but its clients, or is gone.

    Args:
        instance: whose process it is.
        process: that did not finish an answer.
    """
    began = time.monotonic()
    while instance.process is process and instance.resident and not instance.leaving:
        if not await _computes_for_nobody(instance, process):
            return
        if time.monotonic() - began >= GRACE_SECONDS and not instance.line.in_flight and instance.resident:
            seconds = time.monotonic() - began
            log.warning("ended_abandoned model=%s seconds=%.1f", instance.name, seconds)
            instance.message = f"its process was ended: it computed on for {seconds:.0f} s for nobody"
            await instance.kill()
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def _computes_for_nobody(instance: Instance, process: ModelProcess) -> bool:
    try:
        reply = await process.command(Ping(), (), _PING_SECONDS)
    except OmniError:
        return True
    # Until it has seen that the connection is closed, it has more requests than we know of.
    return bool(reply.values.get("abandoned")) or reply.number("inFlight") > instance.line.in_flight
