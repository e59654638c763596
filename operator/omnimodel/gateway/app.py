"""The gateway as an application, and how it listens and ends.

The whole application is for people who run the system: it has the admin API, metrics and the page beside the endpoints
of models. Clients of models get the application of `create_public_app`, at an address of its own, wherever they are
others than those people.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.gateway import admin_routes, inference_routes, openai_routes
from omnimodel.gateway.gateway import GATEWAY, Gateway
from omnimodel.gateway.ingress_routes import IngressRoutes
from omnimodel.gateway.measures import NO_MODEL
from omnimodel.gateway.refusals import RequestError, refusal, status_of
from omnimodel.gateway.relay import outcome_of
from omnimodel.gateway.settings import Settings
from omnimodel.gateway.tokens import Tokens
from omnimodel.protocol.admin import ADMIN_PATH, OBJECTS_PATH, Admin
from omnimodel.protocol.dispatch import Backend
from omnimodel.protocol.ingress import ERROR_HEADER, INGRESS_PATH, Reporting, error_message

log = logging.getLogger(__name__)

METRICS_PATH = "/metrics"
_BEGUN: web.RequestKey[web.StreamResponse] = web.RequestKey(
    "begun", web.StreamResponse
)  # of a request: the answer whose head is on its way
_PUBLIC: web.AppKey[bool] = web.AppKey("public", bool)  # the application is for clients only
_TOKENS: web.AppKey[Tokens] = web.AppKey("tokens", Tokens)  # one of them is asked for
_FOR_ALL = frozenset({"/healthz", "/readyz", METRICS_PATH})  # also without a token
_FOR_OPERATORS = (ADMIN_PATH, OBJECTS_PATH, METRICS_PATH)
_PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


def create_app(
    backend: Backend,
    admin: Admin,
    *,
    settings: Settings | None = None,
    metrics_registry: CollectorRegistry | None = None,
    reporting: Reporting | None = None,
    tokens: Tokens | None = None,
) -> web.Application:
    """Make the whole application. `serve` listens with it; another runner must set `handler_cancellation`.

    Args:
        backend: the agent.
        admin: the running system.
        settings: limits and times.
        metrics_registry: what /metrics shows; one of its own if there is none.
        reporting: the agent, when gateways in other pods may ask it (`protocol.ingress`).
        tokens: that all but probes and metrics are asked for; None lets everybody in.
    """
    app = _for_everybody(Gateway(backend, admin, settings or Settings(), metrics_registry or CollectorRegistry()))
    if tokens is not None:
        app[_TOKENS] = tokens
    app.router.add_routes(admin_routes.routes())
    if reporting is not None:
        app.router.add_routes(IngressRoutes(reporting).routes())
    app.router.add_routes([web.get("/", _page), web.get(METRICS_PATH, _metrics)])
    return app


def create_public_app(whole: web.Application) -> web.Application:
    """Make the application for clients of the same gateway: models, liveness and readiness, and nothing that steers.

    Args:
        whole: made by `create_app`.
    """
    app = _for_everybody(whole[GATEWAY])
    app[_PUBLIC] = True
    return app


def _for_everybody(gateway: Gateway) -> web.Application:
    app = web.Application(client_max_size=0, middlewares=[_refusals, _known])
    app[GATEWAY] = gateway
    app.router.add_routes(openai_routes.routes())
    app.router.add_routes(inference_routes.routes())
    app.router.add_routes([web.get("/healthz", _healthz), web.get("/readyz", _readyz)])
    app.on_response_prepare.append(_begin)
    app.on_shutdown.append(_close)
    return app


@dataclass(frozen=True)
class Listening:
    """A gateway that listens: `close` ends it in stages."""

    address: str
    port: int
    _runner: web.AppRunner

    async def close(self) -> None:
        """Take no more requests, let those in flight end within the time that the settings give, cut off the rest."""
        await self._runner.cleanup()


async def serve(app: web.Application, host: str, port: int) -> Listening:
    """Listen.

    Args:
        app: made by `create_app`.
        host: name or address.
        port: 0 takes a free one.

    Raises:
        OmniError: the address cannot be listened on.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that goes away ends what is done for it
        access_log=None,
        shutdown_timeout=app[GATEWAY].settings.drain_seconds,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        await runner.cleanup()
        raise OmniError(
            f"address {host}:{port}",
            f"cannot be listened on: {error.strerror or error}",
            "choose another with --listen",
        ) from error
    bound = runner.addresses[0]
    shown = f"[{host}]" if ":" in host else host
    log.info("listening host=%s port=%d", host, bound[1])
    return Listening(f"http://{shown}:{bound[1]}", bound[1], runner)


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal and failure becomes an error object of the protocol of its path."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        error: Exception = RequestError(
            f"there is no {request.method} {request.path}", _elsewhere(request), status=404, code="no_such_endpoint"
        )
    except web.HTTPMethodNotAllowed as refused:
        error = RequestError(
            f"{request.path} does not take {request.method}",
            f"use {' or '.join(sorted(refused.allowed_methods - {'HEAD'}))}",
            status=405,
            code="method_not_allowed",
            allowed_methods=tuple(sorted(refused.allowed_methods)),
        )
    except web.HTTPException:
        raise
    except OmniError as refused:
        error = refused
    except Exception as failure:
        log.exception("failed path=%s", request.path)
        error = failure
    begun: web.StreamResponse | None = request.get(_BEGUN)
    if begun is not None:  # a second head would be taken for a part of the first answer's body
        if request.transport is not None:
            request.transport.abort()
        return begun
    status = status_of(error)
    if request.method == "POST" and request.path.startswith(("/v1/", "/v2/")):
        request.app[GATEWAY].measures.ended(NO_MODEL, outcome_of(status))
    if status >= 500:
        log.info("refused path=%s status=%d error=%s", request.path, status, error)
    return refusal(error, request.path)


