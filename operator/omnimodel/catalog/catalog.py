"""The catalogue at one moment: objects, where each stands, what is wrong, and what to remark."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from omnimodel.api import OmniModel, OmniPool, Resource
from omnimodel.errors import ManifestError

Key = tuple[str, str, str]  # kind, namespace, name
DEFAULT = "default"


@dataclass(frozen=True)
class Identity:
    """What stays with an object while its manifest changes.

    Args:
        uid: made when the object was first seen.
        created: RFC 3339.
        generation: grows by one with each change of the spec.
        spec: digest of the spec it stands for.
    """

    uid: str
    created: str
    generation: int
    spec: str

    def to_dict(self) -> dict[str, Any]:
        """JSON values, to be kept over a restart."""
        return {"uid": self.uid, "created": self.created, "generation": self.generation, "spec": self.spec}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Identity:
        """Read what `to_dict` gave."""
        return cls(str(values["uid"]), str(values["created"]), int(values["generation"]), str(values["spec"]))


@dataclass(frozen=True)
class ConfigObject:
    """A ConfigMap or Secret of the catalogue: key to bytes."""

    kind: str
    namespace: str
    name: str
    content: Mapping[str, bytes]

    def __repr__(self) -> str:
        keys = ", ".join(sorted(self.content))
        return f"ConfigObject({self.kind} {self.namespace}/{self.name}: {keys})"  # values stay out of logs


@dataclass(frozen=True)
class Source:
    """The last good version of a file.

    Args:
        digest: of its text; empty when it has to be read again.
        complete: whether everything in it was good; then a later broken version changes nothing.
        keys: objects it has.
        notes: what was left out of it.
    """

    digest: str
    complete: bool
    keys: tuple[Key, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Catalog:
    """Manifests of files, checked.

    Args:
        objects: models and pools, in the order of kind, namespace and name.
        errors: what is wrong with which file, line and field, and what to write instead.
        notes: what was left out, for information.
        configs: config maps and secrets that manifests may refer to.
        places: file and line of each object.
        files: last good versions, by file.
        identities: of every object, also to be kept over a restart.
    """

    objects: tuple[Resource, ...] = ()
    errors: tuple[ManifestError, ...] = ()
    notes: tuple[str, ...] = ()
    configs: Mapping[Key, ConfigObject] = field(default_factory=dict)
    places: Mapping[Key, str] = field(default_factory=dict)
    files: Mapping[str, Source] = field(default_factory=dict)
    identities: Mapping[Key, Identity] = field(default_factory=dict)

    @property
    def models(self) -> tuple[OmniModel, ...]:
        """The models, by namespace and name."""
        return tuple(item for item in self.objects if isinstance(item, OmniModel))

    @property
    def pools(self) -> tuple[OmniPool, ...]:
        """The pools, by namespace and name."""
        return tuple(item for item in self.objects if isinstance(item, OmniPool))

    @cached_property
    def items(self) -> Mapping[Key, Resource | ConfigObject]:
        """Everything there is, by key."""
        return {**{key_of(item): item for item in self.objects}, **self.configs}

    def pool_of(self, model: OmniModel) -> OmniPool | None:
        """The pool that a model names: of its own namespace, else of namespace `default`.

        None when there is none; for a catalogue without pools and the name `default` that is the machine itself.
        """
        named = [pool for pool in self.pools if pool.metadata.name == model.spec.pool]
        for namespace in (model.metadata.namespace, DEFAULT):
            for pool in named:
                if pool.metadata.namespace == namespace:
                    return pool
        return None

    def configmaps(self, namespace: str) -> dict[str, Mapping[str, bytes]]:
        """Config maps of a namespace: name to key to bytes."""
        return self._configs("ConfigMap", namespace)

    def secrets(self, namespace: str) -> dict[str, Mapping[str, bytes]]:
        """Secrets of a namespace: name to key to bytes."""
        return self._configs("Secret", namespace)

    def config(self, namespace: str) -> dict[str, dict[str, Mapping[str, bytes]]]:
        """What `render` takes as its `config`."""
        return {"configmaps": self.configmaps(namespace), "secrets": self.secrets(namespace)}

    def _configs(self, kind: str, namespace: str) -> dict[str, Mapping[str, bytes]]:
        return {
            item.name: item.content
            for item in self.configs.values()
            if (item.kind, item.namespace) == (kind, namespace)
        }


def key_of(resource: Resource) -> Key:
    """The key of an object."""
    return (type(resource).__name__, resource.metadata.namespace, resource.metadata.name)


def spec_digest(resource: Resource) -> str:
    """Digest of a spec as written, which decides about its generation."""
    spec = resource.to_dict().get("spec", {})
    return hashlib.sha256(json.dumps(spec, sort_keys=True, default=str).encode()).hexdigest()


def identity_keys(identities: Mapping[Key, Identity]) -> dict[str, dict[str, Any]]:
    """Identities as a JSON object, `Kind/namespace/name` to values."""
    return {"/".join(key): identity.to_dict() for key, identity in sorted(identities.items())}


def read_identities(values: Mapping[str, Mapping[str, Any]]) -> dict[Key, Identity]:
    """Read what `identity_keys` gave.

    Raises:
        KeyError, ValueError: it is something else.
    """
    found: dict[Key, Identity] = {}
    for text, identity in values.items():
        kind, namespace, name = text.split("/")
        found[kind, namespace, name] = Identity.from_dict(identity)
    return found
