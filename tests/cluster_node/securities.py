"""Pods of a pool with any security setting: a policy of the cluster changes them as they are made.

The operator makes its pods with the least that a level needs. Clusters change pods: by policies like this one, or by
admission webhooks. So the ladder is walked here under every setting that an agent may meet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.connection import Connection

UNCONFINED, DEFAULT = {"type": "Unconfined"}, {"type": "RuntimeDefault"}
SYS_ADMIN = {"capabilities": {"add": ["SYS_ADMIN"]}}
RESTRICTED = {
    "runAsUser": 1000,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True)
class Security:
    """A security setting of pods.

    Args:
        name: of the pool that has it.
        container: the container's securityContext, whole; None for what the operator writes.
        pod: more of the pod's spec.
    """

    name: str
    container: Mapping[str, Any] | None
    pod: Mapping[str, Any] = field(default_factory=dict)


def cel(value: Any) -> str:
    """A JSON value as CEL has it: of lists and maps every part is of any type."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: dyn({cel(item)})" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(cel(item) for item in value) + "]"
    return json.dumps(value)


@contextmanager
def secured(cluster: Connection, security: Security) -> Iterator[None]:
    """Let pods of the setting's pool be made with it."""
    patches = [
        f'JSONPatch{{op: "add", path: "/spec/{name}", value: {cel(value)}}}' for name, value in security.pod.items()
    ]
    if security.container is not None:
        path = "/spec/containers/0/securityContext"
        patches.append(f'JSONPatch{{op: "add", path: "{path}", value: {cel(dict(security.container))}}}')
    name = f"pods-{security.name}"
    of_the_pool = f"object.metadata.?labels['omnimodel.io/pool'].orValue('') == '{security.name}'"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [{"name": "pool", "expression": of_the_pool}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{', '.join(patches)}]"}}],
    }
    group = "admissionregistration.k8s.io/v1"
    binding = {"policyName": name, "matchResources": {}}
    if patches:
        cluster.apply(
            {"apiVersion": group, "kind": "MutatingAdmissionPolicy", "metadata": {"name": name}, "spec": policy},
            {
                "apiVersion": group,
                "kind": "MutatingAdmissionPolicyBinding",
                "metadata": {"name": name},
                "spec": binding,
            },
        )
    yield
    if patches:
        kinds = "mutatingadmissionpolicies,mutatingadmissionpolicybindings"
        cluster.kubectl("delete", kinds, name, "--ignore-not-found")
