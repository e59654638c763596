"""The images that pods of a test cluster run: made of this machine's installation, or given by name."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
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


def build(cluster: Connection, folder: Path, tag: str = "dev") -> Images | None:
    """Make the images and give them to the node; None for a cluster of someone's."""
    if not isinstance(cluster, Cluster):
        return None
    rootfs = recipe()
    compile_environment()
    operator_root, agent_root = folder / "operator", folder / "agent"
    operator = cluster.image(f"omnimodel-operator:{tag}", operator_root, rootfs.write_operator(operator_root))
    agent = cluster.image(f"omnimodel-agent:{tag}", agent_root, rootfs.write_agent(agent_root))
    return Images(operator, agent, "machine")


def compile_environment() -> None:
    """Pods see this environment read-only: what is not compiled yet would be compiled anew at every start."""
    packages = sysconfig.get_path("purelib")
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", packages]
    subprocess.run(
        command, check=False, capture_output=True
    )  # some packages bring files that are no Python of this version
