"""Fixtures: a connection as the administrator."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.connection import Connection
from omnimodel.kube import Kube


@pytest.fixture
async def kube(api_cluster: Connection) -> AsyncIterator[Kube]:
    """A connection to the cluster."""
    async with await Kube.connect(str(api_cluster.kubeconfig)) as found:
        yield found
