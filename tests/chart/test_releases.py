"""Releases on an API server: installed, upgraded, rolled back, uninstalled, installed anew, and two beside each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.builders import MODEL
from chart.chart import CHART, options
from cluster.cluster import Cluster
from cluster.connection import ClusterError

pytestmark = pytest.mark.cluster_api
MODELS = "omnimodels.omnimodel.io"


@pytest.fixture
def place(own_cluster: Cluster) -> Iterator[str]:
    """A namespace that takes restricted pods only; all releases in it and the CRDs are gone after the test."""
    own_cluster.kubectl("create", "namespace", "omni-system")
    own_cluster.kubectl("label", "namespace", "omni-system", "pod-security.kubernetes.io/enforce=restricted")
    yield "omni-system"
    for release in releases(own_cluster):
        own_cluster.helm("uninstall", release["name"], "-n", release["namespace"])
    own_cluster.kubectl("delete", "crds", "--all", "--wait")
    own_cluster.kubectl("delete", "namespace", "omni-system", "--wait")


def releases(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.helm("list", "-A", "-o", "json"))
    return found


def install(cluster: Cluster, namespace: str, *more: str, chart: Path = CHART, name: str = "omni") -> str:
    return cluster.helm("upgrade", "--install", name, str(chart), "-n", namespace, *more)


def older(folder: Path) -> Path:
    """The chart as a version before it might have been: with fewer fields, and another number of gateways."""
    chart = folder / "omnimodel"
    shutil.copytree(CHART, chart)
    head = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**head, "version": "0.0.9", "appVersion": "0.0.9"}))
    definition = chart / "files/crds/omnimodels.yaml"
    content = yaml.safe_load(definition.read_text())
    spec = content["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["suspend"], spec["description"]
    # The template finds the head of a definition by its line.
    definition.write_text(yaml.safe_dump(content, sort_keys=False))
    values = chart / "values.yaml"
    values.write_text(values.read_text().replace("gateway:\n  replicas: 2", "gateway:\n  replicas: 1"))
    return chart


def described(cluster: Cluster) -> set[str]:
    """Fields of a model's spec that the API server knows."""
    definition = cluster.get("crd", MODELS)
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return set(schema["properties"])


def gateways(cluster: Cluster, namespace: str) -> int:
    return int(cluster.get("deployment", "omni-omnimodel-gateway", "-n", namespace)["spec"]["replicas"])


def test_pods_are_made_where_only_restricted_ones_are(own_cluster: Cluster, place: str) -> None:
    install(own_cluster, place)
    for _ in own_cluster.until(60):
        pods = own_cluster.get("pods", "-n", place)["items"]
        components = sorted(pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods)
        if components == ["gateway", "gateway", "operator", "operator"]:
            break


def test_the_notes_say_what_to_do_next(own_cluster: Cluster, place: str) -> None:
    notes = install(own_cluster, place)
    assert f"kubectl apply -n {place} -f examples/catalog/" in notes
    assert f"helm test omni -n {place}" in notes


def test_an_upgrade_brings_new_fields_and_a_rollback_takes_everything_back(
    own_cluster: Cluster, place: str, tmp_path: Path
) -> None:
    install(own_cluster, place, chart=older(tmp_path))
    before = described(own_cluster)
    own_cluster.apply({**MODEL, "metadata": {"name": "tiny", "namespace": place}})
    uid = own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"]
    assert gateways(own_cluster, place) == 1
    install(own_cluster, place)
    assert described(own_cluster) - before == {"suspend", "description"}
    assert gateways(own_cluster, place) == 2
    own_cluster.helm("rollback", "omni", "1", "-n", place)
    assert described(own_cluster) == before
    assert gateways(own_cluster, place) == 1
    assert own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"] == uid


def test_the_same_upgrade_twice_changes_no_object(own_cluster: Cluster, place: str) -> None:
    install(own_cluster, place)
    before = generations(own_cluster, place)
    install(own_cluster, place)
    assert generations(own_cluster, place) == before


def generations(cluster: Cluster, namespace: str) -> dict[str, int]:
    kinds = "deployments,services,networkpolicies,poddisruptionbudgets,crds,validatingadmissionpolicies"
    items = cluster.get(kinds, "-n", namespace)["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"].get("generation", 0) for item in items}


def test_models_outlive_the_release_and_are_there_when_it_comes_back(own_cluster: Cluster, place: str) -> None:
    install(own_cluster, place)
    own_cluster.apply({**MODEL, "metadata": {"name": "tiny", "namespace": place}})
    uid = own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"]
    own_cluster.helm("uninstall", "omni", "-n", place)
    assert own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"] == uid
    left = "deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets"
    selected = ["-l", "app.kubernetes.io/instance=omni"]
    assert own_cluster.get(left, "-A", *selected)["items"] == []
    cluster_wide = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
    assert own_cluster.get(cluster_wide, *selected)["items"] == []
    install(own_cluster, place)
    assert own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"] == uid


def test_two_releases_in_two_namespaces(own_cluster: Cluster, place: str) -> None:
    own_cluster.kubectl("create", "namespace", "omni-other")
    install(own_cluster, place, *options({"namespaces": [place]}))
    with pytest.raises(ClusterError, match="CustomResourceDefinition"):
        install(own_cluster, "omni-other", *options({"namespaces": ["omni-other"]}))
    second = {"namespaces": ["omni-other"], "crds": {"install": False}}
    install(own_cluster, "omni-other", *options(second))
    assert {release["namespace"] for release in releases(own_cluster)} == {place, "omni-other"}
    own_cluster.helm("uninstall", "omni", "-n", place)
    assert gateways(own_cluster, "omni-other") == 2
    own_cluster.helm("uninstall", "omni", "-n", "omni-other")
    own_cluster.kubectl("delete", "namespace", "omni-other", "--wait=false")
