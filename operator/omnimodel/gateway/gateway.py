"""What every handler of the gateway needs, in one place."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry

from omnimodel.gateway.bodies import Buffered
from omnimodel.gateway.measures import Measures
from omnimodel.gateway.refusals import RequestError
from omnimodel.gateway.relay import Relay
from omnimodel.gateway.settings import Settings
from omnimodel.protocol.admin import Admin
from omnimodel.protocol.dispatch import DEADLINE_HEADER, PRIORITY_HEADER, Backend

# Of a client's headers only these reach a model: no credentials, no cookies.
_PASSED = ("Accept", "X-Request-Id", "Traceparent", "Inference-Header-Content-Length")


@dataclass(frozen=True)
class Terms:
    """What a client says about its request beside the body."""

    deadline_seconds: float | None
    priority: str


class Gateway:
    """One gateway: its backend, limits and metrics.

    Args:
        backend: the agent.
        admin: the running system.
        settings: limits and times.
        registry: of the metrics.
    """

    def __init__(self, backend: Backend, admin: Admin, settings: Settings, registry: CollectorRegistry) -> None:
        self.backend = backend
        self.admin = admin
        self.settings = settings
        self.measures = Measures(registry, backend, admin)
        self.relay = Relay(backend, settings, self.measures)
        self.buffered = Buffered(settings.buffered_bytes)
        self.closing = asyncio.Event()
        self.leaving = asyncio.Event()  # no longer ready, so that nobody new comes, but whoever comes is served

    def terms(self, request: web.Request) -> Terms:
        """Deadline and priority of a request.

        Raises:
            RequestError: one of them is no deadline or no priority, or the gateway ends.
        """
        if self.closing.is_set():
            raise RequestError(
                "the gateway is being stopped", "send it again", status=503, code="draining", retry_after_seconds=5
            )
        priority = request.headers.get(PRIORITY_HEADER, "interactive")
        if priority not in ("interactive", "background"):
            raise RequestError(
                f'the header {PRIORITY_HEADER} is "{priority}"',
                "set it to interactive or background",
                param=PRIORITY_HEADER,
            )
        text = request.headers.get(DEADLINE_HEADER)
        if text is None:
            return Terms(None, priority)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise RequestError(
                f'the header {DEADLINE_HEADER} is "{text}"',
                "set it to a number of seconds, such as 30",
                param=DEADLINE_HEADER,
            )
        return Terms(seconds, priority)

    def passed_headers(self, request: web.Request) -> dict[str, str]:
        """Headers of the client that the model gets."""
        return {name: request.headers[name] for name in _PASSED if name in request.headers}


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
