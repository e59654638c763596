"""The zygote: a process that has imported the heavy libraries and forks models from there.

`python -m omnimodel.runtime.zygote DESCRIPTOR [--preload MODULE,…]`. It starts no thread, runs no tensor operation,
touches no accelerator and holds no secret, because every model's process begins as a copy of it. On its channel:

| asked | descriptors | answered |
|---|---|---|
| `{"op": "spare", "group"}` | doors of that group | nothing |
| `{"op": "fork", "instance", "plan", "overlay": [folders], "bare", "environment": [paths], "target", "group", "groups": count, "names": [..]}` | control, log, doors of its groups, then `names` | `{"kind": "forked", "instance", "pid", "startTicks", "seconds"}` and a pidfd, or `refused`, or `conflict` when an overlay holds what is imported here (a bare zygote imported nothing) |
| | | `{"kind": "exited", "pid", "status"}` for each child that ended |

Nothing of an overlay is imported here: its packages are a stranger's, and this process is in no sandbox.
Who asks for a process in the group of the spare, a child that was forked before and waits (see `spare`), gets that.
Any other child moves into its control groups, so that all it touches from then on is its own, enters its sandbox, says
`{"kind": "entered", "reached", "seconds"}` on its control channel, waits for `{"op": "go", "env"}` and calls `target`,
`omnimodel.runtime.serve:run`.
"""  # noqa: E501 - a table

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from omnimodel.errors import OmniError, Reason
from omnimodel.isolation import SandboxPlan, enter, fork_isolated
from omnimodel.isolation.syscalls import PR_SET_CHILD_SUBREAPER, close_descriptors_except, prctl
from omnimodel.protocol.channel import Channel, ChannelClosed
from omnimodel.runtime.allocator import fill_holes
from omnimodel.runtime.orphans import OrphanReaper, children
from omnimodel.runtime.preload import PRELOAD, REHEARSAL, preload
from omnimodel.runtime.spare import Spare, go_in

SERVE = "omnimodel.runtime.serve:run"
_QUIET_MILLISECONDS = 50


def thread_names() -> list[str]:
    """Names of this process's threads, as the kernel has them."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            names.append(file.read().strip())
    return names


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot: with its pid its identity."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def private_bytes() -> int:
    """Memory that this process shares with no other."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


