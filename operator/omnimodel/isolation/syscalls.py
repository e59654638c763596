"""System calls that Python has no function for. Linux on x86_64 and aarch64; every failure is an OSError."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x80
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    8192,
    16384,
    1 << 18,
)
MNT_DETACH = 2
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT = 24, 38, 36, 47
PR_SET_DUMPABLE = 4
PR_CAP_AMBIENT_CLEAR_ALL = 4

# Source: include/uapi/asm-generic/unistd.h; numbers from 424 on are the same on every architecture.
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NR_CAPSET = {"x86_64": 126, "aarch64": 91}
_NR_MOUNT_SETATTR = 442
_NR_CLOSE_RANGE = 436
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000


def machine() -> str:
    """The architecture: `x86_64`, `aarch64` or another one, for which some calls are refused with ENOSYS."""
    return platform.machine()


def check(result: int, what: str = "") -> int:
    """Turn -1 into an OSError that carries errno."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what or None)
    return result


def syscall(number: int, *arguments: object) -> int:
    """Call the kernel by number; arguments are integers, bytes or ctypes values."""
    plain = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return check(int(libc.syscall(ctypes.c_long(number), *plain)))


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount `source` at `target`: see man 2 mount."""
    text = [value.encode() if value else None for value in (source, target, kind)]
    check(libc.mount(*text, ctypes.c_ulong(flags), options.encode() or None), target)


def unmount(target: str) -> None:
    """umount2(2), detached."""
    check(libc.umount2(target.encode(), MNT_DETACH), target)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones: see man 2 unshare."""
    check(libc.unshare(ctypes.c_int(flags)))


def setns(descriptor: int, kind: int) -> None:
    """Enter a namespace: see man 2 setns."""
    check(libc.setns(descriptor, kind))


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and put the old one at `old`."""
    number = _NR_PIVOT_ROOT.get(machine())
    if number is None:
        raise OSError(38, os.strerror(38))
    syscall(number, new.encode(), old.encode())


def prctl(option: int, *arguments: int) -> int:
    """Change something about this thread: see man 2 prctl."""
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return check(libc.prctl(option, *padded))


def restrict_mount(path: str, *, read_only: bool, devices: bool = False) -> None:
    """Make a mount and everything mounted below it nosuid, nodev unless `devices`, and read-only where asked."""
    attributes = _MOUNT_ATTR_NOSUID | (0 if devices else _MOUNT_ATTR_NODEV) | (_MOUNT_ATTR_RDONLY if read_only else 0)
    wanted = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    try:
        syscall(_NR_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, wanted, 32)
    except OSError as error:
        if error.errno != 38:  # ENOSYS: before Linux 5.12
            raise
        kept = os.statvfs(path).f_flag & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        flags = kept | MS_NOSUID | (0 if devices else MS_NODEV) | (MS_RDONLY if read_only else 0)
        mount(None, path, None, MS_REMOUNT | MS_BIND | flags)


def drop_capabilities() -> None:
    """Give up every capability of this thread, ambient ones and the bounding set included where that is allowed."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == 22:  # EINVAL: past the last capability of this kernel
                break
            # EPERM: without CAP_SETPCAP the set stays, but no_new_privs leaves no way to gain from it
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)


def clear_capabilities() -> None:
    """Empty the permitted, effective and inheritable sets."""
    number = _NR_CAPSET.get(machine())
    if number is None:
        return
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    syscall(number, header, ctypes.create_string_buffer(24))


def close_descriptors_except(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`."""
    low = 3
    for descriptor in [*sorted(value for value in keep if value > 2), 1 << 31]:
        if descriptor > low:
            last = descriptor - 1
            try:
                syscall(_NR_CLOSE_RANGE, low, last, 0)
            except OSError:
                os.closerange(low, min(last, 1 << 16) + 1)
        low = descriptor + 1
