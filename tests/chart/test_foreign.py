"""Objects whose definitions are of other projects, and pods that the operator makes: that what the chart says fits."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from api.builders import POOL
from chart.chart import FOREIGN, called, objects, template
from cluster.cluster import Cluster
from cluster.connection import ClusterError, Connection
from omnimodel.api import OmniPool
from omnimodel.controllers.kubernetes_children import AgentSettings, build_stateful_set
from omnimodel.controllers.kubernetes_health import Hearing, Numbers
from omnimodel.gateway.measures import Measures
from omnimodel.gateway.routing_measures import RoutingMeasures

pytestmark = [pytest.mark.cluster_api, pytest.mark.slow]  # what makes the definitions is built first
HERE = Path(__file__).parent
ROUTES = "sigs.k8s.io/gateway-api"
ROUTE = "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"
MONITORS = "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring"
GENERATOR = "sigs.k8s.io/controller-tools"


class Module:
    """A folder whose go.mod and go.sum pin modules of others.

    Args:
        folder: beside this file.
    """

    def __init__(self, folder: str) -> None:
        self._folder = HERE / folder

    def go(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What the command said, whether it failed or not."""
        environment = {**os.environ, "GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0"}
        command = [shutil.which("go") or "", *arguments]
        return subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, check=False, timeout=500
        )

    def fetch(self, *modules: str) -> Path:
        """Where the last of some modules is; skips the test where they cannot be had."""
        if shutil.which("go") is None:
            pytest.skip(f"no Go to fetch {' and '.join(modules)} with: install Go")
        for module in modules:
            done = self.go("mod", "download", "-json", module)
            if done.returncode:
                pytest.skip(f"{module} cannot be fetched: {done.stdout}{done.stderr}")
        return Path(json.loads(done.stdout)["Dir"])


def define(cluster: Cluster, *paths: Path) -> None:
    """Apply definitions, and wait until they are served."""
    files = [option for path in paths for option in ("-f", str(path))]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *files)


@pytest.fixture(scope="module")
def routes(own_cluster: Cluster) -> None:
    """The definition of HTTPRoute, from the Gateway API's own module."""
    define(own_cluster, Module("foreign").fetch(ROUTES) / ROUTE)


@pytest.fixture(scope="module")
def monitors(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The definitions of the Prometheus operator, made of its own types by what it makes them with itself."""
    module, folder = Module("monitors"), tmp_path_factory.mktemp("monitors")
    module.fetch(GENERATOR, MONITORS)
    done = module.go("tool", "controller-gen", "crd:maxDescLen=0", f"paths={MONITORS}/v1", f"output:crd:dir={folder}")
    assert done.returncode == 0, done.stderr
    define(own_cluster, *(folder / f"monitoring.coreos.com_{plural}.yaml" for plural in MONITORED.values()))


def take(cluster: Cluster, item: dict[str, Any]) -> None:
    """Have the API server look whether it would take an object, and whether it knows all of its fields.

    Raises:
        ClusterError: it would not, or does not.
    """
    options = ["--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]
    assert "serverside-applied" in cluster.kubectl("apply", *options, stdin=json.dumps(item))


@pytest.mark.usefixtures("routes")
def test_an_api_server_takes_the_route(own_cluster: Cluster) -> None:
    (route,) = called(objects(template(own_cluster, FOREIGN, namespace="default")), "HTTPRoute")
    take(own_cluster, route)


MONITORED = {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}


@pytest.mark.usefixtures("monitors")
@pytest.mark.parametrize("kind", MONITORED)
def test_an_api_server_takes_the_monitor(own_cluster: Cluster, kind: str) -> None:
    (monitor,) = called(objects(template(own_cluster, FOREIGN, namespace="default")), kind)
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    take(own_cluster, monitor)


@pytest.mark.usefixtures("monitors")
def test_an_api_server_refuses_what_no_monitor_has(own_cluster: Cluster) -> None:
    """Were these definitions so wide that they take anything, what they take would prove nothing."""
    (monitor,) = called(objects(template(own_cluster, FOREIGN, namespace="default")), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    endpoint["interval"] = "half a minute"
    with pytest.raises(ClusterError, match="interval"):
        take(own_cluster, monitor)
    endpoint["interval"], endpoint["intervall"] = "30s", "30s"
    with pytest.raises(ClusterError, match="intervall"):
        take(own_cluster, monitor)


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
