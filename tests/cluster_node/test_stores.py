"""Stores that outlive pods, and published ones, in a cluster whose pods have no way to any index but the test's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.fetching import wheel
from agent.package_index import PackageIndex
from cluster.cluster import Cluster
from cluster_node.installation import PODS, Installation, condition
from cluster_node.models import ANSWER, linear

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(900)]

CLASS = "by-hand"


@pytest.fixture
def volume(installation: Installation, tmp_path: Path) -> Iterator[Path]:
    """A persistent volume, and the folder that it is; claims on it go with it."""
    if not isinstance(installation.cluster, Cluster):
        pytest.skip("the node is this machine only where the cluster is one of ours")
    folder = tmp_path / "volume"
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": CLASS,
        "hostPath": {"path": str(folder), "type": "DirectoryOrCreate"},
    }
    metadata = {"name": "omni-store"}
    installation.cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})
    yield folder
    installation.cluster.kubectl("delete", "pvc", "-l", "omnimodel.io/pool=keeping", "-n", PODS, "--wait")
    installation.cluster.kubectl("delete", "pv", "omni-store", "--wait")


def fetched(name: str, pool: str) -> Any:
    """A model whose weights and code come from the index."""
    package = {"name": "tiny-weights", "version": "1.0", "path": "tiny_weights/linear.safetensors"}
    manifest = linear(name, pool, source={"package": package})
    manifest["spec"]["runtime"]["environment"] = {"requirements": ["tiny-code==1.0"]}
    return manifest


def store_of(installation: Installation, pool: str, pod: str) -> dict[str, Any]:
    """What a pool says of the store of one of its pods."""
    entries = installation.get("omnipool", pool)["status"]["pods"]
    return next(dict(entry["store"]) for entry in entries if entry["pod"] == pod)


def test_a_pod_that_is_made_again_serves_without_a_question_to_the_index(
    installation: Installation, volume: Path, tmp_path: Path
) -> None:
    cluster = installation.cluster
    assert isinstance(cluster, Cluster)
    weights = (installation.folder / "linear.safetensors").read_bytes()
    wheel(tmp_path / "shelf", entries={"tiny_weights/linear.safetensors": weights})
    wheel(tmp_path / "shelf", "tiny_code", entries={"tiny_code/__init__.py": b""})
    with PackageIndex(tmp_path / "shelf", host=f"10.203.{cluster.number}.1") as index:
        sources = {"packageIndex": f"{index.url}/simple"}
        store = {"volumeClaimTemplate": {"size": "1Gi", "storageClassName": CLASS}}
        with (
            installation.pool("keeping", sources=sources, store=store) as pool,
            installation.model(fetched("kept", pool)) as name,
        ):
            installation.wait_ready(name)
            assert installation.ask(name).values == ANSWER
            asked = list(index.asked)
            assert len([path for path in asked if path.endswith(".whl")]) >= 2
            said = store_of(installation, pool, "keeping-0")
            assert said["path"] == "/var/lib/omnimodel-store"
            assert 0 < said["freeBytes"] <= said["capacityBytes"]
            old = installation.wait_pod("keeping-0")["metadata"]["uid"]
            cluster.kubectl("delete", "pod", "keeping-0", "-n", PODS, "--wait")
            installation.wait_pod("keeping-0", other_than=old)
            assert installation.ask(name, seconds=120).values == ANSWER
            assert index.asked == asked
            assert installation.entry(name, "keeping-0")["store"] == ""

    # Nobody answers there any more: what others published is all there is.
    own = tmp_path / "own"
    before = {path: path.stat().st_mtime_ns for path in volume.rglob("*")}
    store = {"path": str(own), "published": [{"name": "catalogue", "path": str(volume)}]}
    with (
        installation.pool("reading", replicas=2, sources=sources, store=store) as pool,
        installation.model({**fetched("read", pool), "spec": {**fetched("read", pool)["spec"], "replicas": {"min": 2}}})
        as name,
    ):  # fmt: skip
        installation.wait_ready(name)
        for pod in ("reading-0", "reading-1"):
            installation.wait_pod(pod)
            installation.until(lambda pod=pod: installation.entry(name, pod).get("ready"), f"the model on {pod}")  # type: ignore[misc]
            assert installation.entry(name, pod)["store"] == "catalogue"
            assert (own / PODS / pod / "owner").is_file(), "each pod has a folder of its own"
            assert not list((own / PODS / pod / "store" / "images").iterdir())
        assert installation.ask(name).values == ANSWER
    assert {path: path.stat().st_mtime_ns for path in volume.rglob("*")} == before


def test_a_store_that_cannot_be_made_is_told_by_the_pool(installation: Installation) -> None:
    store = {"persistentVolumeClaim": {"claimName": "nobody-made-it"}}
    with installation.pool("lacking", store=store) as pool:
        installation.until(
            lambda: condition(installation.get("omnipool", pool), "Stalled") == "True", "the pool to be Stalled"
        )
        conditions = installation.get("omnipool", pool)["status"]["conditions"]
        stalled = next(one for one in conditions if one["type"] == "Stalled")
        assert stalled["reason"] == "ClaimNotFound"
        assert "nobody-made-it" in stalled["message"]
