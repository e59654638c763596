"""The known answer: what a model is asked before it serves, and after each wake where its manifest says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp

from omnimodel.errors import ProcessError, Reason
from omnimodel.protocol import probe as probes

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance

_SECONDS = 120.0


def proves_wakes(instance: Instance) -> bool:
    """Whether it is asked again after a wake. Before its first answer was checked somebody asks it anyway."""
    probe = instance.spec["probe"]
    return bool(probe and probe.get("afterWake") and instance.verified)


async def prove(instance: Instance) -> None:
    """Send a resident instance its probe and compare the answer with what is expected.

    Raises:
        ProcessError: it does not answer, or wrongly.
        DispatchError: its process broke the connection off.
    """
    probe = instance.spec["probe"]
    session, process = instance.session, instance.process
    if probe is None:
        return
    if session is None or process is None:
        raise ProcessError(instance.subject, "its process ended before its probe was sent")
    request = probes.request(probe)
    try:
        async with (
            asyncio.timeout(float(probe.get("timeoutSeconds") or _SECONDS)),
            session.request(
                request.method, f"http://model{request.path}", headers=request.headers, data=request.body
            ) as response,
        ):
            body = await response.read()
    except TimeoutError:
        raise ProcessError(
            instance.subject, "its probe was not answered in time", "raise probe.timeout", reason=Reason.PROBE_FAILED
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise await instance.door.failure_of(process, error) from error
    wrong = probes.failures(probe, response.status, response.headers, body)
    if wrong:
        raise ProcessError(
            instance.subject,
            f"its probe got a wrong answer: {'; '.join(wrong)}",
            "correct the model, or the probe's expectation",
            reason=Reason.PROBE_FAILED,
        )
