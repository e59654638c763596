from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.cluster import Cluster
from cluster.connection import Connection
from cluster.fixtures import GIVEN, missing
from cluster.server import Server, serving


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory, api_cluster: Connection) -> Iterator[Cluster]:
    """A cluster without CRDs, for releases to install theirs."""
    del api_cluster  # the programs are built by then, and a cluster that was given is skipped below
    why_not = missing("api")
    if why_not:
        pytest.skip(why_not.replace(f", or name a cluster in {GIVEN}", ""))
    with Cluster(tmp_path_factory.mktemp("chart") / "cluster", "api", orphans=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(own_cluster: Cluster) -> Iterator[Server]:
    """The API server of `own_cluster`."""
    with serving(own_cluster) as server:
        yield server
