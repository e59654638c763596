"""The images that pods of a test cluster run: made of this machine's installation, or given by name."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cluster.cluster import Cluster
from cluster.connection import Connection

GIVEN_OPERATOR = "OMNI_TEST_OPERATOR_IMAGE"
GIVEN_AGENT = "OMNI_TEST_AGENT_IMAGE"


@dataclass(frozen=True)
class Images:
    """Names of the images, and the runtime class that pods of the agent need; empty for none."""

    operator: str
    agent: str
    runtime_class: str = ""


def recipe() -> ModuleType:
    """images/rootfs.py, which is a program and in no package."""
    path = Path(__file__).parents[2] / "images" / "rootfs.py"
    spec = importlib.util.spec_from_file_location("rootfs", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def given() -> Images | None:
    """The images that the environment names; None when it does not."""
    operator, agent = os.environ.get(GIVEN_OPERATOR, ""), os.environ.get(GIVEN_AGENT, "")
    return Images(operator, agent) if operator and agent else None


def build(cluster: Connection, folder: Path) -> Images | None:
    """Make the images and give them to the node; None for a cluster of someone's."""
    if not isinstance(cluster, Cluster):
        return None
    rootfs = recipe()
    operator_root, agent_root = folder / "operator", folder / "agent"
    operator = cluster.image("omnimodel-operator:dev", operator_root, rootfs.write_operator(operator_root))
    agent = cluster.image("omnimodel-agent:dev", agent_root, rootfs.write_agent(agent_root))
    return Images(operator, agent, "machine")
