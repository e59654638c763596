"""Fixtures of all rooms: clusters, processes of models, and the check that a run leaves nothing behind."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch: answers are compared to the bit

from cluster.cluster import build
from cluster.fixtures import GIVEN, api_cluster, missing, namespace, node_cluster, node_namespace, pod_images
from leftovers import nothing_left
from runtime.fixtures import fork_server, frames, new_child, package, packages, published_images

__all__ = [
    "api_cluster",
    "fork_server",
    "frames",
    "namespace",
    "new_child",
    "node_cluster",
    "node_namespace",
    "nothing_left",
    "package",
    "packages",
    "pod_images",
    "published_images",
]

# Programs in the background of a shell ignore it, and so would all that they start: tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None)  # how long an example takes depends on who else computes
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: of several workers, none should be left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs of the clusters that will be asked for, where no test's time limit runs."""
    if session.config.option.collectonly or os.environ.get(GIVEN):
        return
    asked = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    level = "node" if "node_cluster" in asked else "api"
    if asked & {"api_cluster", "node_cluster"} and not missing(level):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        build(level, lambda text: reporter.write_line(text) if reporter else None)
