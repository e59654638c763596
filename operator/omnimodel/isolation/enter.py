"""The way down the ladder, walked inside a forked child before any of the model's code runs."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from collections.abc import Callable

from omnimodel.errors import IsolationError
from omnimodel.isolation import landlock, seccomp, syscalls
from omnimodel.isolation.interpreter import KERNEL_FOLDERS, SYSTEM_FOLDERS, interpreter_paths
from omnimodel.isolation.plan import Level, Reached, SandboxPlan
from omnimodel.isolation.root import change_root

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_READABLE_FILES = (
    *SYSTEM_FOLDERS,
    *(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "ssl", "ca-certificates", "pki", "nsswitch.conf")),
    *(f"/etc/{name}" for name in ("passwd", "group", "hosts", "resolv.conf", "mime.types", "services", "protocols")),
    *(f"/proc/{name}" for name in ("cpuinfo", "meminfo", "stat", "uptime", "version", "filesystems", "loadavg")),
    "/proc/sys/kernel/osrelease",
    *KERNEL_FOLDERS,
)
_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))


class _Steps:
    """Tries one step after another and notes what is missing."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def attempt(self, promise: str, step: Callable[[], object]) -> bool:
        try:
            step()
        except OSError as error:
            self.missing.append(f"{promise}: {error.strerror or error}")
            return False
        return True


def enter(plan: SandboxPlan) -> Reached:
    """Put this process into its sandbox, as strong as the machine allows. It must have one thread.

    Called in a child of `fork_isolated`: the pid namespace (and, without privileges, the user namespace) comes from it.

    Raises:
        IsolationError: the level reached is below the plan's minimum, or a path of the plan cannot be shown.
    """
    steps = _Steps()
    os.umask(0o022)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, plan.open_files)
    level = Level.PROCESS
    if plan.wanted is Level.NAMESPACES and _namespaces(plan, steps):
        level = Level.NAMESPACES
    steps.attempt("an empty bounding set of capabilities", syscalls.drop_capabilities)
    own_user = _identity(plan, steps, level)
    steps.attempt("no capabilities", syscalls.clear_capabilities)
    if plan.processes and own_user:
        _limit(resource.RLIMIT_NPROC, plan.processes)
    steps.attempt("no new privileges", lambda: syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1))
    if plan.wanted is not Level.PROCESS and _landlock(plan, steps, level) and level is Level.PROCESS:
        level = Level.LANDLOCK
    _filter(plan, steps, level)
    if level is not Level.NAMESPACES:
        steps.missing += _below_namespaces(plan, level, own_user=own_user)
    if level.strength < plan.minimum.strength:
        raise IsolationError(
            f"sandbox of {plan.instance}",
            f"level {plan.minimum} is asked for, but this machine gives {level} ({'; '.join(steps.missing)})",
            "allow a lower isolation.level in the OmniPool, or give the agent the privileges that are missing",
        )
    return Reached(level, tuple(steps.missing))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))


def _namespaces(plan: SandboxPlan, steps: _Steps) -> bool:
    if os.getpid() != 1:
        steps.missing.append("a pid namespace of its own: making one is not permitted")
        return False
    if not steps.attempt("a mount namespace of its own", lambda: syscalls.unshare(syscalls.CLONE_NEWNS)):
        return False
    before = len(steps.missing)
    extra: list[str] = []
    if not steps.attempt("a root of its own", lambda: extra.extend(change_root(plan))):
        return False
    steps.missing[before:before] = extra
    steps.attempt("an ipc namespace of its own", lambda: syscalls.unshare(syscalls.CLONE_NEWIPC))
    if steps.attempt("a host name of its own", lambda: syscalls.unshare(syscalls.CLONE_NEWUTS)):
        steps.attempt("a host name of its own", lambda: socket.sethostname(plan.hostname))
    if not plan.network and steps.attempt("no network", lambda: syscalls.unshare(syscalls.CLONE_NEWNET)):
        steps.attempt("a loopback of its own", _loopback_up)
    return True


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = b"lo".ljust(16, b"\0")
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, name + struct.pack("h14x", 0))
        (flags,) = struct.unpack_from("h", answer, 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, name + struct.pack("h14x", flags | _IFF_UP))


