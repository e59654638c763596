"""Fixtures of all rooms: the clusters."""

from __future__ import annotations

import os

import pytest

from cluster.cluster import build
from cluster.fixtures import GIVEN, api_cluster, missing, namespace, node_cluster, node_namespace

__all__ = ["api_cluster", "namespace", "node_cluster", "node_namespace"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs of the clusters that will be asked for, where no test's time limit runs."""
    if session.config.option.collectonly or os.environ.get(GIVEN):
        return
    asked = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    level = "node" if "node_cluster" in asked else "api"
    if asked & {"api_cluster", "node_cluster"} and not missing(level):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        build(level, lambda text: reporter.write_line(text) if reporter else None)
