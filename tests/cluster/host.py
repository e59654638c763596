"""What the cluster needs of the machine it runs on: processes, links, cgroups, free ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROCESSES = 16  # that a node weighs as many as on a busy processor


class Process(NamedTuple):
    """A process for ever: a pid may be used again, but not with the same start time."""

    pid: int
    started: int  # clock ticks since boot

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The live process with this pid; None if there is none, or only a zombie."""
        state, started = _state(pid)
        return None if state in "ZX" else cls(pid, started)

    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def name(self) -> str:
        return Path(f"/proc/{self.pid}/comm").read_text().strip()

    def resident(self) -> int | None:
        """MiB of memory (of nsenter: that of the program it waits for); None if it is dead."""
        try:
            pid = self.children()[0] if self.name() == "nsenter" else self.pid
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20 if self.alive() else None

    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return _state(self.pid) == ("T", self.started)

    def resume(self) -> None:
        """Let it go on, if a signal has stopped it."""
        if self.alive():
            os.kill(self.pid, signal.SIGCONT)

    def kill(self, seconds: float = 15) -> None:
        """Ends it at once, and waits until it is gone; if it is a child of this program, without a trace."""
        deadline = time.monotonic() + seconds
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
        # Other threads of it may end after the first one, with which it looks like a zombie.
        while self.alive() or not self._reaped():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.02)

    def _reaped(self) -> bool:
        if _state(self.pid)[1] != self.started:
            return True
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            return True


def _state(pid: int) -> tuple[str, int]:
    """The state of a process, and when it began; X and 0 when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


def add_link(init: int) -> int:
    """Links the machine to the sandbox of that first process: interface omniN here, eth0 in there.

    The number N is the first one free, and this side has the address 10.203.N.1.
    """
    for number in range(256):
        name = f"omni{number}"
        if Path(f"/sys/class/net/{name}").exists() or not _unused(number):
            continue
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(init)]
        command = ["ip", "link", "add", name, *pair]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if "File exists" in done.stderr:
            continue  # another cluster was faster
        done.check_returncode()
        subprocess.run(["ip", "address", "add", f"10.203.{number}.1/30", "dev", name], check=True)
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        return number
    raise RuntimeError("256 clusters run already")


def _unused(number: int) -> bool:
    """Whether no cluster has this number; what one left behind that was killed is removed."""
    for group in cgroups(number):
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # processes are in it
                return False
    return True


def remove_link(number: int) -> None:
    """Remove the link, and its other end with it.

    The kernel does so when it takes the dead sandbox apart, but a connection whose end nobody heard of holds that up for
    minutes.
    """
    name = f"omni{number}"
    while Path(f"/sys/class/net/{name}").exists():
        subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)


def cgroups(number: int) -> Iterator[Path]:
    """The sandbox's cgroup in each hierarchy, of version 1 or 2."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, kind = line.split()[4], line.split(" - ")[1].split()[0]
        if kind in ("cgroup", "cgroup2"):
            yield Path(place) / f"omni{number}"


def make_cgroup(group: Path) -> None:
    """Make the cgroup, whose pods together would otherwise get as much of a busy processor as one other process."""
    group.mkdir()
    for name, share in (("cpu.shares", 1024 * PROCESSES), ("cpu.weight", 100 * PROCESSES)):
        with contextlib.suppress(OSError):  # other hierarchies have neither
            if (group / name).exists():
                (group / name).write_text(str(share))


def inhabitants(number: int) -> list[str]:
    """Processes in a sandbox's cgroups, each with its state, what it waits for in the kernel, and whether it is frozen."""
    found: dict[int, str] = {}
    for group in cgroups(number):
        for procs in group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                frozen = procs.with_name("freezer.state")
                state = f" {frozen.read_text().strip()}" if frozen.exists() else ""
                for pid in map(int, procs.read_text().split()):
                    name, wchan = (Path(f"/proc/{pid}/{file}").read_text().strip() for file in ("comm", "wchan"))
                    found[pid] = f"{found.get(pid) or f'{pid} {name} {_state(pid)[0]} {wchan}'}{state}"
    return list(found.values())


def stuck() -> list[str]:
    """Threads of this machine that wait in the kernel for something that no signal ends."""
    found = []
    for task in Path("/proc").glob("[0-9]*/task/*"):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] == "D":
                found.append(f"{task} {name} {(task / 'wchan').read_text()}")
    return found


def remove_cgroup(group: Path, seconds: float = 10) -> None:
    """Removes a cgroup and all below it; each stays busy until its last process is quite gone."""
    deadline = time.monotonic() + seconds
    for folder, _, _ in os.walk(group, topdown=False):
        while True:
            try:
                os.rmdir(folder)
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
