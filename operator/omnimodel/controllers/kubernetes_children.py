"""What a pool has in the cluster: a StatefulSet, the Service that names its pods, and a budget for disruptions. Pure.

Pods have stable names, for residency entries and heartbeats are kept by pod. Every value is written as the API server
gives it back, so that a comparison finds differences and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from omnimodel.api import GROUP, OmniPool
from omnimodel.api.meta import API_VERSION
from omnimodel.controllers.kubernetes_volumes import (
    STATE_PATH,
    agent_mounts,
    claim_templates,
    further_paths,
    memory_quantity,
    pod_volumes,
    uses_node_folders,
)
from omnimodel.kube import DISRUPTION_BUDGETS, SERVICES, STATEFUL_SETS, Kind
from omnimodel.quantity import parse_bytes, parse_cpu

PORT = 8710
DRAIN_SECONDS = 60
GRACE_SECONDS = DRAIN_SECONDS + 30
DEVICE_CORES = Fraction(1, 2)  # that a pod asks for, for each of its devices, unless its pool says how many
MANAGED = {"app.kubernetes.io/managed-by": "omnimodel"}
APPLIED = f"{GROUP}/applied"  # digest of what was applied: fields that are wanted no longer show by it alone


@dataclass(frozen=True)
class AgentSettings:
    """What pods of all pools have from the operator.

    Args:
        image: of the agent, unless a pool says another.
        pull_policy: of the image.
        service_account: that pods run under, unless a pool says another.
        token_secret: name of the Secret, in the namespace of the pods, with the token that they ask of gateways; empty
            for pods that answer everybody.
        command: instead of the image's entry point; for tests and odd images.
        env: further variables.
    """

    image: str = "omnimodel-agent:latest"
    pull_policy: str = "IfNotPresent"
    service_account: str = ""
    token_secret: str = ""
    command: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Child:
    """An object that the operator keeps as it is described."""

    kind: Kind
    body: dict[str, Any]


def selector_of(pool: OmniPool) -> dict[str, str]:
    """Labels that all pods of a pool have, and no others."""
    return {"app.kubernetes.io/name": "omnimodel-agent", f"{GROUP}/pool": pool.metadata.name}


def replicas_of(pool: OmniPool) -> int:
    """Pods that a pool asks for."""
    spec = pool.spec
    if spec.autoscale is not None:
        return spec.autoscale.min
    return 1 if spec.replicas is None else spec.replicas


def build_children(pool: OmniPool, settings: AgentSettings, replicas: int) -> tuple[Child, ...]:
    """Everything a pool needs, in the order in which it is made.

    Args:
        pool: checked, with its uid.
        settings: of the operator.
        replicas: of the StatefulSet; more than the pool asks for while pods that go are still needed.
    """
    return (build_service(pool), build_stateful_set(pool, settings, replicas), build_disruption_budget(pool))


def build_service(pool: OmniPool) -> Child:
    """A headless Service: it gives the pods names, and endpoints that gateways find."""
    spec = {
        "clusterIP": "None",
        "selector": selector_of(pool),
        "ports": [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return Child(SERVICES, _body(pool, spec))


def build_disruption_budget(pool: OmniPool) -> Child:
    """Voluntary disruptions take one pod at a time, as updates do."""
    most = pool.spec.update_strategy.max_unavailable if pool.spec.update_strategy else None
    spec = {"maxUnavailable": most or 1, "selector": {"matchLabels": selector_of(pool)}}
    return Child(DISRUPTION_BUDGETS, _body(pool, spec))


def build_stateful_set(pool: OmniPool, settings: AgentSettings, replicas: int) -> Child:
    """The pods."""
    strategy = pool.spec.update_strategy
    update: dict[str, Any] = {"type": strategy.type if strategy else "RollingUpdate"}
    if update["type"] == "RollingUpdate":
        update["rollingUpdate"] = {"maxUnavailable": (strategy.max_unavailable if strategy else None) or 1}
    spec: dict[str, Any] = {
        "replicas": replicas,
        "serviceName": pool.metadata.name,
        "podManagementPolicy": "Parallel",  # pods of a pool do not wait for each other
        "updateStrategy": update,
        "selector": {"matchLabels": selector_of(pool)},
        "template": {"metadata": {"labels": {**selector_of(pool), **MANAGED}}, "spec": _pod_spec(pool, settings)},
    }
    if claims := claim_templates(pool):
        spec["volumeClaimTemplates"] = claims
    return Child(STATEFUL_SETS, _body(pool, spec))


def _pod_spec(pool: OmniPool, settings: AgentSettings) -> dict[str, Any]:
    pod = pool.spec.pod
    # Named also when it is the default: taken out, the API server would bring it back from the deprecated field.
    account = (pod.service_account_name if pod else None) or settings.service_account or "default"
    spec: dict[str, Any] = {
        "serviceAccountName": account,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [_container(pool, settings)],
        "volumes": pod_volumes(pool, settings.token_secret),
    }
    if pod is not None:
        if pod.node_selector:
            spec["nodeSelector"] = dict(pod.node_selector)
        if pod.tolerations:
            spec["tolerations"] = [dict(toleration) for toleration in pod.tolerations]
        if pod.priority_class_name:
            spec["priorityClassName"] = pod.priority_class_name
        if pod.runtime_class_name:
            spec["runtimeClassName"] = pod.runtime_class_name
    return spec


def _container(pool: OmniPool, settings: AgentSettings) -> dict[str, Any]:
    pod = pool.spec.pod
    container: dict[str, Any] = {
        "name": "agent",
        "image": (pod.image if pod else None) or settings.image,
        "imagePullPolicy": settings.pull_policy,
        "args": ["agent"],
        "env": [
            _from_field("OMNI_POD_NAME", "metadata.name"),
            _from_field("OMNI_POD_NAMESPACE", "metadata.namespace"),
            _from_field("OMNI_POD_UID", "metadata.uid"),
            _from_field("OMNI_POD_IP", "status.podIP"),
            _from_field("OMNI_NODE_NAME", "spec.nodeName"),
            {"name": "OMNI_POOL", "value": pool.metadata.name},
            {"name": "OMNI_POOL_NAMESPACE", "value": pool.metadata.namespace},
            {"name": "OMNI_STATE_DIR", "value": STATE_PATH},
            {"name": "OMNI_DRAIN_SECONDS", "value": str(DRAIN_SECONDS)},
            *({"name": name, "value": path} for name, path in further_paths(pool, settings.token_secret).items()),
            *({"name": name, "value": value} for name, value in sorted((settings.env or {}).items())),
        ],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": _probe("/healthz", period_seconds=2, failures=150),
        "livenessProbe": _probe("/healthz", period_seconds=20, failures=3),
        "readinessProbe": _probe("/readyz", period_seconds=5, failures=2),
        "securityContext": _security(pool),
        "volumeMounts": agent_mounts(pool, settings.token_secret),
    }
    if settings.command:
        container["command"] = list(settings.command)
    resources = _resources(pool)
    if resources:
        container["resources"] = resources
    return container


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _probe(path: str, *, period_seconds: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _security(pool: OmniPool) -> dict[str, Any]:
    """The least that the isolation level needs.

    Models run under user ids of their own, so the agent is root in its container, with the capabilities to change users
    and files. For `namespaces` it makes user namespaces, which the default seccomp profile and AppArmor deny; nothing
    else is added: with user namespaces no capability of the node is needed.
    """
    security: dict[str, Any] = {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "capabilities": {
            "drop": ["ALL"],
            "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID"],
        },
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if pool.spec.isolation.level == "namespaces":
        security["seccompProfile"] = {"type": "Unconfined"}
        security["appArmorProfile"] = {"type": "Unconfined"}
        security["capabilities"]["add"] = sorted([*security["capabilities"]["add"], "SETFCAP", "SYS_CHROOT"])
    return security


def privilege_of(pool: OmniPool) -> str:
    """Why no Pod Security Standard but `privileged` admits its pods; empty where `baseline` does."""
    if pool.spec.isolation.level == "namespaces":
        return "isolation level namespaces"
    return "a folder of the node" if uses_node_folders(pool) else ""


def _resources(pool: OmniPool) -> dict[str, Any]:
    asked = pool.spec.pod.resources if pool.spec.pod else None
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    # Without a request its processor time is what all others on the node leave.
    cores = DEVICE_CORES * pool.spec.device.count if asked is None or asked.cpu is None else parse_cpu(asked.cpu)
    requests["cpu"] = _cores(cores)
    if asked is not None and asked.memory is not None:
        requests["memory"] = limits["memory"] = memory_quantity(parse_bytes(asked.memory))
    if pool.spec.device.type == "cuda":
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = str(pool.spec.device.count)
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _cores(cores: Fraction) -> str:
    millis = round(cores * 1000)
    return str(millis // 1000) if millis % 1000 == 0 else f"{millis}m"


def _body(pool: OmniPool, spec: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": pool.metadata.name,
        "namespace": pool.metadata.namespace,
        "labels": {**selector_of(pool), **MANAGED},
        "annotations": {APPLIED: _digest(spec)},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": "OmniPool",
                "name": pool.metadata.name,
                "uid": pool.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }
    return {"metadata": metadata, "spec": spec}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Paths at which an object lacks what is wanted; what it has beyond it is its own affair.

    Lists of named things are compared by name, other lists as a whole.
    """
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return [path]
        return [
            difference
            for key, value in wanted.items()
            for difference in differences(value, found.get(key), f"{path}.{key}")
        ]
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(found, Sequence) or isinstance(found, str):
            return [] if not wanted and found is None else [path]
        key = next(
            (key for key in ("name", "uid") if wanted and all(isinstance(w, Mapping) and key in w for w in wanted)), ""
        )
        if key:
            there = {item.get(key): item for item in found if isinstance(item, Mapping)}
            return [
                difference
                for item in wanted
                for difference in differences(item, there.get(item[key]), f"{path}[{item[key]}]")
            ]
        if len(wanted) != len(found):
            return [path]
        return [
            difference
            for index, (item, other) in enumerate(zip(wanted, found, strict=True))
            for difference in differences(item, other, f"{path}[{index}]")
        ]
    return [] if wanted == found else [path]


def owned_by(item: Mapping[str, Any], uid: str) -> bool:
    """Whether an object's controller is the one with a uid."""
    return any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or ())
