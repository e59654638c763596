"""How a process ended, as the kernel tells it."""

from __future__ import annotations

import fcntl
import os
import signal
import struct

KILL_SECONDS = 10.0  # for the kernel to confirm an end; a process that hangs in a driver takes longer
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # Source: include/uapi/linux/pidfd.h


def signal_name(number: int) -> str:
    """The name of a signal, also of one that Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def status_by_pidfd(pidfd: int) -> int | None:
    """The exit status from the kernel (Linux 6.15), for a process that is not our child."""
    buffer = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(64, b"\0"))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, _ = struct.unpack_from("QQ", buffer)
    (code,) = struct.unpack_from("i", buffer, 60)
    return os.waitstatus_to_exitcode(code) if mask & _PIDFD_INFO_EXIT else None
