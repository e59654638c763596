"""The agent's side of the zygotes: the one that models are forked from, started when first needed, again when it died.

An environment that holds another copy of what that one has imported gets a bare zygote of its own, whose children
import everything themselves: what an environment holds is a stranger's code, which runs in sandboxes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnimodel.agent.journal import Entry, Journal, start_ticks
from omnimodel.agent.zygote import ProgressSaid, Zygote, ZygoteReport
from omnimodel.errors import IsolationError, OmniError, ProcessError, Reason
from omnimodel.isolation import Reached, SandboxPlan
from omnimodel.protocol.channel import Allowance, AsyncChannel, ChannelClosed, socket_pair

log = logging.getLogger(__name__)

SERVE = "omnimodel.runtime.serve:run"

# Both are read when the libraries load, too late after a fork. NVML answers whether
# there is a GPU without touching it.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "HOME": "/tmp",  # noqa: S108 - the model's own
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # a bar that is drawn anew in one endless line is no log
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}
_SPARE_BYTES = 14 << 20  # measured: 11.9 MiB beside what it shares with its zygote, and 1.3 MiB of page tables
_KEPT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SSL_CERT_FILE")


def nobody_tells() -> asyncio.Future[int]:
    """The exit status of a process that no zygote of this agent waits for."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


