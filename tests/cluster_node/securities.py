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
    changes = {f"/spec/{name}": value for name, value in security.pod.items()}
    if security.container is not None:
        changes["/spec/containers/0/securityContext"] = dict(security.container)
    with changed(cluster, f"pods-{security.name}", {"omnimodel.io/pool": security.name}, changes):
        yield


@contextmanager
def changed(cluster: Connection, name: str, labels: Mapping[str, str], changes: Mapping[str, Any]) -> Iterator[None]:
    """Let pods with these labels be made with other values.

    Args:
        name: of the policy.
        changes: JSON pointer to value; `/-` at its end adds to a list, and a list given there adds each of its items.
    """
    patches = [
        f'JSONPatch{{op: "add", path: {json.dumps(path)}, value: {cel(item)}}}'
        for path, value in changes.items()
        for item in (value if path.endswith("/-") else [value])
    ]
    if not patches:
        yield
        return
    conditions = [
        {"name": f"label-{number}", "expression": f"object.metadata.?labels['{key}'].orValue('') == '{value}'"}
        for number, (key, value) in enumerate(labels.items())
    ]
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": conditions,
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{', '.join(patches)}]"}}],
    }
    made = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    binding = {"policyName": name, "matchResources": {}}
    cluster.apply(
        {**made, "kind": "MutatingAdmissionPolicy", "spec": policy},
        {**made, "kind": "MutatingAdmissionPolicyBinding", "spec": binding},
    )
    try:
        wait_until_changed(cluster, labels)
        yield
    finally:
        kinds = "mutatingadmissionpolicybindings,mutatingadmissionpolicies"
        cluster.kubectl("delete", kinds, name, "--ignore-not-found")


def wait_until_changed(cluster: Connection, labels: Mapping[str, str]) -> None:
    """Until pods with these labels come to be other than those without, which a policy takes a moment for."""

    def made(labels: Mapping[str, str]) -> Any:
        container = {"name": "agent", "image": "localhost/agent:dev", "env": [{"name": "A", "value": "1"}]}
        metadata = {"name": "tried", "namespace": "default", "labels": labels}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        said = cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod))
        spec = json.loads(said)["spec"]
        for volume in spec.get("volumes", []):
            volume.pop("name")  # of the token, with a random end
        for one in spec["containers"]:
            one.pop("volumeMounts", None)
        return spec

    for _ in cluster.until(30):
        if made(labels) != made({}):
            return
