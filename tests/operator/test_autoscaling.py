"""A HorizontalPodAutoscaler of the cluster scales a pool, and the operator leaves the number to it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from cluster.cluster import Cluster
from cluster.connection import Connection
from kube.agents import Agents
from kube.world import World, is_ready, model, pool, until
from omnimodel.kube import POOLS, SERVICES, STATEFUL_SETS, Kind

pytestmark = pytest.mark.cluster_api
SCALERS = Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
SERVERS = Kind("apiregistration.k8s.io", "v1", "apiservices", "APIService", namespaced=False)
GROUP = "external.metrics.k8s.io"
METRIC = "waiting"
TARGET = 10


class Metrics:
    """A server of the API of external metrics, as an adapter for Prometheus is one."""

    def __init__(self) -> None:
        self.waiting = TARGET

    async def answer(self, request: web.Request) -> web.Response:
        parts = [part for part in request.path.split("/") if part]
        group = f"{GROUP}/v1beta1"
        if len(parts) == 3:
            verbs = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            return web.json_response({"kind": "APIResourceList", "groupVersion": group, "resources": [verbs]})
        item = {"metricName": METRIC, "value": str(self.waiting), "timestamp": "2026-01-01T00:00:00Z"}
        return web.json_response({"kind": "ExternalMetricValueList", "apiVersion": group, "items": [item]})


@pytest.fixture
async def metrics(world: World, api_cluster: Connection) -> AsyncIterator[Metrics]:
    """What the cluster asks for metrics, a server of this test."""
    if not isinstance(api_cluster, Cluster):
        pytest.skip("a cluster that was given does not reach servers of tests")
    found = Metrics()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(api_cluster.folder / "api.crt", api_cluster.folder / "api.key")
    app = web.Application()
    app.router.add_get("/{path:.*}", found.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    service = {
        "metadata": {"name": "metrics", "namespace": world.namespace},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }
    await world.kube.create(SERVICES, service)
    spec = {
        "group": GROUP, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
        "service": {"name": "metrics", "namespace": world.namespace, "port": port}, "insecureSkipTLSVerify": True,
    }  # fmt: skip
    await world.kube.create(SERVERS, {"metadata": {"name": f"v1beta1.{GROUP}"}, "spec": spec})
    yield found
    await world.kube.delete(SERVERS, f"v1beta1.{GROUP}")
    await runner.cleanup()


def scaler(namespace: str) -> dict[str, Any]:
    """At most three pods, by how many requests wait; back at once."""
    metric = {"metric": {"name": METRIC}, "target": {"type": "Value", "value": str(TARGET)}}
    return {
        "metadata": {"name": "gpu", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniPool", "name": "gpu"},
            "minReplicas": 1, "maxReplicas": 3,
            "metrics": [{"type": "External", "external": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }  # fmt: skip


async def test_an_autoscaler_and_the_operator_do_not_fight(
    world: World, agents: Agents, start, metrics: Metrics
) -> None:
    """LLMKube#484: 41 changes of the number in 14 minutes."""
    await start()
    await world.apply(pool("gpu", world.namespace, replicas=1), model("a", world.namespace))
    await world.ready("a")
    asked = [1]

    def note(key: tuple[str, str], _: object, item: dict[str, Any] | None) -> None:
        if item is not None and asked[-1] != item["spec"]["replicas"]:
            asked.append(item["spec"]["replicas"])

    world.mirrors[POOLS]._on_change = note
    metrics.waiting = 3 * TARGET  # for each of the pods that the selector finds
    await world.kube.create(SCALERS, scaler(world.namespace))
    try:
        await until(lambda: world.see(STATEFUL_SETS, "gpu")["spec"]["replicas"] == 3, "three pods are asked for")
    except AssertionError:
        raise AssertionError((await world.kube.get(SCALERS, "gpu", world.namespace))["status"]) from None
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "three pods serve")
    # What a person says of the rest of the pool takes nothing from the autoscaler.
    await world.kube.merge(POOLS, "gpu", world.namespace, {"spec": {"overcommit": {"limit": 50}}})
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the edit is seen")
    metrics.waiting = TARGET // 3
    await until(lambda: world.see(STATEFUL_SETS, "gpu")["spec"]["replicas"] == 1, "one is enough")
    await world.ready("a")
    assert (asked[:2], asked[-1]) == ([1, 3], 1)
    assert asked == sorted(asked[:2]) + sorted(asked[2:], reverse=True), "up once, and down once"
    for entry in (await world.kube.get(POOLS, "gpu", world.namespace))["metadata"]["managedFields"]:
        assert entry["manager"] != "omni-operator" or entry.get("subresource") == "status"


async def test_a_pool_without_a_number_is_given_one_that_no_manifest_takes_back(
    world: World, agents: Agents, start, metrics: Metrics, api_cluster: Connection
) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace))
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "its pod serves")
    await world.kube.create(SCALERS, scaler(world.namespace))

    async def told() -> str:
        found = await world.kube.get(SCALERS, "gpu", world.namespace)
        able = [c for c in (found.get("status") or {}).get("conditions") or () if c["type"] == "AbleToScale"]
        return able[0]["message"] if able and able[0]["status"] == "False" else ""

    assert ".spec.replicas" in await until(told, "the autoscaler says why")
    metrics.waiting = 3 * TARGET
    await asyncio.to_thread(api_cluster.kubectl, "scale", "omnipool/gpu", "--replicas=1", "-n", world.namespace)
    await until(lambda: world.see(STATEFUL_SETS, "gpu")["spec"]["replicas"] == 3, "with one it can")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "three pods serve")
    await world.apply(pool("gpu", world.namespace, overcommit={"limit": 50}))
    await asyncio.to_thread(api_cluster.apply, pool("gpu", world.namespace, overcommit={"limit": 60}))
    await until(lambda: world.see(POOLS, "gpu")["spec"]["overcommit"] == {"limit": 60}, "both edits")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "both edits are seen")
    assert world.see(POOLS, "gpu")["spec"]["replicas"] == 3
