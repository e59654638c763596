"""News of objects: who has to be looked at again because of them, and what is known of pods over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from omnimodel.api import OmniPool
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.kubernetes_cache import POOL_LABEL, Cache, Key
from omnimodel.controllers.kubernetes_children import replicas_of
from omnimodel.controllers.kubernetes_pods import ZONE_LABEL, PodView, index_of, is_by, is_silent, speaks_for
from omnimodel.kube import LEASES, MODELS, PODS, POOLS, PROCESSES, Kind

Round = tuple[str, str, str]  # "pool" or "model", namespace, name


class Add(Protocol):
    """Asks for a round, now or later."""

    def __call__(self, key: Round, delay_seconds: float = 0.0, /) -> None:
        """See the class."""


@dataclass(frozen=True)
class _Beat:
    """A heartbeat: whose it is and the time that it has, when it came, and when the first of that pod came."""

    said: tuple[object, object]
    heard_seconds: float
    first_seconds: float


class News:
    """See the module.

    Args:
        cache: which has taken the news already.
        add: asks for a round.
        zone: of a node, by its name; empty when unknown.
        node_lost: whether a node, by its name, is not there, or its kubelet is not.
        trouble: of a pod, by its namespace and name: what events say of it.
        clock: monotonic.
    """

    def __init__(
        self,
        cache: Cache,
        add: Add,
        zone: Callable[[str], str] = lambda _: "",
        node_lost: Callable[[str], bool] = lambda _: False,
        trouble: Callable[[str, str], Refusal | None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._add = add
        self._zone = zone
        self._node_lost = node_lost
        self._trouble = trouble
        self._clock = clock
        self._beats: dict[Key, _Beat] = {}
        self._since: dict[Key, tuple[bool, float]] = {}  # whether a pod answers, and since when

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
            for companion in self._cache.companions(key[0], _groups(before) | _groups(item)) - {key}:
                pool = self._cache.pool_key(companion, _pool_name(self._cache.get(MODELS, companion)))
                if pool is not None:
                    self._add(("pool", *pool))
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
        spec = item.get("spec") or {}
        said = (spec.get("holderIdentity"), spec.get("renewTime"))
        known = self._beats.get(key)
        if known is None or known.said != said:
            now = self._clock()
            same = known is not None and known.said[0] == said[0]
            self._beats[key] = _Beat(said, now, known.first_seconds if known is not None and same else now)
        if known is None or known.said[0] != said[0]:
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
        for gone in [other for other in self._since if other[0] == key[0] and _is_of(key[1], other[1], names)]:
            del self._since[gone]
        return [
            self._view(key[0], name, index, found.get(name), entries.get(name, {}), now)
            for name, index in sorted(names.items(), key=lambda pair: pair[1])
        ]

    def forget(self, pool: Key) -> None:
        """A pool is gone."""
        for gone in [other for other in self._since if other[0] == pool[0] and _is_of(pool[1], other[1], ())]:
            del self._since[gone]

    def silent(self, pod: Mapping[str, Any]) -> bool:
        """Whether the agent of a pod has not been heard of lately."""
        beat = self._beat_of(pod)
        return is_silent(beat.heard_seconds if beat else None, self._clock())

    def _view(
        self,
        namespace: str,
        name: str,
        index: int,
        item: Mapping[str, Any] | None,
        entry: Mapping[str, Any],
        now: float,
    ) -> PodView:
        if item is not None and not is_by(entry, item["metadata"].get("uid", "")):
            entry = {}
        beat = None if item is None else self._beat_of(item)
        node = str(((item or {}).get("spec") or {}).get("nodeName", ""))
        view = PodView(
            name, index, item, entry, beat.heard_seconds if beat else None, None,
            first_seconds=beat.first_seconds if beat else None, renewed=str(beat.said[1]) if beat else "",
            zone=self._zone_of(item), lost_node=node if node and self._node_lost(node) else "",
            trouble=self._trouble(namespace, name),
        )  # fmt: skip
        answers = view.answers(now)
        before = self._since.get((namespace, name))
        since = before[1] if before is not None and before[0] == answers else now
        self._since[namespace, name] = (answers, since)
        return replace(view, here_seconds=since) if answers else replace(view, away_seconds=since)

    def _beat_of(self, pod: Mapping[str, Any]) -> _Beat | None:
        """The last heartbeat of this very pod."""
        key: Key = (pod["metadata"].get("namespace", ""), pod["metadata"]["name"])
        beat, lease = self._beats.get(key), self._cache.lease(key)
        return beat if beat is not None and lease is not None and speaks_for(lease, pod) else None

    def _zone_of(self, item: Mapping[str, Any] | None) -> str:
        if item is None:
            return ""
        own = (item["metadata"].get("labels") or {}).get(ZONE_LABEL, "")
        return str(own or self._zone((item.get("spec") or {}).get("nodeName", "")))


def _is_of(pool: str, pod: str, names: Container[str]) -> bool:
    return index_of(pool, pod) >= 0 and pod not in names


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


def _groups(item: Mapping[str, Any] | None) -> set[str]:
    """Groups of affinity.together that a model is in."""
    affinity = ((item or {}).get("spec") or {}).get("affinity") or {}
    return {str(group) for group in affinity.get("together") or ()}


def _for_placement(item: Mapping[str, Any] | None) -> object:
    """What placement reads of a model's status."""
    status = (item or {}).get("status") or {}
    entries = status.get("residency") or ()
    return sorted((entry["pod"], bool(entry.get("ready"))) for entry in entries), status.get("footprint")
