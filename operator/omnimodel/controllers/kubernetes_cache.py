"""Objects of the cluster as last seen, with the indexes that decisions need.

Two sources fill it, watches and lists, beside the answers to the operator's own writes; whichever is newer wins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnimodel.api import OmniModel, OmniPool, parse
from omnimodel.controllers.decisions import demand_of, unix_seconds
from omnimodel.errors import ManifestError, Reason
from omnimodel.kube import LEASES, MODELS, PODS, POOLS, PROCESSES, Kind, key_of
from omnimodel.placement.affinity import divided
from omnimodel.placement.assignment import Finding

Key = tuple[str, str]  # namespace, name
DEFAULT = "default"
POOL_LABEL = "omnimodel.io/pool"
POOL_NAMESPACE_LABEL = "omnimodel.io/pool-namespace"
_OF_POD = ("nodeName",)


def version_of(item: Mapping[str, Any]) -> int:
    """The resourceVersion as a number; Kubernetes promises since 1.35 that they compare."""
    text = str(item["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0


def trimmed(kind: Kind, item: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of an object: a thousand of them should not fill the memory with what nobody reads."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    kept = {**item, "metadata": metadata, "apiVersion": kind.api_version, "kind": kind.name}
    if kind is PODS:
        kept["spec"] = {key: value for key, value in (item.get("spec") or {}).items() if key in _OF_POD}
    return kept


@dataclass
class Cache:
    """See the module. `items` is kind -> key -> object."""

    items: dict[Kind, dict[Key, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    _parsed: dict[tuple[Kind, Key], tuple[object, OmniModel | OmniPool | ManifestError]] = field(default_factory=dict)
    _claims: dict[str, dict[Key, tuple[float, str]]] = field(default_factory=lambda: defaultdict(dict))
    _names: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    _by_pool: dict[str, set[Key]] = field(default_factory=lambda: defaultdict(set))
    _pool_of: dict[Key, str] = field(default_factory=dict)
    _by_group: dict[tuple[str, str], set[Key]] = field(default_factory=lambda: defaultdict(set))  # of affinity.together
    _groups_of: dict[Key, tuple[str, ...]] = field(default_factory=dict)

    def put(self, kind: Kind, item: Mapping[str, Any]) -> tuple[bool, dict[str, Any] | None]:
        """Take an object, unless a newer one is known; whether it was taken, and what was there before."""
        key = key_of(item)
        before = self.items[kind].get(key)
        if before is not None and version_of(before) >= version_of(item) > 0:
            return False, before
        self.items[kind][key] = trimmed(kind, item)
        if kind is MODELS:
            self._index(key)
        return True, before

    def drop(self, kind: Kind, key: Key, uid: str = "") -> dict[str, Any] | None:
        """Forget an object, but not a successor of the same name; the object, if it was known."""
        known = self.items[kind].get(key)
        if known is None or (uid and known["metadata"].get("uid") != uid):
            return None
        del self.items[kind][key]
        self._parsed.pop((kind, key), None)
        if kind is MODELS:
            self._index(key)
        return known

    def get(self, kind: Kind, key: Key) -> dict[str, Any] | None:
        """An object that is there and not being deleted."""
        item = self.items[kind].get(key)
        return None if item is None or item["metadata"].get("deletionTimestamp") else item

    def model(self, key: Key) -> OmniModel | ManifestError | None:
        """A model as it was written, or what is wrong with it."""
        found = self._resource(MODELS, key)
        assert not isinstance(found, OmniPool)
        return found

    def pool(self, key: Key) -> OmniPool | ManifestError | None:
        """A pool as it was written, or what is wrong with it."""
        found = self._resource(POOLS, key)
        assert not isinstance(found, OmniModel)
        return found

    def _resource(self, kind: Kind, key: Key) -> OmniModel | OmniPool | ManifestError | None:
        item = self.get(kind, key)
        if item is None:
            return None
        metadata = item["metadata"]
        stamp = metadata.get("uid"), metadata.get("generation")
        known = self._parsed.get((kind, key))
        if known is not None and known[0] == stamp:
            return known[1]
        head = ("name", "namespace", "labels", "uid", "generation", "creationTimestamp")
        document = {
            "apiVersion": item["apiVersion"],
            "kind": item["kind"],
            "metadata": {name: metadata[name] for name in head if name in metadata},
            "spec": item.get("spec") or {},
        }
        result: OmniModel | OmniPool | ManifestError
        try:
            resource = parse(document)
            assert isinstance(resource, OmniModel | OmniPool)
            result = resource
        except ManifestError as error:
            result = error
        self._parsed[kind, key] = (stamp, result)
        return result

    def pool_key(self, model: Key, name: str) -> Key | None:
        """The pool that a model means: of its own namespace, else of namespace `default`."""
        for namespace in (model[0], DEFAULT):
            if self.get(POOLS, (namespace, name)) is not None:
                return namespace, name
        return None

    def models_of(self, pool: Key) -> Iterator[Key]:
        """Models that mean a pool."""
        for key in sorted(self._by_pool.get(pool[1], ())):
            if self.pool_key(key, pool[1]) == pool:
                yield key

    def models_naming(self, name: str) -> Sequence[Key]:
        """Models whose spec.pool is a name, whichever pool they mean by it."""
        return sorted(self._by_pool.get(name, ()))

    def pods_of(self, pool: Key) -> dict[str, dict[str, Any]]:
        """Pods of a pool by name."""
        return {
            name: pod
            for (namespace, name), pod in self.items[PODS].items()
            if namespace == pool[0] and (pod["metadata"].get("labels") or {}).get(POOL_LABEL) == pool[1]
        }

    def process(self, key: Key) -> dict[str, Any] | None:
        """The OmniProcess of a model."""
        return self.get(PROCESSES, key)

    def lease(self, key: Key) -> dict[str, Any] | None:
        """The heartbeat of a pod."""
        return self.get(LEASES, key)

    def _index(self, key: Key) -> None:
        """Bring the indexes of a model up to date."""
        for name in self._names.pop(key, ()):
            self._claims[name].pop(key, None)
            if not self._claims[name]:
                del self._claims[name]
        pool = self._pool_of.pop(key, None)
        if pool is not None:
            self._by_pool[pool].discard(key)
        for group in self._groups_of.pop(key, ()):
            self._by_group[key[0], group].discard(key)
        model = self.model(key)
        if not isinstance(model, OmniModel):
            return
        self._names[key] = model.names
        since = unix_seconds(model.metadata.creation_timestamp)
        for name in model.names:
            self._claims[name][key] = (since, f"{key[0]}/{key[1]}")
        self._pool_of[key] = model.spec.pool
        self._by_pool[model.spec.pool].add(key)
        self._groups_of[key] = tuple(model.spec.affinity.together)
        for group in model.spec.affinity.together:
            self._by_group[key[0], group].add(key)

    def names_of(self, key: Key) -> tuple[str, ...]:
        """Names that a model asks for."""
        return self._names.get(key, ())

    def rivals(self, names: Iterable[str]) -> set[Key]:
        """Models that ask for any of these names."""
        return {key for name in names for key in self._claims.get(name, ())}

    def companions(self, namespace: str, groups: Iterable[str]) -> set[Key]:
        """Models of a namespace that are in any of these groups of affinity.together."""
        return {key for group in groups for key in self._by_group.get((namespace, group), ())}

    def divided(self, pool: Key) -> Mapping[str, Finding]:
        """Models of a pool that are to be together with an older one of another pool, and that sentence."""
        mine = {(key[0], group) for key in self.models_of(pool) for group in self._groups_of.get(key, ())}
        keys = {key for namespace, group in mine for key in self.companions(namespace, (group,))}
        return divided(demand_of(model, 0) for key in keys if isinstance(model := self.model(key), OmniModel))

    def granted(self, key: Key) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
        """The names that a model may have, for it is the oldest that asks for them; and who has the others."""
        mine: list[str] = []
        lost: list[Finding] = []
        for name in dict.fromkeys(self.names_of(key)):
            claims = self._claims[name]
            owner = min(claims, key=claims.__getitem__)
            if owner == key:
                mine.append(name)
                continue
            problem = f'served name "{name}" belongs to OmniModel {owner[0]}/{owner[1]}, which is older'
            lost.append(Finding(f"{key[0]}/{key[1]}", Reason.NAME_TAKEN, problem))
        return tuple(mine), tuple(lost)
