"""Who listens on a port: a server that took the port of an engine must not be taken for the engine."""

from __future__ import annotations

import os
from contextlib import suppress

_LISTEN = "0A"  # Source: TCP_LISTEN in the kernel's include/net/tcp_states.h


def listens_for(port: int, session: int) -> bool:
    """Whether a process of session `session` has the listening socket of a TCP port; True when that cannot be seen.

    Under Landlock no other process can be seen: there one of this process's user has to have it.
    """
    inodes = _listening_inodes(port)
    if not inodes:
        return True
    try:
        entries = os.listdir("/proc")
    except OSError:
        return os.getuid() in inodes.values()
    seen = False
    for entry in entries:
        if not entry.isdecimal():
            continue
        with suppress(OSError):
            if os.getsid(int(entry)) != session:
                continue
            for descriptor in os.listdir(f"/proc/{entry}/fd"):
                with suppress(OSError):
                    target = os.readlink(f"/proc/{entry}/fd/{descriptor}")
                    seen = True
                    if target.removeprefix("socket:[").removesuffix("]") in inodes:
                        return True
    return not seen


def _listening_inodes(port: int) -> dict[str, int]:
    """Inode of each socket that listens on a port, and its user."""
    found = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as file:
            for line in file:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTEN and fields[1].endswith(f":{port:04X}"):
                    found[fields[9]] = int(fields[7])
    return found
