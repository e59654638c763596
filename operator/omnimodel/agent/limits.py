"""Control groups of models' processes, version 1 and 2: what they may use, who ran out of memory, freezing, killing.

All groups of one state directory lie under one parent, named after it, inside the agent's own group; so what a killed
agent left behind is found and removed at the next start. What this machine does not allow is found by trying and
reported; nothing here fails because a controller is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from omnimodel.agent.hierarchies import Hierarchy, enable, mounted, subtree, write

log = logging.getLogger(__name__)

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0
_PERIOD_MICROSECONDS = 100_000  # that a quota of processor time is given out in; the kernel's own default
_SMALLEST_QUOTA_MICROSECONDS = 1000  # the kernel refuses less


@dataclass(frozen=True)
class GroupLimits:
    """What one process and its children may use.

    Args:
        memory_bytes: working memory; frames are charged to the agent, which touches them first. 0 for no limit.
        processes: processes and threads; 0 for no limit.
        cpu_millis: thousandths of a core that it may compute with; 0 for no limit.
    """

    memory_bytes: int = 0
    processes: int = 0
    cpu_millis: int = 0


def parent_name(state_dir: str | os.PathLike[str]) -> str:
    """Name of the group that holds all groups of a state directory."""
    digest = hashlib.sha256(os.path.realpath(state_dir).encode()).hexdigest()[:12]
    return f"omnimodel-{digest}"


def _fields(path: Path) -> dict[str, int]:
    """A file of `name number` lines; empty when it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        rows = (line.split() for line in path.read_text().splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2}
    return {}


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


