"""The trees of control groups that this machine has, of version 1 and 2, and where in them groups can be made."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_AGENT_LEAF = "omnimodel-agent"
_V1_CONTROLLERS = ("memory", "pids", "cpu", "freezer")


@dataclass(frozen=True)
class Hierarchy:
    """One tree of groups: version 2, or one controller of version 1."""

    version: int
    controllers: frozenset[str]
    parent: Path


def write(path: Path, text: str) -> None:
    """Write a file of a control group in one call, as the kernel wants it. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _own_paths() -> Mapping[str, str]:
    """Our own group in each hierarchy: controller (or "" for version 2) -> path."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller.removeprefix("name=")] = path
    return found


def mounted(root: Path) -> Iterator[tuple[int, tuple[str, ...], Path]]:
    """The agent's own folder in every hierarchy: (version, its controllers, folder)."""
    own = _own_paths()

    def inside(mount: Path, path: str) -> Path:
        folder = mount / path.lstrip("/")
        return folder if folder.is_dir() else mount  # a container sees its own group as the root

    if (root / "cgroup.controllers").exists():
        folder = inside(root, own.get("", "/"))
        yield 2, tuple((folder / "cgroup.controllers").read_text().split()), folder
        return
    for controller in _V1_CONTROLLERS:
        if (root / controller / "cgroup.procs").exists():
            yield 1, (controller,), inside(root / controller, own.get(controller, "/"))
    unified = root / "unified"
    if (unified / "cgroup.procs").exists():
        yield 2, (), inside(unified, own.get("", "/"))


def enable(folder: Path, controllers: tuple[str, ...], root: Path) -> tuple[Path, tuple[str, ...]]:
    """Version 2: where groups with controllers can be made. A group that has them may hold no process itself.

    In a container, whose own group looks like the root, its processes move to a leaf. On a host, where a shell and
    others may share our group, we do not move them: the groups become neighbours of ours.
    """
    wanted = tuple(name for name in ("memory", "pids", "cpu") if name in controllers)
    if not wanted:
        return folder, ()
    try:
        subtree(folder, wanted)
        return folder, wanted
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    if folder != root:
        subtree(folder.parent, wanted)
        return folder.parent, wanted
    leaf = folder / _AGENT_LEAF
    leaf.mkdir(exist_ok=True)
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            write(leaf / "cgroup.procs", pid)
    subtree(folder, wanted)
    return folder, wanted


def subtree(folder: Path, controllers: Sequence[str]) -> None:
    """Give controllers to the groups below one. Raises OSError."""
    write(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
