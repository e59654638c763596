"""Fixtures: a connection as the administrator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.connection import Connection
from kube.proxy import Proxy
from omnimodel.kube import Kube


@pytest.fixture
async def kube(api_cluster: Connection) -> AsyncIterator[Kube]:
    """A connection to the cluster."""
    async with await Kube.connect(str(api_cluster.kubeconfig)) as found:
        yield found


@pytest.fixture
async def proxy(api_cluster: Connection, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A way to the API server that can make trouble."""
    async with Proxy(api_cluster.kubeconfig, tmp_path) as found:
        yield found
