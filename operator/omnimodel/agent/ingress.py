"""Requests: held in order until their model is resident, then sent to its process; none ends without an answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import aiohttp

from omnimodel.errors import DispatchError, Reason
from omnimodel.protocol.dispatch import Estimate, Hold, InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.line import Waiter
    from omnimodel.agent.process import ModelProcess

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "date", "server"})


class Ingress:
    """Holds and forwards the requests of all models of an agent.

    Args:
        find: the instance that serves a model now, by name. Raises DispatchError when there is none.
    """

    def __init__(self, find: Callable[[str], Instance]) -> None:
        self._find = find
        self._closed = False

    def close(self) -> None:
        """Take no further requests, as the system is stopping; those that were taken go on."""
        self._closed = True

    def estimate(self, model: str) -> Estimate:
        """See `Backend.estimate`."""
        instance = self._find(model)
        return Estimate(len(instance.line.waiting) + 1, instance.door.expected_wake_seconds())

    @asynccontextmanager
    async def open(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        """See `Backend.open`."""
        instance = self._enter(request.model)
        own = instance.limits.deadline_seconds
        allowed = min(own, request.deadline_seconds) if request.deadline_seconds else own
        deadline = asyncio.get_running_loop().time() + allowed
        began = time.monotonic()
        background = request.priority == "background"
        waiter = instance.line.arrive(began, background=background)
        held = False
        while True:
            instance.door.admit()
            held = held or not waiter.admitted.done()
            try:
                await self._admission(waiter, instance, deadline, allowed)
                instance = waiter.line.instance
                hold = self._hold(instance, began, held=held)
                response = await self._send(instance, request, deadline, allowed)
                break
            except _NotTakenError as error:  # its process died before it could take the request: the next one will
                try:
                    await instance.lifetime.ended(error.process)
                finally:
                    waiter.leave()
                instance = self._enter(request.model)  # by now a newer revision may serve
                waiter, held = instance.line.come_back(began, background=background), True
            except BaseException as error:
                waiter.line.failed += isinstance(error, DispatchError)
                waiter.leave()
                raise
        line, process = waiter.line, instance.process
        try:
            async with self._received(instance, response, hold, deadline, allowed) as answer:
                yield answer
            line.served += 1
            if response.ok and instance.process is process:
                instance.failures.recovered()
        except DispatchError:
            line.failed += 1
            raise
        finally:
            instance.idle_seconds = time.monotonic()
            instance.history.last_request_seconds = time.time()
            waiter.leave()

    def _enter(self, model: str) -> Instance:
        """The instance that serves a model now, unless requests are refused at once."""
        instance = self._find(model)
        if self._closed:
            raise stopping(instance.subject)
        instance.door.check()
        return instance

    @staticmethod
    def _hold(instance: Instance, began: float, *, held: bool) -> Hold:
        return Hold(
            waited_seconds=time.monotonic() - began,
            reason=instance.door.waited_for(began) if held else "none",
            wake_seconds=instance.history.last_wake_seconds if instance.woken_seconds > began else 0.0,
        )

    async def _admission(self, waiter: Waiter, instance: Instance, deadline: float, allowed: float) -> None:
        if waiter.admitted.done():
            waiter.admitted.result()
            return
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.admitted
        except TimeoutError:
            raise DispatchError(
                instance.subject,
                f"the request was held for {allowed:g} s, its deadline, waiting for {instance.door.waiting_for()}",
                "send it again, with a later deadline if you can wait",
                reason=Reason.DEADLINE_EXCEEDED,
                status=504,
                retry_after_seconds=max(1.0, math.ceil(instance.door.expected_wake_seconds())),
            ) from None

    async def _send(
        self, instance: Instance, request: InferenceRequest, deadline: float, allowed: float
    ) -> aiohttp.ClientResponse:
        process, session = instance.process, instance.session
        if process is None or session is None:
            raise instance.door.refusal()
        if process.gone:
            raise _NotTakenError(process)
        try:
            async with asyncio.timeout_at(deadline):
                return await session.request(
                    request.method,
                    f"http://model{request.path}",
                    headers=request.headers,
                    data=request.body,
                    allow_redirects=False,
                )
        except TimeoutError:
            instance.door.abandon(process)
            raise _overran(instance, allowed) from None
        except asyncio.CancelledError:
            instance.door.abandon(process)
            raise
        except aiohttp.ClientConnectorError as error:
            raise _NotTakenError(process) from error
        except (aiohttp.ClientError, OSError) as error:
            raise await self._failure(instance, process, error) from error

    async def _failure(self, instance: Instance, process: ModelProcess, error: Exception) -> DispatchError:
        """Why there is no answer, or no more of it."""
        if self._closed and process.told_to_end:
            return stopping(
                instance.subject,
                "the system is stopping, and the request did not end in the time that was left to it",
                "send it again when the system is back; --drain of omni up and omni agent leaves requests more time",
            )
        return await instance.door.failure_of(process, error)

    @asynccontextmanager
    async def _received(
        self, instance: Instance, response: aiohttp.ClientResponse, hold: Hold, deadline: float, allowed: float
    ) -> AsyncIterator[InferenceResponse]:
        process = instance.process
        if process is None:
            response.close()
            raise instance.door.refusal()

        async def body() -> AsyncIterator[bytes]:
            left = instance.limits.response_bytes
            while True:
                # The deadline is set for each read and not around the loop: it must never hit the reader of the
                # chunks, who may be busy writing to a slow client.
                try:
                    async with asyncio.timeout_at(deadline):
                        chunk = await response.content.readany()
                except TimeoutError:
                    raise _overran(instance, allowed) from None
                except (aiohttp.ClientError, OSError) as error:
                    raise await self._failure(instance, process, error) from error
                if not chunk:
                    return
                left -= len(chunk)
                if left < 0:
                    raise _too_long(instance)
                yield chunk

        headers = {name: value for name, value in response.headers.items() if name.lower() not in _HOP_BY_HOP}
        chunks = body()
        try:
            yield InferenceResponse(response.status, headers, chunks, hold)
        finally:
            with suppress(RuntimeError):
                await chunks.aclose()  # type: ignore[attr-defined]
            # A connection whose answer was not read to its end is closed, which is how the process learns
            # that nobody waits for it any more.
            if response.content.at_eof():
                response.release()
            else:
                response.close()
                instance.door.abandon(process)


class _NotTakenError(Exception):
    """A process had ended before anything of the request was sent to it."""

    def __init__(self, process: ModelProcess) -> None:
        super().__init__()
        self.process = process


def stopping(subject: str, problem: str = "the system is stopping", cure: str = "try again later") -> DispatchError:
    """What a stopping system says to whoever asks a model of it."""
    return DispatchError(subject, problem, cure, reason=Reason.DRAINING, status=503, retry_after_seconds=5)


def _overran(instance: Instance, allowed: float) -> DispatchError:
    return DispatchError(
        instance.subject,
        f"the request was not finished within {allowed:g} s, its deadline",
        "ask for less, or raise limits.deadline of the model",
        reason=Reason.DEADLINE_EXCEEDED,
        status=504,
    )


def _too_long(instance: Instance) -> DispatchError:
    return DispatchError(
        instance.subject,
        f"the answer is larger than {instance.limits.response_bytes} bytes, its limits.responseBytes",
        "ask for less, or raise limits.responseBytes of the model",
        reason=Reason.TOO_LARGE,
        status=502,
    )
