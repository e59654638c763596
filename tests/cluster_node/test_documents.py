"""docs/kubernetes.md and the README's part on Kubernetes, followed word by word on a fresh cluster.

What is different here from a reader's cluster: images come from this machine instead of a registry, pods see its
environment instead of bringing torch along, and the package index is one that the test serves on the node's link.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cluster.cluster import Cluster
from cluster.connection import ClusterError
from cluster.fixtures import GIVEN, missing
from cluster.images import build, recipe
from cluster_node.index import PackageIndex, package_index
from cluster_node.reports import report
from cluster_node.securities import changed
from example_models import MODELS
from omnimodel.controllers.status import residency_entry
from omnimodel.protocol.report import ModelReport, ProcessReport

pytestmark = [
    pytest.mark.cluster_node,
    pytest.mark.models,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(GIVEN in os.environ, reason="the documents install into a cluster of their own"),
]
ROOT = Path(__file__).parents[2]
NAMESPACE = "omnimodel"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMPARED = ("tier", "deviceBytes", "weightsBytes", "workingBytes")  # counters are written with the next change of these


def blocks(path: str, part: str = "") -> list[str]:
    """The commands of a document, or of one part of it."""
    text = (ROOT / path).read_text()
    if part:
        text = text[text.index(f"\n## {part}\n") + 1 :].partition("\n## ")[0]
    return BLOCK.findall(text)


def lines(path: str, part: str = "") -> list[str]:
    """The same, a command a line."""
    text = "".join(blocks(path, part)).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines()]


class Reader:
    """Someone at a shell, with kubectl, helm and the plugin on the search path."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.figures: dict[str, float] = {}

    def run(self, text: str) -> str:
        """What a block of commands prints; each of them must succeed."""
        command = text.replace("registry.example.org/", "localhost/")
        path = f"{self.cluster.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "KUBECONFIG": str(self.cluster.kubeconfig)}
        shell = ["bash", "-e", "-m", "-o", "pipefail", "-c", command]
        done = subprocess.run(shell, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node on which nothing is installed, with the images that the document has built."""
    if why_not := missing("node"):
        pytest.skip(why_not)
    shared = recipe().mounted()
    with Cluster(tmp_path_factory.mktemp("documents") / "cluster", "node", shared=shared, orphans=False) as cluster:
        assert build(cluster, tmp_path_factory.mktemp("images"), "0.1.0") is not None
        yield cluster


@pytest.fixture(scope="module")
def index(cluster: Cluster) -> Iterator[PackageIndex]:
    """The only way to packages."""
    host = f"10.203.{cluster.number}.1"
    with package_index(host) as index:
        variables = {"PIP_INDEX_URL": index.url, "PIP_TRUSTED_HOST": host}
        env = [{"name": name, "value": value} for name, value in variables.items()]
        changes = {"/spec/runtimeClassName": "machine", "/spec/containers/0/env/-": env}
        with changed(cluster, "agents-here", {"app.kubernetes.io/name": "omnimodel-agent"}, changes):
            yield index


@pytest.fixture(scope="module")
def reader(cluster: Cluster, index: PackageIndex) -> Reader:
    return Reader(cluster)


def commands(path: str, part: str, containing: str) -> str:
    """The one block of a part in which a word occurs."""
    (found,) = [block for block in blocks(path, part) if containing in block]
    return found


def until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(1)


def models(reader: Reader) -> dict[str, Any]:
    """Every model of the cluster by its name."""
    return {item["metadata"]["name"]: item for item in reader.cluster.get("omnimodels", "-n", NAMESPACE)["items"]}


def ready(reader: Reader) -> list[str]:
    """Models that are Ready."""
    return [
        name
        for name, item in models(reader).items()
        if any(
            one["type"] == "Ready" and one["status"] == "True" for one in item.get("status", {}).get("conditions", [])
        )
    ]


def test_the_catalogue_is_installed_and_ready(
    reader: Reader, record_testsuite_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    reader.run(commands("docs/kubernetes.md", "Install", "helm install"))
    record_testsuite_property("installed_seconds", round(time.monotonic() - began, 1))
    apply = commands("docs/kubernetes.md", "Install", "kubectl wait").splitlines(keepends=True)
    reader.run(apply[0])
    until(lambda: bool(ready(reader)), 900)
    with suppress(AssertionError):  # it may be evicted for the check of another, and then held
        reader.run(f"kubectl omni -n {NAMESPACE} check {ready(reader)[0]}")
    record_testsuite_property("first_answer_seconds", round(time.monotonic() - began, 1))
    said = reader.run("".join(apply[1:]))
    record_testsuite_property("all_ready_seconds", round(time.monotonic() - began, 1))
    assert set(ready(reader)) == set(MODELS)
    assert all(name in said for name in MODELS)


def test_each_model_gives_its_known_answer_through_the_service(reader: Reader) -> None:
    said = reader.run(commands("docs/kubernetes.md", "Install", "helm test"))
    assert all(f"passed   {NAMESPACE}/{name}" in said for name in MODELS)


def test_a_chat_is_answered(reader: Reader) -> None:
    assert "Paris" in reader.run(commands("docs/kubernetes.md", "Ask", "port-forward"))


def test_the_status_says_what_the_ledger_says(reader: Reader) -> None:
    """Byte for byte, for every model, once nothing moves."""

    def differences() -> dict[str, Any]:
        said = report(reader.cluster, NAMESPACE, "default-0")
        found = {}
        for name, item in models(reader).items():
            model = dict(said["models"][f"{NAMESPACE}/{name}"])
            process = model.pop("process")
            told = ModelReport(**model, process=ProcessReport(**process) if process else None)
            wanted = residency_entry("default-0", told)
            (entry,) = item["status"]["residency"]
            wrong = {field: (entry[field], wanted[field]) for field in COMPARED if entry[field] != wanted[field]}
            found |= {name: wrong} if wrong else {}
        pool = reader.cluster.get("omnipool", "default", "-n", NAMESPACE)["status"]
        for field, key in (("residentBytes", "resident_bytes"), ("footprintBytes", "footprint_bytes")):
            if pool[field] != said["pool"][key]:
                found[field] = (pool[field], said["pool"][key])
        return found

    with suppress(AssertionError):
        until(lambda: not differences(), 90)
    assert differences() == {}


def test_what_there_is_to_look_at(reader: Reader) -> None:
    said = reader.run(commands("docs/kubernetes.md", "Look and steer", "kubectl omni"))
    assert "smollm2" in said
    assert "Ready" in said


def test_another_token_of_agents_costs_no_request(reader: Reader) -> None:
    reader.run(commands("docs/kubernetes.md", "Namespaces and rights", "openssl"))
    assert "passed" in reader.run(f"kubectl omni -n {NAMESPACE} check smollm2")


def test_a_pool_is_scaled_the_chart_upgraded_and_everything_removed(reader: Reader) -> None:
    for part in ("replicas=2", "replicas=1", "helm upgrade", "helm uninstall"):
        try:
            reader.run(commands("docs/kubernetes.md", "Change", part))
        except ClusterError as error:
            pytest.fail(str(error))
    left = reader.cluster.kubectl("get", "all,leases", "-A", "-l", "app.kubernetes.io/part-of=omnimodel", "-o", "name")
    assert left == ""


def test_the_readme_says_the_same() -> None:
    said = lines("README.md", "On Kubernetes")
    assert [line for line in lines("docs/kubernetes.md") if line in said] == said
