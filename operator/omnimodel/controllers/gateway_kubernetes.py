"""What a gateway learns from the API server: where the agents are, and which models there are.

Both are mirrors that outlive the API server; while it is away the gateway goes on with what it knew last.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omnimodel.api import OmniModel
from omnimodel.controllers.decisions import unix_seconds
from omnimodel.controllers.gateway_objects import processes, refreshed, reports
from omnimodel.errors import OmniError, Reason
from omnimodel.gateway.order import Place
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.gateway.seats import Address
from omnimodel.kube import MODELS, PODS, POOLS, SECRETS, Kube, Mirror
from omnimodel.protocol.dispatch import ModelCard
from omnimodel.protocol.report import ModelReport
from omnimodel.render import model_card

log = logging.getLogger(__name__)

POOL_LABEL = "omnimodel.io/pool"
POOL_NAMESPACE_LABEL = "omnimodel.io/pool-namespace"
AGENT_PORT = 8710
TOKEN_KEY = "token"  # noqa: S105 - the name of the entry of a Secret, not what is in it
REGION_LABEL = "topology.kubernetes.io/region"  # nodes' labels are copied to pods since Kubernetes 1.35
ZONE_LABEL = "topology.kubernetes.io/zone"
REMEMBERED_DELETED = 1000  # models; their agents have unloaded them long before they are forgotten
_GATHER_SECONDS = 0.02  # changes closer together are taken over at once


class Discovery:
    """Follows pods, models and pools, and tells a routing backend.

    Args:
        kube: the connection.
        namespaces: to look at; empty for all.
        port: of the agents.
        token_secret: name of the Secret that has the token of the agents of its namespace; empty for none.
        agent_namespaces: where it is looked for; empty for all that are looked at.
    """

    def __init__(
        self,
        kube: Kube,
        namespaces: Sequence[str] = (),
        *,
        port: int = AGENT_PORT,
        token_secret: str = "",
        agent_namespaces: Sequence[str] = (),
    ) -> None:
        self._port = port
        self._bell = asyncio.Event()
        self._cards: dict[str, ModelCard | None] = {}  # None: deleted
        self._backend: RoutingBackend | None = None
        places = list(namespaces) or [""]
        self._pods = [
            Mirror(kube, PODS, place, labels=POOL_LABEL, on_change=self._ring, trim=_slim) for place in places
        ]
        self._models = [Mirror(kube, MODELS, place, on_change=self._model, trim=_slim) for place in places]
        self._pools = [Mirror(kube, POOLS, place, on_change=self._ring, trim=_slim) for place in places]
        self._tokens: dict[str, tuple[str, ...]] = {}  # by namespace, the newest first
        fields = f"metadata.name={token_secret}"
        self._secrets = [
            Mirror(kube, SECRETS, place, fields=fields, on_change=self._secret)
            for place in (list(agent_namespaces) or places if token_secret else ())
        ]

    @property
    def _mirrors(self) -> list[Mirror]:
        return [*self._pods, *self._models, *self._pools]

    async def run(self, backend: RoutingBackend) -> None:
        """Keep a backend's table up until cancelled."""
        self._backend = backend
        async with asyncio.TaskGroup() as tasks:
            for mirror in [*self._mirrors, *self._secrets]:
                tasks.create_task(mirror.run())
            tasks.create_task(self._ring_when_listed())
            while True:
                await self._bell.wait()
                await asyncio.sleep(_GATHER_SECONDS)
                self._bell.clear()
                if all(mirror.synced for mirror in self._pods):
                    backend.set_agents(self.addresses())

    async def _ring_when_listed(self) -> None:
        """A first list with nothing in it tells nobody that it is there."""
        await asyncio.gather(*(mirror.wait_synced() for mirror in self._mirrors))
        self._ring()

    async def wait_synced(self, deadline_seconds: float) -> None:
        """Wait for the first list of everything.

        Raises:
            OmniError: it did not come in time.
        """
        async with asyncio.timeout(deadline_seconds + 1.0):
            await asyncio.gather(*(mirror.wait_synced(deadline_seconds) for mirror in self._mirrors))

    def addresses(self) -> list[Address]:
        """Where the agents are."""
        pods = [pod for mirror in self._pods for pod in mirror.items.values()]
        return [self._address(pod) for pod in pods if _usable(pod)]

    def _address(self, pod: Mapping[str, Any]) -> Address:
        labels = pod["metadata"].get("labels") or {}
        pool = self._pool(labels.get(POOL_NAMESPACE_LABEL) or pod["metadata"]["namespace"], labels[POOL_LABEL])
        location = ((pool or {}).get("spec") or {}).get("location") or {}
        place = Place(
            str(location.get("region") or labels.get(REGION_LABEL) or ""),
            str(location.get("zone") or labels.get(ZONE_LABEL) or ""),
        )
        ip = pod["status"]["podIP"]
        host = f"[{ip}]" if ":" in ip else ip
        metadata = pod["metadata"]
        namespace = metadata["namespace"]
        tokens = self._tokens.get(namespace, ())
        return Address(f"http://{host}:{self._port}", metadata["name"], place, namespace, tokens)

    def _pool(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        return next(
            (mirror.items[namespace, name] for mirror in self._pools if (namespace, name) in mirror.items), None
        )

    def known(self) -> Mapping[str, ModelCard | None]:
        """Cards of every model there is, by `namespace/name`; None for those that are deleted."""
        return self._cards

    def objects(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Whole objects of a kind, in the order of their names, for the admin endpoints."""
        assert self._backend is not None
        match kind:
            case "OmniModel":
                told = reports(self._backend)
                nothing: dict[str, ModelReport] = {}
                found = [refreshed(item, told.get(_key(item), nothing)) for item in _items(self._models)]
            case "OmniPool":
                found = _items(self._pools)
            case "OmniProcess":
                found = list(processes(self._backend))
            case _:
                found = []
        return sorted(found, key=_key)

    def _secret(self, key: tuple[str, str], _: object, item: Mapping[str, Any] | None) -> None:
        """Take a token over, and keep the one before: agents may hear of it later. One that is deleted stays in use."""
        text = ((item or {}).get("data") or {}).get(TOKEN_KEY, "")
        token = base64.b64decode(text).decode("ascii", "ignore").strip()
        known = self._tokens.get(key[0], ())
        if token and token not in known[:1]:
            self._tokens[key[0]] = (token, *known[:1])
            self._bell.set()

    def _ring(self, *_: object) -> None:
        self._bell.set()

    def _model(self, key: tuple[str, str], _: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None:
        name = "/".join(key)
        before = self._cards.get(name)
        if after is None:
            self._cards.pop(name, None)
            self._cards[name] = None  # at the end: the oldest are forgotten first
            deleted = [key for key, card in self._cards.items() if card is None]
            for gone in deleted[: max(0, len(deleted) - REMEMBERED_DELETED)]:
                del self._cards[gone]
        else:
            try:
                self._cards[name] = card_of(after)
            except (OmniError, ValueError) as error:
                log.warning("model_unreadable model=%s error=%r", name, str(error))
        if self._backend is not None and self._cards.get(name) != before:
            self._backend.changed(table=False)


def card_of(item: Mapping[str, Any]) -> ModelCard:
    """What a model's object says of it, for the time that no agent says more.

    A model that is being brought up counts as ready: a request may wait for it. One that is suspended or has failed
    for good does not.

    Raises:
        ValueError: it is no OmniModel that this version can read.
    """
    spec_only = {name: value for name, value in item.items() if name != "status"}
    model = OmniModel.model_validate(spec_only)
    status = item.get("status") or {}
    conditions = {entry.get("type"): entry for entry in status.get("conditions") or ()}
    ready, stalled = conditions.get("Ready", {}), conditions.get("Stalled", {})
    suspended = model.spec.suspend
    refused = suspended or stalled.get("status") == "True"
    granted = status.get("servedNames")
    if granted is None and ready.get("reason") == Reason.NAME_TAKEN:
        granted = ()  # others have them all
    return replace(
        model_card(model, model.names if granted is None else granted),
        ready=not refused,
        reason=str(Reason.SUSPENDED if suspended else ready.get("reason", "")) if refused else "",
        message=("its manifest says suspend: true" if suspended else str(ready.get("message", ""))) if refused else "",
        granted=granted is not None,
        created_seconds=int(unix_seconds(model.metadata.creation_timestamp)),
    )


def _usable(pod: Mapping[str, Any]) -> bool:
    """Whether a pod may have an agent that takes requests. Whether it does is seen by asking it."""
    status = pod.get("status") or {}
    return bool(
        status.get("podIP") and status.get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
    )


def _slim(item: dict[str, Any]) -> dict[str, Any]:
    """An object without what nobody here reads."""
    metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    slim = {**item, "metadata": metadata}
    if item.get("kind") == "Pod" or "podIP" in (item.get("status") or {}):
        slim["spec"] = {}
        slim["status"] = {name: item["status"].get(name) for name in ("podIP", "phase")}
    return slim


def _items(mirrors: Sequence[Mirror]) -> list[Mapping[str, Any]]:
    return [item for mirror in mirrors for item in mirror.items.values()]


def _key(item: Mapping[str, Any]) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"
