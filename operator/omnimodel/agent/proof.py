"""The known answer: what a model is asked before it serves, and after each wake where its manifest says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp

from omnimodel.errors import ProcessError, Reason
from omnimodel.protocol import probe as probes

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance

_SECONDS = 120.0
_SEARCH_SECONDS = 10.0
_SEARCHED_CHARACTERS = 1 << 20
_SEARCH = "import json, re, sys; p, t = json.load(sys.stdin); sys.stdout.write('found' if re.search(p, t) else 'not')"


def proves_wakes(instance: Instance) -> bool:
    """Whether it is asked again after a wake. Before its first answer was checked somebody asks it anyway.

    A server that has slept is always asked: some answer gibberish then, and call themselves healthy.
    """
    probe = instance.spec["probe"]
    return bool(probe and (probe.get("afterWake") or instance.rest.asleep) and instance.verified)


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
            body = await _read(instance, response)
    except TimeoutError:
        raise ProcessError(
            instance.subject, "its probe was not answered in time", "raise probe.timeout", reason=Reason.PROBE_FAILED
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise await instance.door.failure_of(process, error) from error
    wrong = await asyncio.to_thread(
        probes.failures, probe, response.status, response.headers, body, search=search_within_limits
    )
    if wrong:
        raise ProcessError(
            instance.subject,
            f"its probe got a wrong answer: {'; '.join(wrong)}",
            "correct the model, or the probe's expectation",
            reason=Reason.PROBE_FAILED,
        )


async def _read(instance: Instance, response: aiohttp.ClientResponse) -> bytes:
    """The whole answer, if it is not longer than answers may be."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > instance.limits.response_bytes:
            raise ProcessError(
                instance.subject,
                f"its probe got an answer of more than {instance.limits.response_bytes} bytes",
                "correct the model, or raise limits.responseBytes",
                reason=Reason.PROBE_FAILED,
            )
    return bytes(body)


def search_within_limits(pattern: str, text: str) -> bool:
    """Whether a stranger's expression is found in a stranger's text, in a process of its own.

    An expression may take for ever, and a thread of the agent that searches would let no other run.
    """
    question = json.dumps([pattern, text[:_SEARCHED_CHARACTERS]])
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=question,
            capture_output=True,
            text=True,
            timeout=_SEARCH_SECONDS,
            check=False,
        )
        return done.stdout == "found"
    return False
