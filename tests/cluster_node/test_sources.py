"""A pool that is told where packages come from, in a cluster without another way to any."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.fetching import wheel
from agent.package_index import PackageIndex
from cluster.cluster import Cluster
from cluster_node.installation import Installation
from cluster_node.models import ANSWER, linear

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_model_comes_from_the_package_index_of_its_pool(installation: Installation, tmp_path: Path) -> None:
    cluster = installation.cluster
    if not isinstance(cluster, Cluster):
        pytest.skip("pods reach this machine only where the cluster is one of ours")
    weights = (installation.folder / "linear.safetensors").read_bytes()
    wheel(tmp_path / "shelf", entries={"tiny_weights/linear.safetensors": weights})
    package = {"name": "tiny-weights", "version": "1.0", "path": "tiny_weights/linear.safetensors"}
    with (
        PackageIndex(tmp_path / "shelf", host=f"10.203.{cluster.number}.1") as index,
        installation.pool("fetching", sources={"packageIndex": f"{index.url}/simple"}) as pool,
        installation.model(linear("fetched", pool, source={"package": package})) as name,
    ):
        installation.wait_ready(name)
        assert installation.ask(name).values == ANSWER
        assert any(path.endswith(".whl") for path in index.asked)
