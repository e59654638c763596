"""The chart on a node that runs real pods: installed, a pool and two models applied, answers through the Service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.chart import CHART, options
from cli.linear import MANIFEST, QUESTION, write_weights
from cluster.connection import Connection
from cluster.images import Images
from cluster.server import Answer, Server, serving
from omnimodel.api import API_VERSION

pytestmark = [pytest.mark.cluster_node, pytest.mark.timeout(600)]
MINUTES = "--timeout=240s"


def repository(image: str) -> dict[str, str]:
    name, _, tag = image.rpartition(":")
    return {"repository": name, "tag": tag}


def linear(name: str, shift: float = 0.0) -> dict[str, Any]:
    """A small model whose weights are in the pool's volume."""
    expected = [6.0 + shift, 22.0 + shift]
    text = MANIFEST.format(name=name, weights="X", shift=shift, expected=expected, sleep_seconds=0.0)
    manifest: dict[str, Any] = yaml.safe_load(text)
    manifest["spec"]["source"] = {"volume": {"name": "models", "subPath": "linear.safetensors"}}
    return manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the node with the weights."""
    folder = tmp_path_factory.mktemp("volume")
    write_weights(folder / "linear.safetensors")
    return folder


@pytest.fixture(scope="module")
def release(node_cluster: Connection, pod_images: Images, folder: Path) -> Iterator[str]:
    """The chart and a pool; the namespace they are in."""
    namespace = "omni-installed"
    values = {
        "images": {
            "operator": repository(pod_images.operator),
            "agent": repository(pod_images.agent),
            "pullPolicy": "Never",
        },
        "crds": {"install": False},
        "gateway": {"drainSeconds": 5},
    }
    node_cluster.helm(
        "install", "omnimodel", str(CHART), "-n", namespace, "--create-namespace", "--wait", MINUTES, *options(values)
    )
    pool = {
        "device": {"type": "cpu", "memory": "256Mi"},
        "volumes": [{"name": "models", "path": str(folder)}],
        "pod": {"runtimeClassName": pod_images.runtime_class} if pod_images.runtime_class else {},
    }
    metadata = {"name": "default", "namespace": namespace}
    node_cluster.apply({"apiVersion": API_VERSION, "kind": "OmniPool", "metadata": metadata, "spec": pool})
    yield namespace
    node_cluster.helm("uninstall", "omnimodel", "-n", namespace)
    node_cluster.kubectl("delete", "namespace", namespace, "--wait", MINUTES)


@pytest.fixture(scope="module")
def models(node_cluster: Connection, release: str) -> tuple[str, str]:
    """Two models that are Ready."""
    names = ("first", "second")
    for name, shift in zip(names, (0.0, 1.0), strict=True):
        manifest = linear(name, shift)
        manifest["metadata"]["namespace"] = release
        node_cluster.apply(manifest)
    node_cluster.kubectl("wait", "omnimodels", "--all", "--for=condition=Ready", "-n", release, MINUTES)
    return names


@pytest.fixture(scope="module")
def server(node_cluster: Connection) -> Iterator[Server]:
    with serving(node_cluster) as server:
        yield server


def ask(server: Server, namespace: str, model: str) -> Answer:
    """A question to a model, through the gateway's Service."""
    service = f"/api/v1/namespaces/{namespace}/services/omnimodel-gateway:http/proxy"
    return server.ask("POST", f"{service}/v2/models/{model}/infer", QUESTION)


def test_models_answer_through_the_service(server: Server, release: str, models: tuple[str, str]) -> None:
    for name, expected in zip(models, ([6.0, 22.0], [7.0, 23.0]), strict=True):
        answer = ask(server, release, name)
        assert answer.ok, answer.body
        assert answer.body["outputs"][0]["data"] == expected


def test_the_status_says_where_a_model_is(
    node_cluster: Connection, server: Server, release: str, models: tuple[str, str]
) -> None:
    assert ask(server, release, models[0]).ok
    for _ in node_cluster.until(60):
        status = node_cluster.get("omnimodel", models[0], "-n", release)["status"]
        entries = status.get("residency", [])
        if entries and entries[0]["tier"] == "resident":
            break
    assert [entry["pod"] for entry in entries] == ["default-0"]
    assert entries[0]["deviceBytes"] > 0
    row = node_cluster.kubectl("get", "omnimodels", models[0], "-n", release, "--no-headers").split()
    assert row[1:3] == ["True", "resident"]


@pytest.mark.usefixtures("models")
def test_helm_test_sends_a_real_request(node_cluster: Connection, release: str) -> None:
    said = node_cluster.helm("test", "omnimodel", "-n", release, "--logs", "--timeout", "180s")
    assert "Phase:          Succeeded" in said
    assert "passed" in said


def test_a_deleted_model_is_gone_and_answers_no_more(node_cluster: Connection, server: Server, release: str) -> None:
    manifest = linear("third")
    manifest["metadata"]["namespace"] = release
    node_cluster.apply(manifest)
    node_cluster.kubectl("wait", "omnimodel/third", "--for=condition=Ready", "-n", release, MINUTES)
    assert ask(server, release, "third").ok
    node_cluster.kubectl("delete", "omnimodel", "third", "-n", release, "--wait", "--timeout=30s")
    for _ in node_cluster.until(30):
        if ask(server, release, "third").status == 404:
            break
    assert node_cluster.get("omniprocesses", "-n", release)["items"] == [] or "third" not in json.dumps(
        [item["metadata"]["name"] for item in node_cluster.get("omniprocesses", "-n", release)["items"]]
    )