@dataclass
class Group:
    """The control group of one process: a folder in every hierarchy there is."""

    name: str
    hierarchies: tuple[Hierarchy, ...]
    missing: tuple[str, ...] = ()

    def _folders(self) -> Iterator[tuple[Hierarchy, Path]]:
        for hierarchy in self.hierarchies:
            yield hierarchy, hierarchy.parent / self.name

    def _folder(self, controller: str) -> tuple[int, Path] | None:
        for hierarchy, folder in self._folders():
            if controller in hierarchy.controllers:
                return hierarchy.version, folder
        return None

    @property
    def paths(self) -> tuple[str, ...]:
        """Its folders."""
        return tuple(str(folder) for _, folder in self._folders())

    @property
    def limits_memory(self) -> bool:
        """Whether the kernel holds it to its memory limit."""
        return self._folder("memory") is not None

    def limit(self, limits: GroupLimits) -> None:
        """Hold what is in it, and all that will be, to limits, once; what cannot be held is `missing` from then on."""
        missing = []
        for hierarchy, folder in self._folders():
            for controller, file, value in _settings(hierarchy, limits):
                try:
                    write(folder / file, value)
                except OSError as error:
                    if file not in _OPTIONAL:
                        missing.append(f"its limit of {controller}: {error.strerror}")
        self.missing = tuple(missing)

    def add(self, pid: int) -> None:
        """Move a process in; its later children follow.

        Raises:
            OSError: the process is gone.
        """
        for _, folder in self._folders():
            write(folder / "cgroup.procs", str(pid))

    def add_uncounted(self, pid: int) -> None:
        """Move a process in where nothing is counted, and it makes no difference when; one that is gone is not."""
        for hierarchy, folder in self._folders():
            members = folder / "cgroup.procs"
            with contextlib.suppress(OSError):
                if not hierarchy.controllers and str(pid) not in members.read_text().split():
                    write(members, str(pid))

    @contextlib.contextmanager
    def doors(self, *, ahead: bool = False) -> Iterator[tuple[int, ...]]:
        """Descriptors through which a process of one thread moves itself in by writing `0`, where anything is counted.

        To move a process the kernel waits until no other is being forked, some 13 ms; version 1 spares that to a
        thread which moves itself.

        Args:
            ahead: nobody waits for the process, so that it shall move in where nothing is counted, too.
        """
        opened: list[int] = []
        try:
            for hierarchy, folder in self._folders():
                if hierarchy.controllers or ahead:
                    door = folder / ("tasks" if hierarchy.version == 1 else "cgroup.procs")
                    opened.append(os.open(door, os.O_WRONLY | os.O_CLOEXEC))
            yield tuple(opened)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def holds(self, pid: int) -> bool:
        """Whether a process is in it, in every hierarchy that counts anything."""
        return all(
            str(pid) in (folder / "cgroup.procs").read_text().split()
            for hierarchy, folder in self._folders()
            if hierarchy.controllers
        )

    def pids(self) -> set[int]:
        """The processes in it."""
        found: set[int] = set()
        for _, folder in self._folders():
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in (folder / "cgroup.procs").read_text().split())
        return found - {0}

    def usage_bytes(self) -> int | None:
        """Memory charged to it: anonymous memory and its own tmpfs; None when memory is not counted here."""
        found = self._folder("memory")
        if found is None:
            return None
        version, folder = found
        stat = _fields(folder / "memory.stat")
        return stat.get("anon" if version == 2 else "rss", 0) + stat.get("shmem", 0)

    def peak_bytes(self) -> int | None:
        """The most that was ever charged to it, without the files that are cached for it now; None where unknown."""
        found = self._folder("memory")
        if found is None:
            return None
        version, folder = found
        peak_bytes = _number(folder / ("memory.peak" if version == 2 else "memory.max_usage_in_bytes"))
        stat = _fields(folder / "memory.stat")
        cached_bytes = stat.get("file" if version == 2 else "cache", 0) - stat.get("shmem", 0)
        return peak_bytes - max(0, cached_bytes) if peak_bytes else None

    def out_of_memory_kills(self) -> int:
        """How many of its processes the kernel has killed because it was over its memory limit."""
        found = self._folder("memory")
        if found is None:
            return 0
        version, folder = found
        return _fields(folder / ("memory.events" if version == 2 else "memory.oom_control")).get("oom_kill", 0)

    def freeze(self, *, frozen: bool = True) -> bool:
        """Stop or continue everything in it; False when this machine has no freezer."""
        for hierarchy, folder in self._folders():
            try:
                if hierarchy.version == 2 and (folder / "cgroup.freeze").exists():
                    write(folder / "cgroup.freeze", "1" if frozen else "0")
                    return True
                if "freezer" in hierarchy.controllers and hierarchy.version == 1:
                    write(folder / "freezer.state", "FROZEN" if frozen else "THAWED")
                    return True
            except OSError:
                continue
        return False

    def kill(self) -> None:
        """Send SIGKILL to everything in it."""
        for hierarchy, folder in self._folders():
            if hierarchy.version == 2:
                with contextlib.suppress(OSError):
                    write(folder / "cgroup.kill", "1")
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove it; False when something is still in it."""
        done = True
        for _, folder in self._folders():
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                done = False
        return done


@dataclass
class Groups:
    """All groups of one state directory."""

    hierarchies: tuple[Hierarchy, ...]
    missing: tuple[str, ...] = ()

    @classmethod
    def detect(cls, state_dir: str | os.PathLike[str], root: Path = _CGROUP_ROOT) -> Groups:
        """Find by trying which groups can be made, and make the parents.

        Args:
            state_dir: the state directory, which names the parent.
            root: where control groups are mounted.
        """
        name = parent_name(state_dir)
        found: list[Hierarchy] = []
        problems: dict[str, str] = {}
        for version, controllers, folder in mounted(root):
            try:
                where, enabled = enable(folder, controllers, root) if version == 2 else (folder, controllers)
                parent = where / name
                parent.mkdir(exist_ok=True)
                if version == 2 and enabled:
                    subtree(parent, enabled)
                found.append(Hierarchy(version, frozenset(enabled), parent))
            except OSError as error:
                problems |= dict.fromkeys(controllers or ("cgroup2",), error.strerror or str(error))
        have = {controller for hierarchy in found for controller in hierarchy.controllers}
        what = {
            "memory": "a memory limit by the kernel (the agent watches it instead)",
            "pids": "a limit of processes by control group",
            "cpu": "a limit of the processor time (resources.cpu)",
        }
        missing = tuple(
            f"{promise}: {problems.get(controller, 'this machine has no such controller')}"
            for controller, promise in what.items()
            if controller not in have
        )
        return cls(tuple(found), missing)

    def create(self, name: str) -> Group:
        """Make a group for one process; one that was left over under this name is removed first."""
        group = Group(name, self.hierarchies)
        for hierarchy in self.hierarchies:
            folder = hierarchy.parent / name
            if folder.exists():
                _empty(Group(name, (hierarchy,)))
            folder.mkdir(parents=True, exist_ok=True)
        return group

    def clean(self, kept: Collection[str] = ()) -> int:
        """Kill and remove every group under the parents, but for the `kept`.

        Returns:
            How many groups were left over.
        """
        names = {
            entry.name
            for hierarchy in self.hierarchies
            if hierarchy.parent.exists()
            for entry in hierarchy.parent.iterdir()
            if entry.is_dir() and entry.name not in kept
        }
        for name in names:
            _empty(Group(name, self.hierarchies))
        return len(names)

    def close(self) -> None:
        """Remove the parents; they must be empty."""
        for hierarchy in self.hierarchies:
            with contextlib.suppress(OSError):
                hierarchy.parent.rmdir()


_OPTIONAL = {"memory.oom.group", "memory.swap.max", "memory.memsw.limit_in_bytes"}


def _settings(hierarchy: Hierarchy, limits: GroupLimits) -> list[tuple[str, str, str]]:
    """(controller, file, value) of every limit that this hierarchy can hold."""
    rows: list[tuple[str, str, str]] = []
    memory = str(limits.memory_bytes)
    if limits.memory_bytes:
        if hierarchy.version == 2:
            files: tuple[tuple[str, str], ...] = (
                ("memory.max", memory),
                ("memory.swap.max", "0"),
                ("memory.oom.group", "1"),
            )
        else:
            files = (("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory))
        rows += [("memory", file, value) for file, value in files]
    if limits.processes:
        rows += [("pids", "pids.max", str(limits.processes))]
    if limits.cpu_millis:
        quota = max(_SMALLEST_QUOTA_MICROSECONDS, limits.cpu_millis * _PERIOD_MICROSECONDS // 1000)
        if hierarchy.version == 2:
            rows += [("cpu", "cpu.max", f"{quota} {_PERIOD_MICROSECONDS}")]
        else:
            rows += [("cpu", "cpu.cfs_period_us", str(_PERIOD_MICROSECONDS)), ("cpu", "cpu.cfs_quota_us", str(quota))]
    return [row for row in rows if row[0] in hierarchy.controllers]


def _empty(group: Group) -> None:
    """Kill what is in a group and remove it, for at most 5 seconds."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    group.freeze(frozen=False)
    group.kill()
    while not group.remove() and time.monotonic() < deadline:
        time.sleep(0.005)
        group.kill()
