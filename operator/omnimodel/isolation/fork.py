"""A fork into a new pid namespace: with privileges directly, without them by way of a user namespace, else plainly."""

from __future__ import annotations

import os

from omnimodel.isolation import syscalls


def fork_isolated(uid: int) -> int:
    """Fork; the child is pid 1 of a new pid namespace where that is allowed. The caller must have one thread.

    The caller should be a child subreaper: without privileges the child is a grandchild that it adopts.

    Args:
        uid: the user that the child will become; mapped into its user namespace where one is needed.

    Returns:
        0 in the child, its pid (as the caller sees it) in the caller.
    """
    pid = fork_ahead()
    return _through_user_namespace(uid) if pid is None else pid


def fork_ahead() -> int | None:
    """The same for a child of which nobody knows yet who it will be.

    Returns:
        None, and there is no child, where it takes a user namespace, which is made for a user.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            syscalls.unshare(syscalls.CLONE_NEWPID)  # for the next child only
        except OSError:
            return None
        try:
            pid = os.fork()
        except OSError:
            syscalls.setns(own, syscalls.CLONE_NEWPID)
            raise
        if pid != 0:
            syscalls.setns(own, syscalls.CLONE_NEWPID)  # back: a second unshare would fail
        return pid
    finally:
        os.close(own)


def _through_user_namespace(uid: int) -> int:
    up_read, up_write = os.pipe()
    down_read, down_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        return _middle(up_read, up_write, down_read, down_write)
    os.close(up_write)
    os.close(down_read)
    try:
        if os.read(up_read, 1) != b"U":
            os.waitpid(middle, 0)
            return os.fork()
        os.write(down_write, b"M" if _map_for(middle, uid) else b"-")
        answer = os.read(up_read, 32)
        os.waitpid(middle, 0)
        return int(answer) if answer else os.fork()
    finally:
        os.close(up_read)
        os.close(down_write)


def _map_for(pid: int, uid: int) -> bool:
    """Map our own user and the model's into the namespace of `pid`; False when only the process itself may map."""
    try:
        for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
                file.write(f"{own} {own} 1\n" + (f"{uid} {uid} 1\n" if uid not in {0, own} else ""))
    except OSError:
        return False
    return True


def _middle(up_read: int, up_write: int, down_read: int, down_write: int) -> int:
    """The process between: it makes the namespaces, forks the model's process into them and ends."""
    os.close(up_read)
    os.close(down_write)
    uid, gid = os.geteuid(), os.getegid()
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID)
    except OSError:
        os._exit(0)
    os.write(up_write, b"U")
    try:
        if os.read(down_read, 1) == b"-":
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                    file.write(text)
        pid = os.fork()
    except OSError:
        os._exit(0)
    if pid == 0:
        os.close(up_write)
        os.close(down_read)
        return 0
    os.write(up_write, str(pid).encode())
    os._exit(0)
