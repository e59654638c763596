"""Landlock: a process's own, irrevocable list of what it may still open. Needs no privilege; Linux 5.13 and later."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from omnimodel.isolation.syscalls import syscall

_NR_CREATE, _NR_ADD, _NR_RESTRICT = 444, 445, 446
_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1

# Source: include/uapi/linux/landlock.h
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR = 1 << 4, 1 << 5, 1 << 6, 1 << 7
_MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = 1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_SOCKET, _SCOPE_SIGNAL = 1, 2

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = (
    READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SOCK | _MAKE_FIFO | _MAKE_SYM
) | (_REFER | _TRUNCATE)
DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def version() -> int:
    """The version of the kernel's Landlock interface; 0 when there is none or it is switched off."""
    try:
        return syscall(_NR_CREATE, 0, 0, _CREATE_VERSION)
    except OSError:
        return 0


def _handled(abi: int) -> int:
    return (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1


def restrict(rules: Iterable[tuple[str, int]], *, tcp: bool) -> tuple[str, ...]:
    """Allow this thread and its children only what `rules` name; no_new_privs must be set.

    Args:
        rules: (path, rights beneath it: `READ`, `WRITE` or `DEVICE`); a path that does not exist is passed over.
        tcp: whether TCP may be bound and connected.

    Returns:
        One sentence for each part that this kernel's Landlock is too old for.

    Raises:
        OSError: there is no Landlock.
    """
    abi = version()
    if abi == 0:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock, or it is switched off")
    missing = []
    handled = _handled(abi)
    net = 0 if tcp or abi < 4 else _BIND_TCP | _CONNECT_TCP
    scoped = _SCOPE_ABSTRACT_SOCKET | _SCOPE_SIGNAL if abi >= 6 else 0
    if abi < 6:
        missing.append(f"signals and abstract sockets by Landlock: version 6 is needed, this kernel has {abi}")
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    attributes = ctypes.create_string_buffer(struct.pack("QQQ", handled, net, scoped)[:size], size)
    ruleset = syscall(_NR_CREATE, attributes, size, 0)
    try:
        for path, rights in rules:
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                allowed = rights & handled & (handled if folder else _OF_FILES)
                rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor), 12)
                syscall(_NR_ADD, ruleset, _RULE_PATH_BENEATH, rule, 0)
            finally:
                os.close(descriptor)
        syscall(_NR_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)
    return tuple(missing)