def _enterable(path: str) -> bool:
    """Whether any user may walk to this path."""
    while True:
        if os.path.isdir(path) and not os.stat(path).st_mode & 0o001:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def _identity(plan: SandboxPlan, steps: _Steps, level: Level) -> bool:
    """Become the plan's user; False when it stays the one it was."""
    if plan.uid == 0 or plan.uid == os.getuid():
        return False
    if level is not Level.NAMESPACES:
        own = [plan.scratch] if plan.scratch else []
        sources = [mount.source for mount in plan.mounts]
        needed = (*interpreter_paths(), *plan.read_only, *map(os.path.dirname, (*plan.writable, *own, *sources)))
        closed = [path for path in needed if not _enterable(path)]
        if closed:
            steps.missing.append(f"a user of its own: {closed[0]} lies in a folder that only its owner may enter")
            return False

    def become() -> None:
        os.setgroups([])
        os.setresgid(plan.uid, plan.uid, plan.uid)
        os.setresuid(plan.uid, plan.uid, plan.uid)

    return steps.attempt("a user of its own (it could reopen its weights for writing)", become)


def _landlock(plan: SandboxPlan, steps: _Steps, level: Level) -> bool:
    rules: list[tuple[str, int]]
    if level is Level.NAMESPACES:
        targets = [mount.target for mount in plan.mounts if not mount.read_only]
        rules = [("/", landlock.READ)]
        writable = ("/tmp", "/dev/shm", *plan.writable, *targets)  # noqa: S108 - both are its own here
    else:
        sources = [mount.source for mount in plan.mounts if not mount.read_only]
        shown = (*interpreter_paths(), *plan.read_only, *(mount.source for mount in plan.mounts if mount.read_only))
        rules = [(path, landlock.READ) for path in (*_READABLE_FILES, *shown)]
        # /proc/self would be another one's once this entry leaves the kernel's cache: the descriptor holds it there
        me = os.open(f"/proc/{os.readlink('/proc/self')}", os.O_PATH | os.O_CLOEXEC)
        rules.append((f"/proc/self/fd/{me}", landlock.READ))
        writable = (*([plan.scratch] if plan.scratch else ()), *plan.writable, *sources)
    rules += [(path, landlock.WRITE) for path in writable]
    rules += [(path, landlock.DEVICE) for path in (*_DEVICES, *plan.devices)]
    tcp = level is Level.NAMESPACES or plan.network or plan.loopback
    found: list[str] = []
    done = steps.attempt("Landlock", lambda: found.extend(landlock.restrict(rules, tcp=tcp)))
    steps.missing += found
    return done


def _filter(plan: SandboxPlan, steps: _Steps, level: Level) -> None:
    internet = level is Level.NAMESPACES or plan.network or plan.loopback
    filtered = steps.attempt("a filter of system calls", lambda: seccomp.install(internet=internet))
    if level is not Level.NAMESPACES and not plan.network and (plan.loopback or not filtered):
        steps.missing.append("no network: it can reach this machine's network")


def _below_namespaces(plan: SandboxPlan, level: Level, *, own_user: bool) -> list[str]:
    """What a weaker level lacks by its nature."""
    missing = ["its own /tmp and /dev/shm with a size", "/proc/meminfo with its own limit"]
    if level is Level.PROCESS:
        missing += ["other models' files out of sight", "other processes out of sight"]
    if not own_user:
        missing.append("other models' sockets out of reach: all have the same user")
    missing += [
        f"mount at {mount.target}: it is at {mount.source}" for mount in plan.mounts if mount.target != mount.source
    ]
    return missing
