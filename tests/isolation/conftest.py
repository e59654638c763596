from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from isolation.host import Host


@pytest.fixture
def host() -> Host:
    root = Path("/var/tmp") / f"omnimodel-promise-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(mode=0o755)
    try:
        yield Host(root)
    finally:
        shutil.rmtree(root)


@pytest.fixture
def neighbour() -> subprocess.Popen:
    """Another model's process, of the same user as an ordinary agent's."""
    process = subprocess.Popen(
        ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "sleep", "300"], env={"SECRET": "of-the-other"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server
