"""What would be left over if the agent were killed now: a file for each process, read at the next start.

What cannot be gone on with (see `survivors`) is ended and removed then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnimodel.agent.ending import KILL_SECONDS
from omnimodel.agent.limits import Groups

log = logging.getLogger(__name__)


def boot_id() -> str:
    """Changes with each boot of the machine: pids of an earlier one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


def has_ended(pidfd: int, timeout_seconds: float = 0.0) -> bool:
    """Whether the process of a pidfd has ended, or ends in time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


@dataclass(frozen=True)
class Entry:
    """One process: its identity, and the paths that go with it."""

    instance: str
    pid: int
    start_ticks: int
    paths: tuple[str, ...]


class Journal:
    """The journal of one state directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def record(self, entry: Entry) -> None:
        """Write an entry, whole or not at all."""
        body = {"boot": boot_id(), "pid": entry.pid, "startTicks": entry.start_ticks, "paths": entry.paths}
        target = self._folder / f"{entry.instance}.json"
        draft = self._folder / f".{entry.instance}.draft"
        draft.write_text(json.dumps({"instance": entry.instance, **body}))
        draft.replace(target)

    def forget(self, instance: str) -> None:
        """Remove an entry."""
        (self._folder / f"{instance}.json").unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """The entries of this boot; those of another one hold only paths (pid 0)."""
        found = []
        for path in self._folder.glob("*.json"):
            try:
                body = json.loads(path.read_text())
                pid = body["pid"] if body["boot"] == boot_id() else 0
                found.append(Entry(body["instance"], pid, body["startTicks"], tuple(body["paths"])))
            except (ValueError, KeyError, OSError) as error:
                log.warning("journal_entry_unreadable path=%s error=%s", path, error)
                path.unlink(missing_ok=True)
        for draft in self._folder.glob(".*.draft"):
            draft.unlink(missing_ok=True)
        return found


@dataclass(frozen=True)
class Leftovers:
    """What a killed agent had left."""

    processes: int
    groups: int
    paths: int


def kill_exactly(pids: Sequence[tuple[int, int]], timeout_seconds: float = KILL_SECONDS) -> int:
    """Kill the processes with these (pid, start ticks), and no others that have the same pid; wait for their end.

    Returns:
        How many were still there.
    """
    held: list[int] = []
    for pid, ticks in pids:
        if pid <= 0:
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        if start_ticks(pid) == ticks:  # asked after the pidfd is held: it cannot become another one's any more
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            held.append(pidfd)
        else:
            os.close(pidfd)
    for pidfd in held:
        has_ended(pidfd, timeout_seconds)
        os.close(pidfd)
    return len(held)


def clean_leftovers(
    state_dir: str | os.PathLike[str], kept: Collection[str] = (), groups: Collection[str] = ()
) -> Leftovers:
    """End the processes of an agent that was killed, and remove their groups, sockets and folders.

    Their mounts are in namespaces of their own and go with them.

    Args:
        state_dir: of the agent.
        kept: instances that are left alone.
        groups: names of their control groups.
    """
    root = Path(state_dir)
    journal = Journal(root / "journal")
    entries = [entry for entry in journal.entries() if entry.instance not in kept]
    processes = kill_exactly([(entry.pid, entry.start_ticks) for entry in entries])
    found = Groups.detect(root)
    removed_groups = found.clean(groups)
    found.close()
    run = root / "run"
    paths = {path for entry in entries for path in entry.paths if Path(path).is_relative_to(run)}
    if run.is_dir():
        spared = {name for instance in kept for name in (instance, f"{instance}.sock", f"{instance}.mounts")}
        paths |= {str(path) for path in run.iterdir() if path.name not in spared}
    removed = 0
    for name in paths:
        path = Path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
        elif path.exists() or path.is_symlink():
            path.unlink(missing_ok=True)
            removed += 1
    for entry in entries:
        journal.forget(entry.instance)
    if processes or removed_groups or removed:
        log.info("leftovers_cleaned processes=%d groups=%d paths=%d", processes, removed_groups, removed)
    return Leftovers(processes, removed_groups, removed)
