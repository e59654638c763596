from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.connection import Connection
from cluster.server import Server, serving


@pytest.fixture(scope="session")
def server(api_cluster: Connection) -> Iterator[Server]:
    """The API server of `api_cluster`, asked without a program in between."""
    with serving(api_cluster) as server:
        yield server