@dataclass
class Forked:
    """A process that is in its sandbox and waits for `go`.

    Args:
        instance: its identity.
        pid, start_ticks: of the process, as the agent sees it; the two together are never used again.
        pidfd: readable when it has ended; the receiver's to close.
        channel: to the process.
        reached: its sandbox.
        fork_seconds, enter_seconds: what the two took.
        status: its exit status (negative: the signal), when the zygote has told it; cancelled when none will.
    """

    instance: str
    pid: int
    start_ticks: int
    pidfd: int
    channel: AsyncChannel
    reached: Reached
    fork_seconds: float
    enter_seconds: float
    status: asyncio.Future[int] = field(repr=False, default_factory=nobody_tells)

    async def go(self, env: Mapping[str, str], working_dir: str = "") -> None:
        """Let the model's code begin. Secrets go this way, past the zygote."""
        await self.channel.send({"op": "go", "env": dict(env), "workingDir": working_dir})

    def abandon(self) -> None:
        """Kill it and let go of it."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)


Environment = tuple[str, ...]


class Zygotes:
    """Forks models' processes.

    Args:
        state_dir: for the zygotes' logs.
        python: the interpreter with torch and the rest.
        preload: modules to import at the start; None for the runtime's own list.
        start_seconds: how long importing may take.
        import_path: folders to put before the import path of every zygote.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        *,
        python: str = sys.executable,
        preload: Sequence[str] | None = None,
        start_seconds: float = 180.0,
        import_path: Sequence[str] = (),
    ) -> None:
        self._logs = Path(state_dir) / "logs"
        self._python = python
        self._preload = preload
        self._start_seconds = start_seconds
        self._import_path = tuple(import_path)
        self._journal = Journal(Path(state_dir) / "journal")
        self._zygotes: dict[Environment, Zygote] = {}
        self._closed = False
        self._replacing: asyncio.Task[None] | None = None
        self._locks: dict[Environment, asyncio.Lock] = {}
        self._number = 0

    async def start(self, progress: ProgressSaid | None = None) -> ZygoteReport:
        """Start the zygote of the empty environment.

        Raises:
            ProcessError: it did not come up.
        """
        return await (await self._get((), progress)).report

    def private_bytes(self) -> int:
        """What the zygotes cost this machine: what each held alone when it came up, which its children now share.

        And the spare, which belongs to no model.
        """
        up = [zygote.report.result().private_bytes for zygote in self._zygotes.values() if zygote.up]
        return sum(up) + (_SPARE_BYTES if up else 0)

    def processes(self) -> list[tuple[int, int]]:
        """(pid, start ticks) of every zygote that is up."""
        reports = [zygote.report.result() for zygote in self._zygotes.values() if zygote.alive and zygote.up]
        return [(report.pid, report.start_ticks) for report in reports]

    async def provide(self, group: str, group_descriptors: Sequence[int]) -> None:
        """Have the zygote of the empty environment, where it is up, fork a spare into a group, once it is quiet.

        Args:
            group: its name.
            group_descriptors: see `Group.doors`.

        Raises:
            ProcessError: it has ended.
        """
        zygote = self._zygotes.get(())
        if zygote is not None and zygote.alive:
            message = {"op": "spare", "group": group}
            await zygote.tell(message, group_descriptors)

    async def fork(
        self,
        plan: SandboxPlan,
        *,
        log_descriptor: int,
        group: str = "",
        group_descriptors: Sequence[int] = (),
        environment: Environment = (),
        paths: Sequence[str] = (),
        descriptors: Mapping[str, int] | None = None,
        target: str = SERVE,
        timeout_seconds: float = 30.0,
        born: Callable[[int], object] = lambda _: None,
    ) -> Forked:
        """Fork a process and wait until it is in its sandbox.

        Args:
            plan: of the sandbox.
            log_descriptor: what it prints goes here.
            group: that it shall be in, by the name that `provide` was told.
            group_descriptors: see `Group.doors`.
            environment: folders of packages, which the process finds at the same place.
            paths: further import paths, as the process sees them; they come first.
            descriptors: handed to the process by name; they stay open here.
            target: what runs in the process.
            timeout_seconds: of the fork, without the start of a zygote.
            born: told its pid, while it enters its sandbox.

        Raises:
            IsolationError: the machine does not give the plan's minimum.
            ProcessError: it did not start, or not in time.
        """
        ours, theirs = socket_pair()
        channel = AsyncChannel(ours, allowance=Allowance())
        named = dict(descriptors or {})
        message = {
            "op": "fork",
            "instance": plan.instance,
            "plan": plan.to_json(),
            "overlay": list(environment),
            "bare": False,
            "environment": list(paths),
            "target": target,
            "group": group,
            "groups": len(group_descriptors),
            "names": list(named),
        }
        pidfd = -1
        try:
            with theirs:
                shown = [theirs.fileno(), log_descriptor, *group_descriptors, *named.values()]
                zygote = await self._get((), None)
                async with asyncio.timeout(timeout_seconds):
                    reply, received = await zygote.ask(plan.instance, message, shown)
                if reply["kind"] == "conflict":
                    log.info("fork_bare instance=%s modules=%s", plan.instance, ",".join(reply["modules"]))
                    zygote = await self._get(tuple(environment), None)
                    async with asyncio.timeout(timeout_seconds):
                        reply, received = await zygote.ask(plan.instance, {**message, "bare": True}, shown)
            if reply["kind"] != "forked":
                raise ProcessError(f"process {plan.instance}", reply["message"], "restart the agent")
            pidfd = received[0]
            born(reply["pid"])
            async with asyncio.timeout(timeout_seconds):
                first, _ = await channel.receive()
            if first["kind"] == "failed":
                raise _failure(plan, first)
        except BaseException as error:
            channel.close()  # the child sees it and ends
            if pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    _kill(pidfd)
                os.close(pidfd)
            if isinstance(error, TimeoutError):
                raise ProcessError(
                    f"process {plan.instance}",
                    f"it was not in its sandbox after {timeout_seconds:g} s",
                    "see whether the machine is overloaded",
                    reason=Reason.LOAD_TIMEOUT,
                ) from error
            if isinstance(error, ChannelClosed):
                raise ProcessError(f"process {plan.instance}", "it ended before it was in its sandbox") from error
            raise
        forked = Forked(
            plan.instance,
            reply["pid"],
            reply["startTicks"],
            pidfd,
            channel,
            Reached.from_json(first["reached"]),
            reply["seconds"],
            first["seconds"],
            zygote.statuses.get(reply["pid"]) or nobody_tells(),
        )
        log.info(
            "forked instance=%s pid=%d level=%s fork_seconds=%.4f enter_seconds=%.4f",
            forked.instance,
            forked.pid,
            forked.reached.level,
            forked.fork_seconds,
            forked.enter_seconds,
        )
        return forked

    async def close(self) -> None:
        """End every zygote; the processes forked from them live on."""
        self._closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        for environment in list(self._zygotes):
            await self.retire(environment)

    async def retire(self, environment: Environment) -> None:
        """End the zygote of an environment that no model uses any more; its processes live on."""
        zygote = self._zygotes.pop(tuple(environment), None)
        if zygote is not None:
            await zygote.close()
            self._journal.forget(zygote.log_path.stem)

    def _replace_base(self) -> None:
        """Start the base anew when it died, so that the next fork need not wait for the imports."""

        async def replace() -> None:
            try:
                await self._get((), None)
            except ProcessError as error:  # the next fork tries again and reports it
                log.warning("zygote_not_replaced error=%s", error)

        log.warning("zygote_died")
        if not self._closed:
            self._replacing = asyncio.create_task(replace(), name="replace zygote")

    async def _get(self, environment: Environment, progress: ProgressSaid | None) -> Zygote:
        """The zygote of the empty environment, or the bare one of another."""
        lock = self._locks.setdefault(environment, asyncio.Lock())
        async with lock:
            zygote = self._zygotes.get(environment)
            if zygote is not None and zygote.alive:
                return zygote
            await self.retire(environment)  # the one that died
            zygote = await self._exec(environment, progress)
            self._zygotes[environment] = zygote
            return zygote

    async def _exec(self, environment: Environment, progress: ProgressSaid | None) -> Zygote:
        ours, theirs = socket_pair()
        log_path = self._log_path()
        command = [self._python, "-P", "-m", "omnimodel.runtime.zygote", str(theirs.fileno())]
        preload = () if environment else self._preload
        if preload is not None:
            command += ["--preload", ",".join(preload)]
        package_parent = str(Path(__file__).parents[2])
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        path = os.pathsep.join((*self._import_path, package_parent))
        with theirs, log_path.open("wb") as log_file:
            starting = asyncio.ensure_future(
                asyncio.to_thread(
                    subprocess.Popen,
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    env={**kept, **_ENVIRONMENT, "PYTHONPATH": path},
                    cwd="/",
                    start_new_session=True,  # Ctrl-C is for the agent, which drains in stages
                )
            )
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                await asyncio.wait([starting])  # a thread cannot be stopped, and nobody else knows its process
                ours.close()
                if not starting.exception():
                    starting.result().kill()
                    await asyncio.to_thread(starting.result().wait)
                raise
        self._journal.record(Entry(log_path.stem, process.pid, start_ticks(process.pid) or 0, ()))
        channel = AsyncChannel(ours, descriptors=1)
        zygote = Zygote(channel, process, log_path, self._replace_base if not environment else lambda: None)
        zygote.progress = progress
        return await self._up(zygote, environment)

    async def _up(self, zygote: Zygote, environment: Environment) -> Zygote:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._start_seconds):
                report = await asyncio.shield(zygote.report)
        except (TimeoutError, ProcessError) as error:
            await zygote.close(kill=True)
            self._journal.forget(zygote.log_path.stem)
            late = isinstance(error, TimeoutError)
            raise ProcessError(
                "zygote",
                f"it was not up after {self._start_seconds:g} s"
                if late
                else f"it ended while it started: {zygote.last_line()}",
                f"see {zygote.log_path}",
                reason=Reason.ENVIRONMENT_FAILED,
            ) from error
        except BaseException:
            await zygote.close(kill=True)
            self._journal.forget(zygote.log_path.stem)
            raise
        log.info(
            "zygote_up pid=%d environment=%s seconds=%.3f private_bytes=%d absent=%s",
            report.pid,
            ",".join(environment) or "-",
            time.monotonic() - began,
            report.private_bytes,
            ",".join(name.partition(" ")[0] for name in report.absent) or "-",
        )
        return zygote

    def _log_path(self) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._number += 1
        return self._logs / f"zygote-{self._number}.log"


def _kill(pidfd: int) -> None:
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _failure(plan: SandboxPlan, message: Mapping[str, Any]) -> OmniError:
    reason = Reason(message["reason"])
    kind = IsolationError if reason is Reason.ISOLATION_UNAVAILABLE else ProcessError
    return kind(f"process {plan.instance}", message["message"], message["detail"], reason=reason)
