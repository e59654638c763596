"""Which Pod Security Standard the namespace of a pool may enforce, by a real API server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.connection import ClusterError, Connection
from omnimodel.api import OmniPool
from omnimodel.controllers.kubernetes_children import AgentSettings, build_stateful_set, privilege_of

pytestmark = pytest.mark.cluster_api
IMAGE = {"reference": "registry.example.org/voices:1"}
ENFORCE = "pod-security.kubernetes.io/enforce"


def is_admitted(cluster: Connection, namespace: str, pool: OmniPool, level: str) -> bool:
    """Whether its pods are made in a namespace that enforces a level."""
    cluster.kubectl("label", "namespace", namespace, f"{ENFORCE}={level}", "--overwrite")
    template = build_stateful_set(pool, AgentSettings(), 1).body["spec"]["template"]
    metadata = {**template["metadata"], "name": "tried", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}
    try:
        cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    except ClusterError as error:
        if f'violates PodSecurity "{level}:latest"' not in error.stderr:
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("spec", "level"),
    [
        pytest.param({}, "baseline", id="as it is made"),
        pytest.param({"volumes": [{"name": "a", "image": IMAGE}]}, "baseline", id="an image"),
        pytest.param(
            {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "a"}}]}, "baseline", id="a claim"
        ),
        pytest.param({"store": {"persistentVolumeClaim": {"claimName": "a"}}}, "baseline", id="a store in a claim"),
        pytest.param({"volumes": [{"name": "a", "path": "/srv/a"}]}, "privileged", id="a folder of the node"),
        pytest.param({"store": {"path": "/srv/a"}}, "privileged", id="a store in a folder of the node"),
        pytest.param({"store": {"published": [{"name": "a", "path": "/srv/a"}]}}, "privileged", id="one that is read"),
        pytest.param({"isolation": {"level": "namespaces"}}, "privileged", id="isolation by namespaces"),
    ],
)
def test_the_pods_of_a_pool_need_of_their_namespace(
    api_cluster: Connection, namespace: str, spec: dict[str, Any], level: str
) -> None:
    for _ in api_cluster.until(30):  # pods run under an account that a controller makes
        if api_cluster.kubectl("get", "serviceaccount", "default", "-n", namespace, "--ignore-not-found"):
            break
    pool = OmniPool.model_validate({"metadata": {"name": "gpu", "namespace": namespace, "uid": "u"}, "spec": spec})
    assert ("privileged" if privilege_of(pool) else "baseline") == level
    admitted = [
        one for one in ("restricted", "baseline", "privileged") if is_admitted(api_cluster, namespace, pool, one)
    ]
    assert admitted == (["privileged"] if level == "privileged" else ["baseline", "privileged"])
