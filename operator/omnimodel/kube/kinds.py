"""Kinds of objects and their places in the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True)
class Kind:
    """A kind of object.

    Args:
        group: empty for the core.
        version: of the API.
        plural: as in its URL.
        name: as in its manifests.
        namespaced: whether it lives in a namespace.
    """

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As in its manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of one object, of all of a namespace, or of all there are."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(quote(part, safe="") for part in parts)


MODELS = Kind("omnimodel.io", "v1alpha1", "omnimodels", "OmniModel")
POOLS = Kind("omnimodel.io", "v1alpha1", "omnipools", "OmniPool")
PROCESSES = Kind("omnimodel.io", "v1alpha1", "omniprocesses", "OmniProcess")
PODS = Kind("", "v1", "pods", "Pod")
SERVICES = Kind("", "v1", "services", "Service")
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap")
SECRETS = Kind("", "v1", "secrets", "Secret")
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
EVENTS = Kind("", "v1", "events", "Event")
STATEFUL_SETS = Kind("apps", "v1", "statefulsets", "StatefulSet")
DISRUPTION_BUDGETS = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")
DEFINITIONS = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)


def key_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """Namespace and name of an object."""
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
