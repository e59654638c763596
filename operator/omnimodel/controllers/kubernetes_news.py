"""News of objects: who has to be looked at again because of them, and what is known of pods over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from omnimodel.api import OmniPool
from omnimodel.controllers.kubernetes_cache import POOL_LABEL, Cache, Key
from omnimodel.controllers.kubernetes_children import replicas_of
from omnimodel.controllers.kubernetes_pods import PodView, index_of
from omnimodel.kube import LEASES, MODELS, PODS, POOLS, PROCESSES, Kind

Round = tuple[str, str, str]  # "pool" or "model", namespace, name


class Add(Protocol):
    """Asks for a round, now or later."""

    def __call__(self, key: Round, delay_seconds: float = 0.0, /) -> None:
        """See the class."""


class News:
    """See the module.

    Args:
        cache: which has taken the news already.
        add: asks for a round.
        clock: monotonic.
    """

    def __init__(self, cache: Cache, add: Add, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._add = add
        self._clock = clock
        self._beats: dict[Key, tuple[object, float]] = {}
        self._away: dict[Key, float] = {}

    def changed(self, kind: Kind, before: Mapping[str, Any] | None, item: Mapping[str, Any] | None) -> None:
        """An object of the cache is another one now; None for none."""
        some = item if item is not None else before
        if some is None:
            return
        key: Key = (some["metadata"].get("namespace", ""), some["metadata"]["name"])
        if kind is MODELS:
            self._model_changed(key, before, item)
        elif kind is POOLS:
            self._pool_changed(key, before, item)
        elif kind is PROCESSES:
            self._add(("model", *key))
        elif kind is LEASES:
            self._heartbeat(key, item)
        else:
            pool = (some["metadata"].get("labels") or {}).get(POOL_LABEL, key[1] if kind is not PODS else "")
            if pool:
                self._add(("pool", key[0], pool))

    def _model_changed(self, key: Key, before: Mapping[str, Any] | None, item: Mapping[str, Any] | None) -> None:
        self._add(("model", *key))
        if _stamp(before) != _stamp(item):
            for name in {_pool_name(before), _pool_name(item)} - {""}:
                pool = self._cache.pool_key(key, name)
                if pool is not None:
                    self._add(("pool", *pool))
            for rival in self._cache.rivals(_names(before) | _names(item)) - {key}:
                self._add(("model", *rival))
        elif _for_placement(before) != _for_placement(item):
            pool = self._cache.pool_key(key, _pool_name(item))
            if pool is not None:
                self._add(("pool", *pool))

    def _pool_changed(self, key: Key, before: Mapping[str, Any] | None, item: Mapping[str, Any] | None) -> None:
        self._add(("pool", *key))
        if before is None or item is None or _stamp(before) != _stamp(item):
            for model in self._cache.models_naming(key[1]):
                self._add(("model", *model))

    def _heartbeat(self, key: Key, item: Mapping[str, Any] | None) -> None:
        if item is None:
            self._beats.pop(key, None)
            return
        renewed = (item.get("spec") or {}).get("renewTime")
        known = self._beats.get(key)
        if known is None or known[0] != renewed:
            self._beats[key] = (renewed, self._clock())
        if known is None:
            pool = (item["metadata"].get("labels") or {}).get(POOL_LABEL, "")
            if pool:
                self._add(("pool", key[0], pool))

    def all(self) -> None:
        """Have a round for everything there is."""
        for key in list(self._cache.items[POOLS]):
            self._add(("pool", *key))
        for key in {*self._cache.items[MODELS], *self._cache.items[PROCESSES]}:
            self._add(("model", *key))

    def views(self, key: Key, pool: OmniPool) -> list[PodView]:
        """Pods there are, and those there will be, by number."""
        found = self._cache.pods_of(key)
        status = (self._cache.items[POOLS].get(key) or {}).get("status") or {}
        entries = {entry["pod"]: entry for entry in status.get("pods") or ()}
        now = self._clock()
        names = {f"{key[1]}-{index}": index for index in range(replicas_of(pool))}
        for name in found:
            index = index_of(key[1], name)
            if index >= 0:
                names[name] = index
        views = []
        for name, index in sorted(names.items(), key=lambda pair: pair[1]):
            beat = self._beats.get((key[0], name))
            heard = beat[1] if beat else None
            view = PodView(name, index, found.get(name), entries.get(name, {}), heard, None)
            if view.serves(now):
                self._away.pop((key[0], name), None)
                views.append(view)
            else:
                since = self._away.setdefault((key[0], name), now)
                views.append(PodView(name, index, view.item, view.entry, heard, since))
        return views


def _stamp(item: Mapping[str, Any] | None) -> object:
    if item is None:
        return None
    metadata = item["metadata"]
    return metadata.get("uid"), metadata.get("generation"), metadata.get("deletionTimestamp")


def _pool_name(item: Mapping[str, Any] | None) -> str:
    return str(((item or {}).get("spec") or {}).get("pool", "default")) if item is not None else ""


def _names(item: Mapping[str, Any] | None) -> set[str]:
    if item is None:
        return set()
    extra = (item.get("spec") or {}).get("servedNames") or ()
    return {item["metadata"]["name"], *(n if isinstance(n, str) else str(n.get("name")) for n in extra)}


def _for_placement(item: Mapping[str, Any] | None) -> object:
    """What placement reads of a model's status."""
    status = (item or {}).get("status") or {}
    entries = status.get("residency") or ()
    return sorted((entry["pod"], bool(entry.get("ready"))) for entry in entries), status.get("footprint")
