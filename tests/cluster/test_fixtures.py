"""Which cluster tests run on: one of their own, the one that is named, or none, and then why."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from cluster.cluster import Cluster
from cluster.connection import Connection
from cluster.fixtures import GIVEN, KINDS, missing, running


def test_without_go_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(GIVEN, raising=False)
    assert missing("api") == "no Go to build a cluster with: install Go, or name a cluster in OMNI_TEST_KUBECONFIG"
    with closing(running("api", tmp_path / "cluster")) as clusters, pytest.raises(pytest.skip.Exception, match="no Go"):
        next(clusters)


@pytest.mark.cluster_api
def test_a_cluster_that_is_named_is_used_and_left_running(
    api_cluster: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(GIVEN, str(api_cluster.kubeconfig))
    monkeypatch.setenv("PATH", f"{api_cluster.bin}:/usr/bin:/bin")
    clusters = running("api", tmp_path / "cluster")
    given = next(clusters)
    assert not isinstance(given, Cluster)
    assert set(given.kubectl("api-resources", "--api-group=omnimodel.io", "--no-headers", "-o", "name").split()) == {
        f"{kind}.omnimodel.io" for kind in KINDS
    }
    assert list(clusters) == []
    assert api_cluster.kubectl("get", "namespace", "default", "-o", "name").strip() == "namespace/default"
    assert not (tmp_path / "cluster").exists()
