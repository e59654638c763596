"""Config maps and secrets that models and pools refer to: fetched by name, looked at again, and told of when changed.

By name and not by watch: to watch secrets is the right to read all of them. So a change arrives within a minute.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omnimodel.api import OmniModel, OmniPool
from omnimodel.api.mounts import MountSource
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.kubernetes_news import Round
from omnimodel.errors import ManifestError
from omnimodel.kube import CONFIG_MAPS, SECRETS, Kind, Kube, KubeError
from omnimodel.render import files_of_sources, references_of_sources

log = logging.getLogger(__name__)

Config = dict[str, dict[str, Mapping[str, bytes]]]
Reference = tuple[Kind, str, str]  # kind, namespace, name
LOOK_SECONDS = 60.0
MISSING_SECONDS = 5.0  # of what is not there: someone may be about to make it


def references_of(model: OmniModel) -> frozenset[Reference]:
    """The config maps and secrets that a model refers to."""
    namespace = model.metadata.namespace
    found: set[Reference] = set()
    for value in model.spec.runtime.env.values():
        if isinstance(value, str):
            continue
        if value.config_map_key_ref is not None:
            found.add((CONFIG_MAPS, namespace, value.config_map_key_ref.name))
        if value.secret_key_ref is not None:
            found.add((SECRETS, namespace, value.secret_key_ref.name))
    for mount in model.spec.mounts:
        source = mount.source
        if isinstance(source, MountSource) and source.config_map is not None:
            found.add((CONFIG_MAPS, namespace, source.config_map.name))
        if isinstance(source, MountSource) and source.secret is not None:
            found.add((SECRETS, namespace, source.secret.name))
    return frozenset(found)


def references_of_pool(pool: OmniPool) -> frozenset[Reference]:
    """The config maps and secrets that the sources of a pool refer to."""
    kinds = {"configmaps": CONFIG_MAPS, "secrets": SECRETS}
    found = references_of_sources(pool).values()
    return frozenset((kinds[kind], pool.metadata.namespace, reference.name) for kind, reference in found)


@dataclass(frozen=True)
class _Known:
    """What an object had when it was looked at; content is None when it was not there."""

    content: Mapping[str, bytes] | None
    version: str
    looked_seconds: float


class References:
    """See the module.

    Args:
        kube: the connection.
        changed: told of each model and pool that refers to something that changed.
        clock: monotonic.
    """

    def __init__(
        self, kube: Kube, changed: Callable[[Round], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._changed = changed
        self._clock = clock
        self._known: dict[Reference, _Known] = {}
        self._users: dict[Reference, set[Round]] = {}
        self._of_user: dict[Round, frozenset[Reference]] = {}

    async def config(self, model: OmniModel) -> Config:
        """What a model refers to, as `render` takes it.

        Raises:
            KubeError: it could not be fetched.
        """
        return await self._config(("model", model.metadata.namespace, model.metadata.name), references_of(model))

    async def missing(self, pool: OmniPool) -> Refusal | None:
        """What the sources of a pool refer to and is not there.

        Raises:
            KubeError: that is not known, for it could not be looked up.
        """
        user = ("pool", pool.metadata.namespace, pool.metadata.name)
        config = await self._config(user, references_of_pool(pool))
        try:
            files_of_sources(pool, config)
        except ManifestError as error:
            return Refusal(error.reason, f"{error.field}: {error.problem}", error.cure)
        return None

    async def _config(self, user: Round, wanted: frozenset[Reference]) -> Config:
        self._use(user, wanted)
        config: Config = {"configmaps": {}, "secrets": {}}
        for reference in wanted:
            known = self._known.get(reference) or await self._look(reference)
            if known.content is not None:
                kind, _, name = reference
                config["configmaps" if kind is CONFIG_MAPS else "secrets"][name] = known.content
        return config

    def forget(self, user: Round) -> None:
        """A model or pool is gone."""
        self._use(user, frozenset())

    def _use(self, user: Round, wanted: frozenset[Reference]) -> None:
        for reference in self._of_user.pop(user, frozenset()) - wanted:
            users = self._users[reference]
            users.discard(user)
            if not users:
                del self._users[reference]
                self._known.pop(reference, None)
        if wanted:
            self._of_user[user] = wanted
        for reference in wanted:
            self._users.setdefault(reference, set()).add(user)

    async def _look(self, reference: Reference) -> _Known:
        kind, namespace, name = reference
        item = await self._kube.get(kind, name, namespace)
        content = None if item is None else _content(kind, item)
        version = "" if item is None else f"{item['metadata'].get('uid')}@{item['metadata'].get('resourceVersion')}"
        known = _Known(content, version, self._clock())
        if reference in self._users:
            self._known[reference] = known
        return known

    async def run(self) -> None:
        """Look at everything again and again, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            now = self._clock()
            for reference, known in list(self._known.items()):
                period_seconds = MISSING_SECONDS if known.content is None else LOOK_SECONDS
                if now - known.looked_seconds < period_seconds:
                    continue
                try:
                    fresh = await self._look(reference)
                except KubeError as error:
                    log.warning("reference not read kind=%s name=%s error=%s", reference[0].name, reference[2], error)
                    if self._known.get(reference) is known:  # the others are not to wait for it
                        self._known[reference] = replace(known, looked_seconds=now)
                    continue
                if fresh.version != known.version:
                    log.info("reference changed kind=%s namespace=%s name=%s", reference[0].name, *reference[1:])
                    for user in sorted(self._users.get(reference, ())):
                        self._changed(user)


def _content(kind: Kind, item: Mapping[str, Any]) -> dict[str, bytes]:
    if kind is SECRETS:
        return {key: base64.b64decode(value) for key, value in (item.get("data") or {}).items()}
    text = {key: value.encode() for key, value in (item.get("data") or {}).items()}
    return {**text, **{key: base64.b64decode(value) for key, value in (item.get("binaryData") or {}).items()}}
