"""What is started in a sandbox ends with it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from cluster.cluster import Cluster
from cluster.host import Process

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of a node need root")


def test_a_sandbox_ends_although_a_process_in_it_was_stopped_and_continued(tmp_path: Path) -> None:
    """nsenter stops with what it waits for; until it reaps that, the kernel lets no PID namespace end."""
    sleep = shutil.which("sleep")
    assert sleep
    cluster = Cluster(tmp_path / "cluster")
    cluster.bin = tmp_path
    (cluster.folder / "logs").mkdir(parents=True)
    shutil.copy(sleep, tmp_path / "pause")
    cluster._spawn(
        "sandbox", ["unshare", "--mount-proc", "--pid", "--fork", "--kill-child", str(tmp_path / "pause"), "1h"]
    )
    cluster._wait("sandbox", "its first process", 10, cluster._find_init)
    target = f"--target={cluster.processes['init'].pid}"
    cluster._spawn("inner", ["nsenter", target, "--pid", "--", sleep, "1h"])
    waiting = cluster.processes["inner"]
    cluster._wait("inner", "what it waits for", 10, lambda: bool(waiting.children()))
    inner = Process.of(waiting.children()[0])
    assert inner
    os.kill(inner.pid, signal.SIGSTOP)
    cluster._wait("inner", "it to stand still", 10, waiting.stopped)
    os.kill(inner.pid, signal.SIGCONT)
    cluster.down()
    assert not inner.alive()
    assert not waiting.alive()
