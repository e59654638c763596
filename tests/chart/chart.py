"""The chart as tests use it: rendered, and installed as releases of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.connection import Connection

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "omnimodel"
# Everything that is off by itself, but what needs definitions that no test cluster has.
EVERYTHING: dict[str, Any] = {
    "namespaces": ["team-a", "team-b"],
    "images": {
        "operator": {"repository": "example/operator", "digest": f"sha256:{'a' * 64}"},
        "agent": {"repository": "example/agent", "tag": "1.2.3"},
        "pullSecrets": [{"name": "registry"}],
    },
    "operator": {
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"team": "search"},
        "podAnnotations": {"note": "x"},
    },
    "gateway": {
        "location": {"region": "eu", "zone": "eu-1"},
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"note": "x"}},
        "ingress": {
            "enabled": True,
            "className": "public",
            "annotations": {"note": "x"},
            "hosts": ["models.example.org"],
            "tls": [{"secretName": "models", "hosts": ["models.example.org"]}],
        },
    },
    "test": {"models": ["smollm2", "team-a/tiny"]},
}
FOREIGN: dict[str, Any] = {
    "gateway": {
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["models.example.org"]}
    },
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    },
}


def options(values: Mapping[str, Any]) -> list[str]:
    """Values as options of helm."""
    return [option for name, value in values.items() for option in ("--set-json", f"{name}={json.dumps(value)}")]


def template(
    helm: Connection,
    values: Mapping[str, Any] | None = None,
    name: str = "omni",
    namespace: str = "omni-system",
    version: str = "1.37.0",
) -> str:
    """What `helm template` prints for a version of Kubernetes."""
    place = ("--namespace", namespace, "--kube-version", version)
    return helm.helm("template", name, str(CHART), *place, *options(values or {}))


def objects(rendered: str) -> list[dict[str, Any]]:
    """The objects of what was rendered."""
    return [document for document in yaml.safe_load_all(rendered) if document]


def called(documents: list[dict[str, Any]], kind: str, name: str = "") -> Iterator[dict[str, Any]]:
    """Those of a kind, with this in their name."""
    return (one for one in documents if one["kind"] == kind and name in one["metadata"]["name"])
