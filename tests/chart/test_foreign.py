"""Objects whose definitions are of other projects, and pods that the operator makes: that what the chart says fits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from api.builders import POOL
from chart.chart import FOREIGN, called, objects, template
from cluster.connection import Connection
from omnimodel.api import OmniPool
from omnimodel.controllers.kubernetes_children import AgentSettings, build_stateful_set
from omnimodel.controllers.kubernetes_health import Hearing, Numbers
from omnimodel.gateway.measures import Measures
from omnimodel.gateway.routing_measures import RoutingMeasures

pytestmark = pytest.mark.cluster_api
MODULE = Path(__file__).parent / "foreign"  # pins the version of what is asked for, and its checksum
ROUTES = "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"


@pytest.fixture(scope="module")
def routes(api_cluster: Connection) -> Iterator[None]:
    """The definition of HTTPRoute, from the Gateway API's own module."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go to fetch the definitions of the Gateway API with: install Go")
    command = [go, "mod", "download", "-json", "sigs.k8s.io/gateway-api"]
    done = subprocess.run(command, cwd=MODULE, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.skip(f"the definitions of the Gateway API cannot be fetched: {done.stdout}{done.stderr}")
    path = Path(json.loads(done.stdout)["Dir"]) / ROUTES
    api_cluster.kubectl("apply", "--server-side", "-f", str(path))
    api_cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(path))
    yield
    api_cluster.kubectl("delete", "-f", str(path))


@pytest.mark.usefixtures("routes")
def test_an_api_server_takes_the_route(api_cluster: Connection, namespace: str) -> None:
    (route,) = called(objects(template(api_cluster, FOREIGN, namespace=namespace)), "HTTPRoute")
    options = ["--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]
    assert "serverside-applied" in api_cluster.kubectl("apply", *options, stdin=json.dumps(route))


def keys(node: Any, path: str = "") -> Iterator[str]:
    """Where there is a value, in dots; items of a list are all one."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield from keys(child, f"{path}.{name}")
    elif isinstance(node, list):
        for child in node:
            yield from keys(child, f"{path}[]")
    else:
        yield path


# As the API reference of the Prometheus operator has them; its definitions are in no package that could be fetched.
MONITORS = {
    "ServiceMonitor": r"\.selector\.matchLabels\..+|\.namespaceSelector\.matchNames\[\]|\.endpoints\[\]\.(port|path|interval)",
    "PodMonitor": r"\.selector\.matchLabels\..+|\.namespaceSelector\.matchNames\[\]|\.podMetricsEndpoints\[\]\.(port|path|interval)",
    "PrometheusRule": r"\.groups\[\]\.name|\.groups\[\]\.rules\[\]\.(alert|expr|for|labels\.severity|annotations\.(summary|description))",
}  # fmt: skip


@pytest.mark.parametrize("kind", MONITORS)
def test_monitors_have_the_fields_that_there_are(api_cluster: Connection, kind: str) -> None:
    (monitor,) = called(objects(template(api_cluster, FOREIGN)), kind)
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert [key for key in keys(monitor["spec"]) if not re.fullmatch(MONITORS[kind], key)] == []


def metrics() -> set[str]:
    """Names of everything that operator and gateway measure."""
    registry = CollectorRegistry()
    nothing = SimpleNamespace(models=list, objects=lambda _: [])
    Measures(registry, nothing, nothing)  # type: ignore[arg-type]
    RoutingMeasures(registry)
    numbers = Numbers({}, Hearing(), lambda: 0, lambda: True, dict)
    families = [*registry.collect(), *numbers.registry.collect()]
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def test_alerts_are_about_metrics_that_there_are(api_cluster: Connection) -> None:
    (rule,) = called(objects(template(api_cluster, FOREIGN)), "PrometheusRule")
    alerts = [alert for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert len(alerts) == 5
    for alert in alerts:
        named = set(re.findall(r"omni_[a-z_]+", alert["expr"]))
        assert named
        assert named <= metrics(), alert["alert"]


def test_policies_and_monitors_are_of_the_pods_that_the_operator_makes(api_cluster: Connection) -> None:
    child = build_stateful_set(OmniPool.model_validate(POOL), AgentSettings(), 1)
    pod = child.body["spec"]["template"]
    (container,) = (each for each in pod["spec"]["containers"] if each["name"] == "agent")
    ports = {port["name"] for port in container["ports"]}
    documents = objects(template(api_cluster, FOREIGN))
    (policy,) = called(documents, "NetworkPolicy", "agent")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} <= ports
    (monitor,) = called(documents, "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
