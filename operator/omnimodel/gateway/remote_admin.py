"""What the command line asks of a gateway, answered by the agents behind it (`protocol.admin.Admin`)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp

from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway.remote import CONNECT_SECONDS
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.gateway.seats import Seat
from omnimodel.protocol.admin import ADMIN_PATH, Event

log = logging.getLogger(__name__)

_PRUNE_SECONDS = 590.0  # a disk takes its time
_ANSWER_SECONDS = 10.0  # beside the deadline that the agent keeps
_QUEUED_EVENTS = 1000  # for a client that reads slowly; beyond them agents are read as slowly
_REMEMBERED_EVENTS = 20_000
_AGAIN_SECONDS = 1.0  # between two looks for agents whose events nobody follows

Objects = Callable[[str], Sequence[Mapping[str, Any]]]


class AgentsAdmin:
    """See the module.

    Args:
        backend: whose agents are asked.
        objects: whole objects of a kind.
        errors: of manifests, for people.
    """

    def __init__(
        self, backend: RoutingBackend, objects: Objects, errors: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    ) -> None:
        self._backend = backend
        self._objects = objects
        self._errors = errors

    def objects(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Whole objects of a kind."""
        return self._objects(kind)

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Have the best agent make a model resident."""
        seat = self._seat(namespace, name)
        return {"pod": seat.agent.name, **await self._ask(seat, namespace, name, "wake", deadline_seconds)}

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Have every agent where it is resident free its device bytes."""
        key = f"{namespace}/{name}"
        seats = [
            seat
            for seat in self._backend.seats.values()
            if seat.snapshot and key in seat.snapshot.cards and seat.snapshot.cards[key].tier == "resident"
        ] or [self._seat(namespace, name)]
        answers = await asyncio.gather(
            *(self._ask(seat, namespace, name, "evict", deadline_seconds) for seat in seats), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return {"pods": [seat.agent.name for seat in seats], **next(a for a in answers if isinstance(a, Mapping))}

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        """Have every agent remove what no model needs."""
        seats = list(self._backend.seats.values())
        url = f"{ADMIN_PATH}/prune?{urlencode({'dryRun': str(dry_run).lower()})}"
        timeout = aiohttp.ClientTimeout(total=_PRUNE_SECONDS, sock_connect=CONNECT_SECONDS)

        async def ask(seat: Seat) -> Mapping[str, Any] | None:
            with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
                async with seat.agent.session.post(
                    seat.agent.address + url, headers=seat.agent.headers, timeout=timeout
                ) as response:
                    return dict(await response.json()) if response.status == 200 else None
            return None

        answers = list(zip(seats, await asyncio.gather(*(ask(seat) for seat in seats)), strict=True))
        return {
            "bytes": sum(answer["bytes"] for _, answer in answers if answer),
            "removed": [
                {**item, "pod": seat.agent.name} for seat, answer in answers if answer for item in answer["removed"]
            ],
            "unreached": [seat.agent.name for seat, answer in answers if answer is None],
        }

    async def _ask(
        self, seat: Seat, namespace: str, name: str, verb: str, deadline_seconds: float
    ) -> Mapping[str, Any]:
        query = urlencode({"deadlineSeconds": deadline_seconds})
        url = f"{seat.agent.address}{_path(namespace, name)}/{verb}?{query}"
        timeout = aiohttp.ClientTimeout(total=deadline_seconds + _ANSWER_SECONDS, sock_connect=CONNECT_SECONDS)
        try:
            async with seat.agent.session.post(url, headers=seat.agent.headers, timeout=timeout) as response:
                body = await response.read()
                if response.status >= 400:
                    raise _refusal(namespace, name, response.status, body)
                return dict(json.loads(body))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise _lost(seat, namespace, name, error) from error

    def _seat(self, namespace: str, name: str) -> Seat:
        seat = self._backend.choose(f"{namespace}/{name}")
        if seat is not None:
            return seat
        subject = f"OmniModel {namespace}/{name}"
        if any(card.namespace == namespace and card.name in {name, f"{namespace}/{name}"} for card in self._models()):
            raise DispatchError(
                subject, "no agent has it at the moment", "see omni get models", reason=Reason.DRAINING, status=503,
                retry_after_seconds=5,
            )  # fmt: skip
        raise DispatchError(
            subject, "there is no such model", "see omni get models", reason=Reason.MODEL_NOT_FOUND, status=404
        )

    def _models(self) -> Sequence[Any]:
        return self._backend.models()

    async def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """What the model's process printed on the agent that gets its requests."""
        seat = self._seat(namespace, name)
        query = urlencode({"tail": tail, "follow": str(follow).lower()})
        async for chunk in self._chunks(seat, f"{_path(namespace, name)}/logs?{query}"):
            yield chunk

    async def events(self, *, follow: bool) -> AsyncIterator[Event]:
        """What happened on the agents there are now, oldest first, then what happens."""
        found: list[Event] = []
        for seat in list(self._backend.seats.values()):
            with suppress(DispatchError):
                found += [event async for event in self._events(seat, follow=False)]
        found.sort(key=lambda event: event.time_seconds)
        seen = OrderedDict((_fingerprint(event), None) for event in found)  # an agent that is followed begins anew
        for event in found:
            yield event
        if follow:
            async with aclosing(self._coming()) as coming:
                async for event in coming:
                    if _fingerprint(event) not in seen:
                        seen[_fingerprint(event)] = None
                        yield event
                    while len(seen) > _REMEMBERED_EVENTS:
                        seen.popitem(last=False)

    async def _coming(self) -> AsyncGenerator[Event]:
        """What happens from now on, on every agent that is there, those that come later among them."""
        queue: asyncio.Queue[Event] = asyncio.Queue(_QUEUED_EVENTS)
        copies: dict[Seat, asyncio.Task[None]] = {}

        async def copy(seat: Seat) -> None:
            with suppress(DispatchError):
                async for event in self._events(seat, follow=True):
                    await queue.put(event)

        async def attend() -> None:
            while True:
                there = {seat for seat in self._backend.seats.values() if seat.there}
                for seat in [seat for seat, task in copies.items() if task.done()]:
                    del copies[seat]
                for seat in there - copies.keys():
                    copies[seat] = asyncio.create_task(copy(seat))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_SECONDS):
                        await self._backend.wait_changed()

        attending = asyncio.create_task(attend())
        try:
            while True:
                yield await queue.get()
        finally:
            for task in (attending, *copies.values()):
                task.cancel()
            await asyncio.gather(attending, *copies.values(), return_exceptions=True)

    async def _events(self, seat: Seat, *, follow: bool) -> AsyncIterator[Event]:
        rest = b""
        async for chunk in self._chunks(seat, f"{ADMIN_PATH}/events?follow={str(follow).lower()}"):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                try:
                    yield Event(**json.loads(line))
                except (ValueError, TypeError) as error:
                    log.warning("event_unreadable agent=%s error=%r", seat.agent.name, error)

    async def _chunks(self, seat: Seat, path: str) -> AsyncIterator[bytes]:
        """An agent's answer as it comes: a line may be longer than any buffer."""
        try:
            async with seat.agent.session.get(seat.agent.address + path, headers=seat.agent.headers) as response:
                if response.status >= 400:
                    raise _refusal("", seat.agent.name, response.status, await response.read())
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(seat, "", "", error) from error

    def status_lines(self) -> Mapping[str, Any]:
        """`errors` of manifests, `activity` of models that are being worked on, and the agents."""
        activity = [
            {"model": key, "phase": report.phase, "progress": report.progress, "pod": seat.agent.name}
            for seat in self._backend.seats.values()
            if seat.snapshot
            for key, report in seat.snapshot.models.items()
            if report.phase not in {"serving", "idle", "failed", "suspended"}
        ]
        agents = [
            {"pod": seat.agent.name, "address": seat.address.url, "up": seat.there, "problem": _problem(seat)}
            for seat in self._backend.seats.values()
        ]
        return {"errors": list(self._errors()), "activity": activity, "agents": agents, "settled": not activity}


def _problem(seat: Seat) -> str:
    return "" if seat.there else seat.problem


def _path(namespace: str, name: str) -> str:
    return f"{ADMIN_PATH}/models/{quote(namespace)}/{quote(name)}"


def _fingerprint(event: Event) -> tuple[object, ...]:
    return event.time_seconds, event.kind, event.namespace, event.name, event.reason, event.message


def _refusal(namespace: str, name: str, status: int, body: bytes) -> DispatchError:
    """The error object of an agent's own endpoint."""
    message, reason = body.decode(errors="replace"), Reason.INTERNAL
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        message = str(error["message"])
        reason = Reason.of_code(error.get("code")) or Reason.INTERNAL
    subject = f"OmniModel {namespace}/{name}"
    return DispatchError(
        subject if not message.startswith(subject) else "", message, reason=reason, status=status
    )  # fmt: skip


def _lost(seat: Seat, namespace: str, name: str, error: Exception) -> DispatchError:
    return DispatchError(
        f"OmniModel {namespace}/{name}" if name else f"agent {seat.agent.name}",
        f"the agent in {seat.agent.name} does not answer ({type(error).__name__})",
        "try again",
        reason=Reason.DRAINING,
        status=503,
        retry_after_seconds=5,
    )
