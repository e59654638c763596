"""A file system of its own: a fresh root on a tmpfs that shows what the plan names and nothing else.

Everything to be shown is opened (O_PATH) before anything is covered and bound from the descriptor, so that files below
/tmp or below a home that only its owner may enter can be shown as well.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import PurePosixPath

from omnimodel.errors import IsolationError
from omnimodel.isolation import syscalls
from omnimodel.isolation.interpreter import KERNEL_FOLDERS, SYSTEM_FOLDERS, interpreter_paths, outermost
from omnimodel.isolation.plan import Mount, SandboxPlan

_STAGES = ("/tmp", "/mnt", "/srv", "/run", "/var")  # noqa: S108 - folders that every machine has, covered privately
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "timezone",
    "ssl",
    "ca-certificates",
    "pki",
    "nsswitch.conf",
    "mime.types",
    "services",
    "protocols",
    "alternatives",
)
_ETC_NETWORK = ("resolv.conf", "host.conf", "gai.conf")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PROC_FILES = ("cpuinfo", "stat", "uptime", "version", "filesystems", "loadavg", "sys/kernel/osrelease")
_PAGE_BYTES = 4096


def meminfo(memory_bytes: int) -> str:
    """What /proc/meminfo shows of a limit: what `free` and psutil read."""
    total = memory_bytes >> 10
    rows = {"MemTotal": total, "MemFree": total, "MemAvailable": total}
    zero = ("Buffers", "Cached", "SwapCached", "Active", "Inactive", "SwapTotal", "SwapFree", "Dirty", "Writeback")
    rows |= dict.fromkeys((*zero, "AnonPages", "Mapped", "Shmem", "Slab", "SReclaimable", "SUnreclaim"), 0)
    return "".join(f"{name + ':':16s}{value:8d} kB\n" for name, value in rows.items())


class _Root:
    """The new root while it is built at `stage`."""

    def __init__(self, plan: SandboxPlan) -> None:
        self.plan = plan
        self.stage = ""
        self.missing: list[str] = []

    def path(self, target: str) -> str:
        return self.stage + target

    def place(self, target: str, *, folder: bool) -> str:
        """Make the place where something is mounted."""
        where = self.path(target)
        try:
            if folder:
                os.makedirs(where, mode=0o755, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(where), mode=0o755, exist_ok=True)
                if not os.path.lexists(where):
                    os.close(os.open(where, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        except OSError as error:
            if error.errno in {errno.EROFS, errno.EACCES, errno.EEXIST, errno.ENOTDIR}:
                raise IsolationError(
                    f"sandbox of {self.plan.instance}",
                    f"nothing can be mounted at {target}: it lies in a folder that is shown read-only",
                    "choose another path in the manifest's mounts",
                ) from error
            raise
        return where

    def bind(self, descriptor: int, target: str, *, read_only: bool, device: bool = False) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        where = self.place(target, folder=folder)
        syscalls.mount(f"/proc/self/fd/{descriptor}", where, None, syscalls.MS_BIND | syscalls.MS_REC)
        syscalls.restrict_mount(where, read_only=read_only, devices=device)

    def tmpfs(self, target: str, size_bytes: int, mode: str) -> None:
        """A tmpfs with room for `size_bytes` and for as many files as that has pages."""
        where = self.place(target, folder=True)
        options = f"size={size_bytes},nr_inodes={size_bytes // _PAGE_BYTES + 1024},mode={mode}"
        syscalls.mount("tmpfs", where, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)

    def write(self, target: str, text: str) -> None:
        where = self.path(target)
        os.makedirs(os.path.dirname(where), mode=0o755, exist_ok=True)
        with open(where, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(where, 0o644)


def shown(plan: SandboxPlan) -> list[Mount]:
    """Everything that comes from the machine, outer targets first.

    Args:
        plan: its paths are added to those of the interpreter.
    """
    same = [Mount(path, path) for path in outermost((*interpreter_paths(), *plan.read_only))]
    same += [Mount(path, path, read_only=False) for path in plan.writable]
    return sorted([*same, *plan.mounts], key=lambda mount: mount.target.rstrip("/").count("/"))


def _open_sources(plan: SandboxPlan) -> list[tuple[int, Mount]]:
    opened: list[tuple[int, Mount]] = []
    for mount in shown(plan):
        try:
            descriptor = os.open(mount.source, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise IsolationError(
                f"sandbox of {plan.instance}",
                f"{mount.source} cannot be shown at {mount.target}: {error.strerror}",
                "check that the path exists on this machine",
            ) from error
        opened.append((descriptor, mount))
        where = PurePosixPath(os.readlink(f"/proc/self/fd/{descriptor}"))
        if mount.within and not where.is_relative_to(mount.within):
            raise IsolationError(
                f"sandbox of {plan.instance}",
                f"{mount.source} cannot be shown at {mount.target}: a symbolic link leads out of {mount.within}",
                "put the files themselves there, or links that stay in it",
            )
    return opened


def _system(root: _Root) -> None:
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), root.path(folder))
        elif os.path.isdir(folder):
            descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            root.bind(descriptor, folder, read_only=True)
            os.close(descriptor)


def _optional(root: _Root, path: str, *, device: bool = False) -> None:
    """Show a path of the machine if it has it."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        root.bind(descriptor, path, read_only=not device, device=device)
    except OSError as error:
        root.missing.append(f"{path}: {error.strerror}")
    finally:
        os.close(descriptor)


