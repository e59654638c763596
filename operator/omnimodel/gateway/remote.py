"""An agent in another pod as a `Backend`: the gateway's side of `protocol.ingress`.

One task follows what the agent knows (`follow`); requests take the newest of it and never wait for it. A request that
the agent has not yet given to its model ends with `NotSentError` when the agent is lost, and may go to another.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
from aiohttp.connector import AddrInfoType
from yarl import URL

from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway.tokens import bearer
from omnimodel.protocol.dispatch import (
    DEADLINE_HEADER,
    PRIORITY_HEADER,
    Estimate,
    InferenceRequest,
    InferenceResponse,
    ModelCard,
)
from omnimodel.protocol.ingress import (
    ERROR_HEADER,
    EXCHANGE_HEADER,
    EXCHANGES_PATH,
    HEARTBEAT_SECONDS,
    INGRESS_PATH,
    REPORT_PATH,
    Snapshot,
    error_from,
    hold_from,
    key_of,
    merged,
)

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS  # without a sign of life an agent is lost
GRACE_SECONDS = 5.0  # an agent keeps deadlines itself; after so much more it is taken for lost
LINE_BYTES = 64 << 20  # of a report
ERROR_BYTES = 1 << 20
UNKNOWN = 401  # the status of an answer to one whose token is not known
COLD_SECONDS = 5.0  # what a wake is thought to take before there was one
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS"})
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "date", "server"})
_exchanges = itertools.count()
_EXCHANGE_PREFIX = secrets.token_hex(6)


class NotSentError(DispatchError):
    """There will be no response from this agent, and no model has seen anything of the request.

    Args:
        lost: the agent itself did not answer.
    """

    def __init__(self, error: DispatchError, *, lost: bool) -> None:
        super().__init__(
            error.subject,
            error.problem,
            error.cure,
            reason=error.reason,
            status=error.status,
            retry_after_seconds=error.retry_after_seconds,
        )
        self.lost = lost


class RemoteAgent:
    """See the module (`protocol.dispatch.Backend`).

    Args:
        address: its URL, such as `http://10.0.0.7:8710`.
        name: what people call it: the name of its pod.
        tokens: that it may know, the newest first; they may be changed.
    """

    def __init__(self, address: str, name: str = "", tokens: Sequence[str] = ()) -> None:
        self.address = address.rstrip("/")
        self.name = name or self.address.partition("//")[2]
        self.tokens = tokens
        self._token = ""  # that it knows
        self.snapshot: Snapshot | None = None
        self._held: dict[asyncio.Timeout, _Body] = {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Its connections; made in the loop that uses them."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket, ttl_dns_cache=10),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                read_bufsize=1 << 18,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request to it has."""
        return bearer(self._token)

    async def _find_token(self) -> None:
        """Go over to the newest token that it knows: it may hear of a new one later than this gateway."""
        timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        for token in itertools.takewhile(lambda token: token != self._token, self.tokens):
            url = f"{self.address}{EXCHANGES_PATH}/none"
            with suppress(aiohttp.ClientError, OSError):  # whether it answers is seen by its report
                async with self.session.get(url, headers=bearer(token), timeout=timeout) as response:
                    if response.status != UNKNOWN:
                        self._token = token
                        return

    async def close(self) -> None:
        """Break off everything."""
        self.lose()
        if self._session is not None:
            await self._session.close()

    # What it knows

    def models(self) -> Sequence[ModelCard]:
        """Every model it has, in the order of their keys."""
        return list(self.snapshot.cards.values()) if self.snapshot else []

    def estimate(self, model: str) -> Estimate:
        """What a request that came now could expect."""
        report = self.snapshot.models.get(model_key(model)) if self.snapshot else None
        if report is None:
            return Estimate(1, 0.0 if self.snapshot and model_key(model) in self.snapshot.cards else COLD_SECONDS)
        wake_seconds = 0.0 if report.tier == "resident" else report.last_wake_seconds or COLD_SECONDS
        return Estimate(report.waiting + 1, wake_seconds)

    async def follow(self) -> AsyncIterator[Snapshot]:
        """What it knows, at once and after every change; ends when the agent ends it.

        Raises:
            OSError, aiohttp.ClientError, TimeoutError, ValueError: it does not answer, or not with a report.
        """
        await self._find_token()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        url = f"{self.address}{REPORT_PATH}?follow=true"
        async with self.session.get(url, headers=self.headers, timeout=timeout, read_bufsize=LINE_BYTES) as response:
            if response.status == UNKNOWN:
                self._token = ""
                problem = "it does not know the token of this gateway" if self.tokens else "it wants a token"
                raise PermissionError(problem)
            if response.status != 200:
                raise ValueError(f"it answers {response.status} when asked for its report")
            known: Snapshot | None = None
            async for line in response.content:
                message = json.loads(line)
                if message or known is None:
                    known = merged(known, message)
                self.snapshot = known
                yield known
                await self._find_token()

    def lose(self) -> None:
        """End what it holds: it is dead, or will be. What a model of it has taken goes on."""
        for held, body in list(self._held.items()):
            body.lost = True  # at once: the agent may be asking for it in this moment
            with suppress(RuntimeError):  # it ends already
                held.reschedule(0.0)

    # Requests

    @asynccontextmanager
    async def open(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        """Hold and send a request; see `Backend.open`.

        Raises:
            NotSentError: nothing of it has reached a model.
            DispatchError: it was sent, and there will be no response.
        """
        began = time.monotonic()
        exchange = f"{_EXCHANGE_PREFIX}{next(_exchanges):x}"
        body = _Body(request.body)
        response = await self._send(request, body, exchange)
        try:
            if ERROR_HEADER in response.headers:
                error = await self._refusal(response, request)
                if response.status == UNKNOWN and not body.taken:  # which is not for the client to know
                    raise NotSentError(_not_known(self.name, request), lost=True)
                raise error if body.taken else NotSentError(error, lost=False)
            headers = {name: value for name, value in response.headers.items() if name.lower() not in _HOP_BY_HOP}
            hold = hold_from(headers)
            chunks = self._chunks(response, request, exchange)
            try:
                yield InferenceResponse(response.status, headers, chunks, hold)
            finally:
                with suppress(RuntimeError):
                    await chunks.aclose()  # type: ignore[attr-defined]
        finally:
            # A connection whose answer was not read to its end is closed, which is how the agent learns that nobody
            # waits for it any more.
            response.release() if response.content.at_eof() and body.done else response.close()
            log.debug("exchanged agent=%s model=%s seconds=%.3f", self.name, request.model, time.monotonic() - began)

    async def _send(self, request: InferenceRequest, body: _Body, exchange: str) -> aiohttp.ClientResponse:
        """Send the head, the body once the model takes it, and wait for the head of the answer."""
        headers = {**request.headers, **self.headers, EXCHANGE_HEADER: exchange, PRIORITY_HEADER: request.priority}
        limit: float | None = None
        if request.deadline_seconds is not None:
            headers[DEADLINE_HEADER] = f"{request.deadline_seconds:.6f}"
            limit = asyncio.get_running_loop().time() + request.deadline_seconds + GRACE_SECONDS
        if isinstance(request.body, bytes):
            headers["Content-Length"] = str(len(request.body))
        url = URL(f"{self.address}{INGRESS_PATH}/{model_key(request.model)}{request.path}", encoded=True)
        carries = request.method not in _IDEMPOTENT
        fresh = False
        while True:
            held = asyncio.timeout_at(limit)
            body.lost, body.on_taken = False, partial(self._held.pop, held, None)
            try:
                async with held:
                    self._held[held] = body
                    return await self.session.request(
                        request.method,
                        url,
                        headers=headers,
                        data=body if carries else None,
                        expect100=carries,
                        allow_redirects=False,
                    )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if body.taken:
                    raise self._broken_off(request, error) from error
                stale = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                if stale and not isinstance(error, aiohttp.ClientConnectorError) and not fresh:
                    fresh = True  # a connection that was kept open may have been closed before this request was sent
                    continue
                raise NotSentError(_unreachable(self.name, request, error), lost=True) from error
            finally:
                self._held.pop(held, None)

    async def _chunks(
        self, response: aiohttp.ClientResponse, request: InferenceRequest, exchange: str
    ) -> AsyncIterator[bytes]:
        while True:
            try:
                chunk = await response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise await self._reason(request, exchange, error) from error
            if not chunk:
                return
            yield chunk

    async def _reason(self, request: InferenceRequest, exchange: str, failure: Exception) -> DispatchError:
        """Why an answer was broken off, as the agent knows it."""
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
            url = f"{self.address}{EXCHANGES_PATH}/{exchange}"
            async with self.session.get(url, headers=self.headers, timeout=timeout) as response:
                if response.status == 200:
                    return error_from(await response.json())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            pass
        return self._broken_off(request, failure)

    async def _refusal(self, response: aiohttp.ClientResponse, request: InferenceRequest) -> DispatchError:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return error_from(json.loads(await response.content.read(ERROR_BYTES)), response.status)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError) as error:
            return self._broken_off(request, error)

    def _broken_off(self, request: InferenceRequest, error: Exception) -> DispatchError:
        log.info("broken_off agent=%s model=%s error=%r", self.name, request.model, error)
        return DispatchError(
            f"OmniModel {model_key(request.model)}",
            f"the connection to {self.name}, which computed the answer, broke off",
            "send it again",
            reason=Reason.CRASHED,
            status=502,
            retry_after_seconds=1,
        )