class Zygote:
    """Answers fork requests, one at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._known: set[int] = set()
        self._spare: Spare | None = None
        self._wanted: tuple[str, list[int]] | None = None  # group of the next spare, and its doors

    def prepare(self, modules: Sequence[str]) -> None:
        """Import, and say that it is up."""
        began = time.monotonic()
        absent = preload(
            modules,
            lambda name, done, total: self.channel.send(
                {"kind": "progress", "stage": f"importing {name}", "done": done, "total": total}
            ),
        )
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # without privileges a child arrives by way of a process that ends
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()
        fill_holes()
        self.channel.send(
            {
                "kind": "up",
                "pid": os.getpid(),
                "startTicks": start_ticks(os.getpid()),
                "threads": len(thread_names()),
                "seconds": time.monotonic() - began,
                "privateBytes": private_bytes(),
                "absent": absent,
            }
        )

    def serve(self) -> None:
        """Answer until the agent is gone; the children live on."""
        poll = select.poll()
        poll.register(self.channel.sock, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_QUIET_MILLISECONDS if self._wanted else None)}
            if not ready:
                self._fork_spare()
            try:
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                if self.channel.sock.fileno() in ready:
                    request, descriptors = self.channel.receive()
                    if request["op"] == "spare":
                        self._want(request["group"], descriptors)
                        continue
                    try:
                        self._answer(request, descriptors)
                    finally:
                        _close(descriptors)
            except ChannelClosed:
                self._end_spare()
                return

    def _want(self, group: str, doors: list[int]) -> None:
        """Note that a spare shall be forked, once it is quiet, so that a process which begins has the processor."""
        if self._wanted is not None:
            _close(self._wanted[1])
        self._wanted = group, doors

    def _fork_spare(self) -> None:
        """Fork for the next who asks, while nobody does."""
        assert self._wanted is not None
        (group, doors), self._wanted = self._wanted, None
        self._end_spare()
        try:
            if len(thread_names()) == 1:
                self._spare = Spare.fork(group, doors, _rehearse, self._become_child)
        except OSError:
            pass  # there is no room for one
        finally:
            _close(doors)

    def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()

    def _end_orphans(self) -> None:
        """Without a pid namespace the children of a dead model come to us, whatever session they are in."""
        own = self._known | ({self._spare.pid} if self._spare else set())
        for pid in set(children()) - own:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                self._end_orphans()
                return
            if self._spare is not None and pid == self._spare.pid:
                self._spare = None
            if pid not in self._known:
                continue
            self._known.discard(pid)
            self.channel.send({"kind": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _answer(self, request: Mapping[str, Any], descriptors: list[int]) -> None:
        about = {"instance": request["instance"]}
        threads = thread_names()
        if len(threads) != 1:
            problem = f"the zygote has {len(threads)} threads ({', '.join(threads)}): a fork could hang"
            self.channel.send({"kind": "refused", **about, "message": problem})
            return
        began = time.monotonic()
        try:
            if not request["bare"] and (conflict := _imported(request["overlay"])):
                self._end_spare()  # it must not be in the group of a process that is forked elsewhere
                self.channel.send({"kind": "conflict", **about, "modules": conflict})
                return
            pid = self._fork(request, descriptors)
        except OSError as error:
            self.channel.send({"kind": "refused", **about, "message": f"fork failed: {error.strerror}"})
            return
        self._known.add(pid)
        pidfd = os.pidfd_open(pid)
        seconds = time.monotonic() - began
        try:
            self.channel.send(
                {"kind": "forked", **about, "pid": pid, "startTicks": start_ticks(pid), "seconds": seconds}, [pidfd]
            )
        finally:
            os.close(pidfd)

    def _fork(self, request: Mapping[str, Any], descriptors: list[int]) -> int:
        """The pid of a process for a request: the spare's, or a new one's."""
        spare = self._spare
        if self._wanted is not None and self._wanted[0] == request["group"]:
            _close(self._wanted[1])
            self._wanted = None
        if spare is not None and spare.group == request["group"]:
            self._spare = None
            if spare.told(request, descriptors):
                return spare.pid
        pid = fork_isolated(request["plan"]["uid"])
        if pid == 0:
            self._become_child(request, descriptors)
        return pid

    def _become_child(self, request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
        """The model's process, from its first instruction on."""
        try:
            plan = SandboxPlan.from_json(request["plan"])
            signal.set_wakeup_fd(-1)
            os.setsid()
            control, log, *rest = descriptors
            groups, extra = rest[: request["groups"]], rest[request["groups"] :]
            go_in(groups)
            os.dup2(log, 1)
            os.dup2(log, 2)
            close_descriptors_except({control, *extra})
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # while it lives, its orphans are its own
            faulthandler.enable()  # a crash in native code leaves the line it happened in in the log
            # pid 1 of a pid namespace ignores signals without a handler, and inherits its orphans
            signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
            signal.signal(signal.SIGCHLD, OrphanReaper())
            status = _run_child(
                Channel(socket.socket(fileno=control)), request, plan, dict(zip(request["names"], extra, strict=True))
            )
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except ChannelClosed:
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _rehearse() -> None:
    if REHEARSAL in sys.modules:  # a bare zygote has nothing to rehearse with
        sys.modules[REHEARSAL].rehearse()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _reseed() -> None:
    """A fork copies the state of every random number generator: two models would draw the same numbers."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _run_child(channel: Channel, request: Mapping[str, Any], plan: SandboxPlan, descriptors: Mapping[str, int]) -> int:
    began = time.monotonic()
    try:
        reached = enter(plan)
    except BaseException as error:
        channel.send(
            {
                "kind": "failed",
                "reason": str(error.reason if isinstance(error, OmniError) else Reason.INTERNAL),
                "message": str(error) if isinstance(error, OmniError) else f"{type(error).__name__}: {error}",
                "detail": "" if isinstance(error, OmniError) else traceback.format_exc(),
            }
        )
        return 1
    _reseed()
    channel.send({"kind": "entered", "reached": reached.to_json(), "seconds": time.monotonic() - began})
    go, _ = channel.receive()
    os.environ.update(go["env"])
    tempfile.tempdir = None  # looked for anew: where this process may write is not where the zygote might
    os.chdir(go.get("workingDir") or ("/tmp" if os.getpid() == 1 else "/"))  # noqa: S108 - its own
    sys.path[:0] = [*(plan.told(path, reached.level) for path in request["environment"]), *request["overlay"]]
    module, _, function = request["target"].partition(":")
    run = getattr(importlib.import_module(module), function)
    status = run(channel, request["instance"], dict(descriptors))
    return status if isinstance(status, int) else 0


def _imported(overlay: Sequence[str]) -> list[str]:
    """Modules that an overlay holds another copy of than the one that is imported here."""
    return sorted(name for path in overlay for name in packages(path) if name in sys.modules)


def packages(path: str) -> set[str]:
    """Names that can be imported from a folder of packages."""
    names = set()
    for entry in os.scandir(path):
        stem = entry.name.partition(".")[0]
        if stem.isidentifier() and (entry.is_dir() or entry.name.endswith((".py", ".so"))):
            names.add(stem)
    return names


def main(arguments: Sequence[str]) -> int:
    """Run a zygote on the channel whose descriptor is the first argument."""
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    modules = [name for name in arguments[2].split(",") if name] if len(arguments) > 2 else list(PRELOAD)
    zygote = Zygote(channel)
    try:
        zygote.prepare(modules)
        zygote.serve()
    except ChannelClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
