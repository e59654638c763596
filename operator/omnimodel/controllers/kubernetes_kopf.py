"""kopf, for `on.event` alone: it lists and watches, and its handlers hand objects over. It never writes.

It runs in a thread with a loop of its own, for it takes every task of its loop for its own and ends it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from omnimodel.controllers.kubernetes_cache import POOL_LABEL
from omnimodel.controllers.kubernetes_children import MANAGED
from omnimodel.errors import OmniError
from omnimodel.kube import (
    DISRUPTION_BUDGETS,
    LEASES,
    MODELS,
    PODS,
    POOLS,
    PROCESSES,
    SERVICES,
    STATEFUL_SETS,
    Kind,
    Kube,
)

TOKEN_SECONDS = 300.0  # a pod's token is renewed by the kubelet long before it ends
_MANAGED = ",".join(f"{key}={value}" for key, value in MANAGED.items())
SELECTORS: Mapping[Kind, str] = {
    MODELS: "",
    POOLS: "",
    PROCESSES: "",
    PODS: POOL_LABEL,
    LEASES: POOL_LABEL,
    STATEFUL_SETS: _MANAGED,
    SERVICES: f"{_MANAGED},{POOL_LABEL}",
    DISRUPTION_BUDGETS: f"{_MANAGED},{POOL_LABEL}",
}

Heard = Callable[[Kind, str | None, Mapping[str, Any]], None]  # kind, what happened, object


async def watch(kube: Kube, namespaces: Collection[str], heard: Heard) -> None:
    """Let kopf list and watch, in a thread with a loop of its own, for it ends every task of its loop.

    Raises:
        Exception: what kopf failed with.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stop = threading.Event()

    def work() -> None:
        error: BaseException | None = None
        try:
            kopf.run(**_arguments(kube, namespaces, heard, loop), stop_flag=stop)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, ended, error)

    threading.Thread(target=work, name="kopf", daemon=True).start()
    try:
        await asyncio.shield(ended)
    finally:
        stop.set()
    raise OmniError("operator", "its watches ended", "it is started anew; the log says why")


def _arguments(
    kube: Kube, namespaces: Collection[str], heard: Heard, loop: asyncio.AbstractEventLoop
) -> dict[str, Any]:
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.posting.reporting_component = "omni-operator"
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.enforce_retry_after = True
    settings.queueing.worker_limit = None
    settings.process.ultimate_exiting_timeout = 25
    registry = kopf.OperatorRegistry()
    for kind, labels in SELECTORS.items():
        place = (kind.group, kind.version, kind.plural)
        if labels:
            settings.watching.label_selectors[place] = labels
        kopf.on.event(*place, id=kind.plural, registry=registry)(_handler(kind, heard, loop))
    kopf.on.login(registry=registry)(_login(kube))
    scope: dict[str, Any] = {"namespaces": namespaces} if namespaces else {"clusterwide": True}
    return {"registry": registry, "settings": settings, "standalone": True, **scope}


def _login(kube: Kube) -> Callable[..., Any]:
    async def login(**_: Any) -> kopf.ConnectionInfo:
        configuration = kube.configuration
        token = await kube.token()
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert or None,
            ca_data=configuration.ca_cert_data or None,
            insecure=None if configuration.verify_ssl else True,
            token=token or None,
            certificate_path=configuration.cert_file or None,
            private_key_path=configuration.key_file or None,
            expiration=datetime.now(UTC) + timedelta(seconds=TOKEN_SECONDS) if token else None,
        )

    return login


def _handler(kind: Kind, heard: Heard, loop: asyncio.AbstractEventLoop) -> Callable[..., Any]:
    async def handle(event: Mapping[str, Any], **_: Any) -> None:
        loop.call_soon_threadsafe(heard, kind, event["type"], event["object"])

    return handle


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
