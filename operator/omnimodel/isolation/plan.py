"""What a model's sandbox shall be, and what it became: values that cross process borders as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """A rung of the ladder; the first is the strongest."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    PROCESS = "process"

    @property
    def strength(self) -> int:
        """Grows with the level: 0 for `process`."""
        return _STRENGTH[self]


_STRENGTH = {Level.PROCESS: 0, Level.LANDLOCK: 1, Level.NAMESPACES: 2}


@dataclass(frozen=True)
class Mount:
    """A file or folder of the machine (`source`) shown at `target` inside the sandbox.

    Args:
        size_bytes: when not 0, `target` is an empty folder in memory of that size instead, where mounting is possible;
            below the level `namespaces` it is `source` itself, without a bound.
        within: when not empty, a folder that `source` must not have left when it is opened: others can write there.
    """

    source: str
    target: str
    read_only: bool = True
    size_bytes: int = 0
    within: str = ""


@dataclass(frozen=True)
class SandboxPlan:
    """A sandbox as it is asked for.

    Args:
        instance: identity of the process, made by the agent.
        uid: user and group of its own; 0 keeps the user it has.
        hostname: what the process sees as the machine's name.
        minimum: the weakest level that is acceptable; entering fails below it.
        wanted: the strongest level to try.
        read_only: paths of the machine shown at the same place, read-only, besides the interpreter and the system's
            libraries.
        writable: the same, writable.
        mounts: paths shown at another place.
        hidden: folders below a shown path that appear empty.
        devices: device nodes to show besides null, zero, full, random, urandom and tty.
        tmp_bytes, shm_bytes: sizes of its own /tmp and /dev/shm.
        memory_bytes: the limit that /proc/meminfo shows; 0 shows the machine's.
        processes: processes and threads it may have; 0 for no limit.
        open_files: descriptors it may have open.
        network: it may use the machine's network.
        loopback: it needs 127.0.0.1 for itself (a foreign engine that listens on a port). Only asked below the level
            `namespaces`, where there is no loopback of its own.
        scratch: a folder of the machine, owned by `uid`, that stands in for /tmp where nothing can be mounted.
    """

    instance: str
    uid: int = 0
    hostname: str = "model"
    minimum: Level = Level.PROCESS
    wanted: Level = Level.NAMESPACES
    read_only: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hidden: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    tmp_bytes: int = 64 << 20
    shm_bytes: int = 64 << 20
    memory_bytes: int = 0
    processes: int = 0
    open_files: int = 4096
    network: bool = False
    loopback: bool = False
    scratch: str = ""

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SandboxPlan:
        """Read a plan that `to_json` wrote."""
        body = dict(value)
        body["minimum"] = Level(body["minimum"])
        body["wanted"] = Level(body["wanted"])
        body["mounts"] = tuple(Mount(**mount) for mount in body["mounts"])
        for name in ("read_only", "writable", "hidden", "devices"):
            body[name] = tuple(body[name])
        return cls(**body)

    def inside(self, path: str, level: Level) -> str:
        """Where a path of the machine is found by the process, at a level: mounts move things only in namespaces."""
        if level is not Level.NAMESPACES:
            return path
        for mount in sorted(self.mounts, key=lambda mount: len(mount.source), reverse=True):
            if path == mount.source or path.startswith(mount.source.rstrip("/") + "/"):
                return mount.target.rstrip("/") + path[len(mount.source.rstrip("/")) :]
        return path

    def told(self, text: str, level: Level) -> str:
        """A text of the manifest as the process is to hear it: below `namespaces` mounts are where they come from."""
        sources = {mount.target.rstrip("/"): mount.source.rstrip("/") for mount in self.mounts}
        if level is Level.NAMESPACES or not sources:
            return text
        targets = "|".join(re.escape(target) for target in sorted(sources, key=len, reverse=True))
        return re.sub(rf"(?<![\w./-])(?:{targets})(?![\w.-])", lambda match: sources[match[0]], text)


@dataclass(frozen=True)
class Reached:
    """A sandbox as it became: the level, and one sentence for each promise that this machine does not allow."""

    level: Level
    missing: tuple[str, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Reached:
        """Read a result that `to_json` wrote."""
        return cls(Level(value["level"]), tuple(value["missing"]))