def _etc(root: _Root) -> None:
    plan = root.plan
    uid = plan.uid or os.getuid()
    for name in (*_ETC, *(_ETC_NETWORK if plan.network else ())):
        _optional(root, f"/etc/{name}")
    root.write("/etc/passwd", f"root:x:0:0::/:/usr/sbin/nologin\nmodel:x:{uid}:{uid}::/tmp:/bin/sh\n")
    root.write("/etc/group", f"root:x:0:\nmodel:x:{uid}:\n")
    root.write("/etc/hosts", f"127.0.0.1 localhost {plan.hostname}\n::1 localhost\n")
    root.write("/etc/hostname", plan.hostname + "\n")


def _dev(root: _Root) -> None:
    os.makedirs(root.path("/dev"), mode=0o755, exist_ok=True)
    for name in _DEVICES:
        _optional(root, f"/dev/{name}", device=True)
    for node in root.plan.devices:
        _optional(root, node, device=True)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", root.path(f"/dev/{name}"))
    root.tmpfs("/dev/shm", root.plan.shm_bytes, "1777")  # noqa: S108


def _proc(root: _Root, limit: int) -> None:
    """A /proc of its own pid namespace, or, where none may be mounted, the few files that libraries read."""
    where = root.place("/proc", folder=True)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    try:
        syscalls.mount("proc", where, "proc", flags)
    except OSError as error:
        root.missing.append(
            f"a /proc of its own: mounting one is refused ({error.strerror}), it sees /proc/self and a few files only"
        )
        me = os.open(f"/proc/{os.readlink('/proc/self')}", os.O_PATH | os.O_CLOEXEC)
        root.bind(me, "/proc/self", read_only=False)
        os.close(me)
        for name in _PROC_FILES:
            _optional(root, f"/proc/{name}")
        if not root.plan.memory_bytes:
            _optional(root, "/proc/meminfo")
        os.symlink("self/mounts", root.path("/proc/mounts"))
    if root.plan.memory_bytes:
        root.bind(limit, "/proc/meminfo", read_only=True)


def _switch(root: _Root) -> None:
    """Make the new root the root and let go of the old one."""
    os.chdir(root.stage)
    try:
        syscalls.pivot_root(".", ".")
        syscalls.unmount(".")  # the old root lies on top at this place
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EINVAL, errno.ENOSYS}:
            raise
        syscalls.mount(root.stage, "/", None, syscalls.MS_MOVE)
        os.chroot(".")
    os.chdir("/")
    flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount(None, "/", None, flags)


def change_root(plan: SandboxPlan) -> tuple[str, ...]:
    """Give this process, which is in a new mount namespace, its own root.

    Returns:
        One sentence for each thing that could not be shown or hidden as planned.

    Raises:
        IsolationError: a path of the plan does not exist, or cannot be shown where it is wanted.
        OSError: mounting is not allowed here.
    """
    root = _Root(plan)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    sources = _open_sources(plan)
    root.stage = next(folder for folder in _STAGES if os.path.isdir(folder))
    syscalls.mount(
        "root", root.stage, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,nr_inodes=8192,mode=755"
    )
    _system(root)
    _etc(root)
    for folder in KERNEL_FOLDERS:
        _optional(root, folder)
    _dev(root)
    root.write("/run/meminfo", meminfo(plan.memory_bytes))
    limit = os.open(root.path("/run/meminfo"), os.O_PATH | os.O_CLOEXEC)
    _proc(root, limit)
    os.close(limit)
    os.unlink(root.path("/run/meminfo"))
    root.tmpfs("/tmp", plan.tmp_bytes, "1777")  # noqa: S108
    for descriptor, mount in sources:
        if mount.size_bytes:
            root.tmpfs(mount.target, mount.size_bytes, "1777")
        else:
            root.bind(descriptor, mount.target, read_only=mount.read_only)
        os.close(descriptor)
    for folder in plan.hidden:
        if os.path.isdir(root.path(folder)):
            where = root.path(folder)
            syscalls.mount("none", where, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4k,mode=755")
            syscalls.restrict_mount(where, read_only=True)
    _switch(root)
    return tuple(root.missing)
