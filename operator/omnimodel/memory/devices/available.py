"""How much memory this process may still take: what the machine has, or less under a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable, or the least room under a limit of the cgroups this process is in.

    Page cache counts as room: the kernel drops it when memory is asked for.

    Args:
        root: where `proc` and `sys` are (for tests).
    """
    room_bytes = _meminfo(root / "proc/meminfo").get("MemAvailable", 0)
    for limit_bytes, used_bytes in _cgroups(root):
        if limit_bytes < _UNLIMITED_BYTES:
            room_bytes = min(room_bytes, max(0, limit_bytes - used_bytes))
    return room_bytes


def total_bytes(root: Path = Path("/")) -> int:
    """MemTotal, or the least limit of the cgroups this process is in.

    Args:
        root: where `proc` and `sys` are (for tests).
    """
    limits = [limit_bytes for limit_bytes, _ in _cgroups(root)]
    return min([_meminfo(root / "proc/meminfo").get("MemTotal", 0), *limits])


def _meminfo(path: Path) -> dict[str, int]:
    fields = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        amount = value.split()
        if len(amount) == 2 and amount[1] == "kB":
            fields[name] = int(amount[0]) << 10
    return fields


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, use without page cache) of every group above this process, cgroup v2 and v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk([root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"], path, _version2)
        elif "memory" in controllers.split(","):
            yield from _walk([root / "sys/fs/cgroup/memory"], path, _version1)


def _walk(bases: list[Path], path: str, read: Callable[[Path], tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for base in bases:
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(
            len(parts), -1, -1
        ):  # in a container the path may be the host's: then only the base is there
            try:
                yield read(base.joinpath(*parts[:depth]))
            except (OSError, ValueError):
                continue


def _version2(group: Path) -> tuple[int, int]:
    limit = (group / "memory.max").read_text().strip()
    used_bytes = int((group / "memory.current").read_text())
    return _UNLIMITED_BYTES if limit == "max" else int(limit), used_bytes - _cache(group)


def _version1(group: Path) -> tuple[int, int]:
    limit_bytes = int((group / "memory.limit_in_bytes").read_text())
    used_bytes = int((group / "memory.usage_in_bytes").read_text())
    return limit_bytes, used_bytes - _cache(group)


def _cache(group: Path) -> int:
    """Page cache of files: memory.stat counts memfd pages among the cache, but not among the file lists."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in fields else ""
    return int(fields.get(f"{prefix}inactive_file", 0)) + int(fields.get(f"{prefix}active_file", 0))
