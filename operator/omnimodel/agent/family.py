"""Who a process has started, and who runs as a user."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children_of_user(parent: int, uid: int) -> list[int]:
    """Children of a process that run as a user."""
    found = []
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with contextlib.suppress(OSError):
                rows = Path(f"/proc/{pid}/status").read_text().splitlines()
                if any(row.split()[1] == str(uid) for row in rows if row.startswith("Uid:")):
                    found.append(int(pid))
    return found


def family_of(leader: int) -> set[int]:
    """Processes in the session that `leader` began, and all that it or one of those has started; itself left out."""
    relations = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            relations[int(name)] = {int(fields[1]), int(fields[3])}  # its parent and its session
    family, more = {leader}, {leader}
    while more:
        more = {pid for pid, others in relations.items() if others & family} - family
        family |= more
    return family - {leader}