class _Body:
    """A request's body, which knows whether anybody has asked for it."""

    def __init__(self, content: bytes | AsyncIterable[bytes]) -> None:
        self.taken = False
        self.lost = False
        self.done = content == b""
        self.on_taken: Callable[[], object] = _nothing
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.lost:
            raise ConnectionResetError("the agent is lost")
        self.taken = True
        self.on_taken()
        if isinstance(self._content, bytes):
            if self._content:
                yield self._content
        else:
            async for chunk in self._content:
                yield chunk
        self.done = True


def _nothing() -> None:
    """Nobody wants to know."""


def model_key(model: str) -> str:
    """`namespace/name` of what `InferenceRequest.model` holds."""
    return model if "/" in model else f"default/{model}"


def cards_by_key(cards: Sequence[ModelCard]) -> Mapping[str, ModelCard]:
    """Cards by `namespace/name`."""
    return {key_of(card): card for card in cards}


def _unreachable(agent: str, request: InferenceRequest, error: Exception) -> DispatchError:
    return DispatchError(
        f"OmniModel {model_key(request.model)}",
        f"the agent in {agent} does not answer ({type(error).__name__})",
        "send it again",
        reason=Reason.DRAINING,
        status=503,
        retry_after_seconds=1,
    )


def _not_known(agent: str, request: InferenceRequest) -> DispatchError:
    return DispatchError(
        f"OmniModel {model_key(request.model)}",
        f"the agent in {agent} does not know the token of this gateway",
        "send it again",
        reason=Reason.DRAINING,
        status=503,
        retry_after_seconds=1,
    )


def _socket(info: AddrInfoType) -> socket.socket:
    """A socket that notices within half a minute that the machine at its other end is gone."""
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
