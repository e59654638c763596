"""The clusters that tests run on: built and started once a session, or the one that OMNI_TEST_KUBECONFIG names.

`api_cluster` has an API server and controllers, but no nodes; `node_cluster` runs real pods. In both the CRDs are
applied, and `namespace` is one of the test's own. A cluster of someone's keeps everything else that is in it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cluster import Cluster, Level
from cluster.connection import ClusterError, Connection
from cluster.images import GIVEN_AGENT, GIVEN_OPERATOR, Images, build, given, recipe

ROOT = Path(__file__).parents[2]
GIVEN = "OMNI_TEST_KUBECONFIG"
KINDS = ("omnimodels", "omnipools", "omniprocesses")


def missing(level: Level) -> str:
    """Why no cluster of this level can be started here, as a sentence; empty when it can."""
    if shutil.which("go") is None:
        return f"no Go to build a cluster with: install Go, or name a cluster in {GIVEN}"
    if level == "node" and os.geteuid() != 0:
        return f"a cluster with a node needs root: run as root, or name a cluster in {GIVEN}"
    return ""


def install_crds(cluster: Connection) -> None:
    """Apply the CRDs and wait until the API server serves them."""
    # kubectl keeps what client-side apply applied in an annotation, and refuses what is too large for one.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    names = [f"crd/{kind}.omnimodel.io" for kind in KINDS]
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", *names)


def running(level: Level, folder: Path) -> Iterator[Connection]:
    """A cluster with the CRDs: the one given, or one that is started in the folder and ended with the session."""
    kubeconfig = os.environ.get(GIVEN, "")
    if kubeconfig:
        cluster = Connection.given(Path(kubeconfig))
        install_crds(cluster)
        yield cluster
        return
    why_not = missing(level)
    if why_not:
        pytest.skip(why_not)
    shared = recipe().mounted() if level == "node" else ()
    with Cluster(folder, level, shared=shared, orphans=False) as started:
        install_crds(started)
        yield started


@pytest.fixture(scope="session")
def api_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """etcd, kube-apiserver and kube-controller-manager, with the CRDs. The first build takes minutes."""
    yield from running("api", tmp_path_factory.mktemp("api") / "cluster")


@pytest.fixture(scope="session")
def node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """A cluster with one node, which runs real pods, with the CRDs."""
    yield from running("node", tmp_path_factory.mktemp("node") / "cluster")


@pytest.fixture(scope="session")
def pod_images(node_cluster: Connection, tmp_path_factory: pytest.TempPathFactory) -> Images:
    """Images of the operator and of the agent that nodes of `node_cluster` have."""
    found = given() or build(node_cluster, tmp_path_factory.mktemp("images"))
    if found is None:
        pytest.skip(f"no images for the cluster that was given: name them in {GIVEN_OPERATOR} and {GIVEN_AGENT}")
    return found


def own_namespace(cluster: Connection) -> Iterator[str]:
    """A namespace of the API server that is deleted after the test, without waiting for it."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture
def namespace(api_cluster: Connection) -> Iterator[str]:
    """A namespace of the test's own in `api_cluster`."""
    yield from own_namespace(api_cluster)


@pytest.fixture
def node_namespace(node_cluster: Connection) -> Iterator[str]:
    """A namespace of the test's own in `node_cluster`."""
    yield from own_namespace(node_cluster)


__all__ = ["ClusterError", "api_cluster", "namespace", "node_cluster", "node_namespace", "pod_images"]
