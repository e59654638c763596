"""One installation of the chart for all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.linear import write_weights
from cluster.connection import Connection
from cluster.images import Images
from cluster_node.installation import Installation
from cluster_node.models import linear


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the node with the weights of every model here."""
    folder = tmp_path_factory.mktemp("weights")
    folder.chmod(0o755)
    write_weights(folder / "linear.safetensors")
    return folder


@pytest.fixture(scope="session")
def installation(node_cluster: Connection, pod_images: Images, weights: Path) -> Iterator[Installation]:
    """The chart, without pools."""
    installation = Installation(node_cluster, pod_images, weights)
    installation.install()
    yield installation
    installation.uninstall()


@pytest.fixture(scope="session")
def pool(installation: Installation) -> Iterator[str]:
    """A pool of one pod, as the chart makes it."""
    with installation.pool("default") as name:
        yield name


@pytest.fixture(scope="session")
def first(installation: Installation, pool: str) -> Iterator[str]:
    """A model in it that is Ready."""
    with installation.model(linear("first", pool)) as name:
        installation.wait_ready(name)
        yield name
