"""After the last test nothing of this run may be left: processes, mounts, control groups, sockets."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omnimodel.agent.limits import parent_name

GRACE_SECONDS = 30.0
STATE_DEPTH = 5  # a state directory lies no deeper below the run's folder


@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up first and torn down last, after every other fixture."""
    folder = tmp_path_factory.getbasetemp()
    before = psutil.Process().children(recursive=True)
    yield
    deadline = time.monotonic() + GRACE_SECONDS  # what was killed may still be ending
    while (found := left(folder, before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not found, "the tests have left behind:\n" + "\n".join(found)


def left(folder: Path, before: list[psutil.Process]) -> list[str]:
    """What belongs to the run whose files are in a folder; other runs on this machine are none of its business."""
    return [
        *(f"process {process}" for process in processes(folder, before)),
        *(f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line),
        *(f"control group {group}" for group in groups(folder)),
        *(f"socket {path}" for path in Path(tempfile.gettempdir()).glob(f"omni-test-{os.getpid()}-*")),
    ]


def processes(folder: Path, before: list[psutil.Process]) -> list[str]:
    """Those below this process, and those that got away but still have something of the folder."""
    own = psutil.Process()
    children = own.children(recursive=True)
    found = [process for process in children if process not in before]
    found += [
        process for process in psutil.process_iter() if process not in [own, *children] and uses(process.pid, folder)
    ]
    return [named for process in found if (named := name(process))]


def name(process: psutil.Process) -> str:
    """A process as a person finds it; empty when it has ended."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return f"{process.pid}: {' '.join(process.cmdline())[:200] or process.name()}"
    except psutil.Error:
        return ""


def uses(pid: int, folder: Path) -> bool:
    """Whether the folder stands in its command line or environment, or it has something of it mounted or open."""
    place = Path("/proc", str(pid))
    text = os.fsencode(folder)
    if any(text in content(place / file) for file in ("cmdline", "environ")):
        return True
    # Of a mount what counts is where it comes from: a mount point may be a copy, made along with a namespace.
    sources = [line.split()[3] for line in content(place / "mountinfo").splitlines()]
    if any(os.fsencode("/".join(folder.parts[-2:])) in source for source in sources):
        return True
    try:
        links = [place / "cwd", *(place / "fd").iterdir()]
    except OSError:
        return False
    return any(text in target(link) for link in links)


def content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def target(link: Path) -> bytes:
    try:
        return os.readlink(os.fsencode(link))
    except OSError:
        return b""


def groups(folder: Path) -> list[Path]:
    """Control groups of agents whose state directory is, or was, in the folder."""
    walk = os.walk("/sys/fs/cgroup")  # which passes over what others remove meanwhile
    found = [Path(root, name) for root, names, _ in walk for name in names if name.startswith("omnimodel-")]
    if not found:
        return []
    depth = len(folder.parts) + STATE_DEPTH
    named = set()
    for root, folders, _ in os.walk(folder):
        named |= {parent_name(root), parent_name(f"{root}/state")}  # also one that was removed since
        if len(Path(root).parts) >= depth:
            folders.clear()
    return [path for path in found if path.name in named]