@web.middleware
async def _known(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in who has the token, where there is one."""
    tokens = request.app.get(_TOKENS)
    resource = request.match_info.route.resource
    if tokens is None or (resource is not None and resource.canonical in _FOR_ALL):
        return await handler(request)
    given = request.headers.get("Authorization", "")
    if tokens.accept(given):
        return await handler(request)
    problem = "the token is not that of this agent" if given else "this agent is asked with a token, and there was none"
    cure = "send the one of the Secret that its pod mounts, as `Authorization: Bearer …`, or ask the gateway"
    if request.path.startswith(INGRESS_PATH):
        error = DispatchError("", problem, cure, reason=Reason.NOT_ALLOWED, status=401)
        response = web.json_response(error_message(error), status=401, headers={ERROR_HEADER: "1"})
    else:
        response = refusal(RequestError(problem, cure, status=401, code="unauthorized"), request.path)
    response.headers["WWW-Authenticate"] = "Bearer"
    response.force_close()  # of a body that comes with it nothing is read
    return response


async def _begin(request: web.Request, response: web.StreamResponse) -> None:
    request[_BEGUN] = response


def _elsewhere(request: web.Request) -> str:
    """What to do about a path that is not there."""
    if _PUBLIC in request.app and request.path.startswith(_FOR_OPERATORS):
        return "ask at the gateway's admin address (--admin-listen); this one is for clients of models"
    asked = ", ".join(route.path for route in openai_routes.routes() if route.method == "POST")
    return f"models answer at POST {asked} and /v2/models/NAME/infer; GET /v1/models lists them"


async def _close(app: web.Application) -> None:
    app[GATEWAY].closing.set()


async def _page(_: web.Request) -> web.Response:
    page = await asyncio.to_thread((Path(__file__).parent / "page.html").read_bytes)
    return web.Response(body=page, headers=_PAGE_HEADERS)


async def _healthz(_: web.Request) -> web.Response:
    return web.json_response({"ok": True})


async def _readyz(request: web.Request) -> web.Response:
    """Ready while it takes requests and a pool serves; one broken model of a catalogue does not change that."""
    gateway = request.app[GATEWAY]
    ending = gateway.closing.is_set() or gateway.leaving.is_set()
    reasons = ["the gateway is being stopped"] if ending else []
    pools = (
        [item.get("status") or {} for item in gateway.admin.objects("OmniPool")] if gateway.settings.needs_pool else []
    )
    unready = [status for status in pools if _condition(status, "Ready") == "False"]
    if pools and len(unready) == len(pools):
        reasons.append("no pool is ready")
    body = json.dumps({"ready": not reasons, "reasons": reasons})
    return web.Response(text=body, content_type="application/json", status=503 if reasons else 200)


def _condition(status: object, kind: str) -> str:
    conditions = status.get("conditions") if isinstance(status, dict) else None
    return next((str(entry.get("status")) for entry in conditions or () if entry.get("type") == kind), "")


async def _metrics(request: web.Request) -> web.Response:
    measures = request.app[GATEWAY].measures
    measures.forget_gone_models()
    return web.Response(body=generate_latest(measures.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
