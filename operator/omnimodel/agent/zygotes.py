"""The agent's side of the zygotes: one for each Python environment, started when first needed, again when it died."""

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

from omnimodel.errors import IsolationError, OmniError, ProcessError, Reason
from omnimodel.isolation import Reached, SandboxPlan
from omnimodel.protocol.channel import AsyncChannel, ChannelClosed, socket_pair

log = logging.getLogger(__name__)

SERVE = "omnimodel.runtime.serve:run"
ProgressSaid = Callable[[str, int, int], None]

# Source: host-notes.md, rule 2: both are read when the libraries load, too late after a fork. NVML answers whether
# there is a GPU without touching it.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "HOME": "/tmp",  # noqa: S108 - the model's own
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}
_KEPT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SSL_CERT_FILE")
_LOG_TAIL_BYTES = 4000


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
        status: its exit status (negative: the signal), when the zygote has told it.
    """

    instance: str
    pid: int
    start_ticks: int
    pidfd: int
    channel: AsyncChannel
    reached: Reached
    fork_seconds: float
    enter_seconds: float
    status: asyncio.Future[int] = field(repr=False)

    async def go(self, env: Mapping[str, str], working_dir: str = "") -> None:
        """Let the model's code begin. Secrets go this way, past the zygote."""
        await self.channel.send({"op": "go", "env": dict(env), "workingDir": working_dir})


@dataclass
class ZygoteReport:
    """How a zygote came up: `private_bytes` is what it costs the machine once."""

    pid: int
    start_ticks: int
    seconds: float
    private_bytes: int
    threads: int
    absent: tuple[str, ...]


class _Zygote:
    """One zygote and the task that reads what it says."""

    def __init__(self, channel: AsyncChannel, process: subprocess.Popen[bytes] | None, log_path: Path) -> None:
        self.channel = channel
        self.process = process
        self.log_path = log_path
        self.report: asyncio.Future[ZygoteReport] = asyncio.get_running_loop().create_future()
        self.waiting: dict[str, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self.statuses: dict[int, asyncio.Future[int]] = {}
        self.progress: ProgressSaid | None = None
        self.reader = asyncio.create_task(self._read(), name="zygote reader")

    @property
    def alive(self) -> bool:
        return not self.reader.done()

    async def _read(self) -> None:
        try:
            while True:
                message, descriptors = await self.channel.receive()
                self._take(message, descriptors)
        except OmniError:
            pass
        finally:
            self._gone()

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        kind = message["kind"]
        if kind == "progress":
            if self.progress is not None:
                self.progress(message["stage"], message["done"], message["total"])
        elif kind == "up":
            names = ("pid", "seconds", "threads")
            self.report.set_result(
                ZygoteReport(
                    start_ticks=message["startTicks"],
                    private_bytes=message["privateBytes"],
                    absent=tuple(message["absent"]),
                    **{name: message[name] for name in names},
                )
            )
        elif kind == "exited":
            status = self.statuses.pop(message["pid"], None)
            if status is not None and not status.done():
                status.set_result(message["status"])
        else:
            waiter = self.waiting.pop(message.get("instance") or message.get("key") or "", None)
            if kind == "forked":
                self.statuses[message["pid"]] = asyncio.get_running_loop().create_future()
            if waiter is not None and not waiter.done():
                waiter.set_result((message, descriptors))
            else:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _gone(self) -> None:
        error = ProcessError("zygote", "it has ended", f"see {self.log_path}")
        futures: list[asyncio.Future[Any]] = [self.report, *self.waiting.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting
        for status in self.statuses.values():
            status.cancel()
        self.waiting.clear()
        self.channel.close()
        if self.process is not None:
            asyncio.get_running_loop().run_in_executor(None, self.process.wait)

    async def ask(
        self, key: str, message: dict[str, Any], descriptors: Sequence[int]
    ) -> tuple[dict[str, Any], list[int]]:
        waiter: asyncio.Future[tuple[dict[str, Any], list[int]]] = asyncio.get_running_loop().create_future()
        self.waiting[key] = waiter
        try:
            await self.channel.send(message, descriptors)
            return await waiter
        except ChannelClosed as error:
            raise ProcessError("zygote", "it has ended", f"see {self.log_path}") from error
        finally:
            self.waiting.pop(key, None)

    async def close(self, *, kill: bool = False) -> None:
        if kill and self.process is not None:
            self.process.kill()
        self.reader.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        if self.process is not None:
            await asyncio.to_thread(self.process.wait)


Environment = tuple[str, ...]


class Zygotes:
    """Forks models' processes, each from the zygote of its environment.

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
        self._zygotes: dict[Environment, _Zygote] = {}
        self._locks: dict[Environment, asyncio.Lock] = {}
        self._number = 0

    async def start(self, progress: ProgressSaid | None = None) -> ZygoteReport:
        """Start the zygote of the empty environment.

        Raises:
            ProcessError: it did not come up.
        """
        return await (await self._get((), progress)).report

    def processes(self) -> list[tuple[int, int]]:
        """(pid, start ticks) of every zygote that is up."""
        reports = [zygote.report for zygote in self._zygotes.values() if zygote.alive]
        done = [report.result() for report in reports if report.done() and not report.exception()]
        return [(report.pid, report.start_ticks) for report in done]

    async def fork(
        self,
        plan: SandboxPlan,
        *,
        log_descriptor: int,
        environment: Environment = (),
        paths: Sequence[str] = (),
        descriptors: Mapping[str, int] | None = None,
        preload: Sequence[str] = (),
        target: str = SERVE,
        timeout_seconds: float = 30.0,
    ) -> Forked:
        """Fork a process and wait until it is in its sandbox.

        Args:
            plan: of the sandbox.
            log_descriptor: what it prints goes here.
            environment: folders of packages; equal ones share a zygote.
            paths: further import paths, as the process sees them.
            descriptors: handed to the process by name; they stay open here.
            preload: modules that a new zygote of this environment imports.
            target: what runs in the process.
            timeout_seconds: of the fork, without the start of a zygote.

        Raises:
            IsolationError: the machine does not give the plan's minimum.
            ProcessError: it did not start, or not in time.
        """
        ours, theirs = socket_pair()
        channel = AsyncChannel(ours)
        named = dict(descriptors or {})
        message = {
            "op": "fork",
            "instance": plan.instance,
            "plan": plan.to_json(),
            "environment": list(paths),
            "target": target,
            "names": list(named),
        }
        pidfd = -1
        try:
            with theirs:
                zygote = await self._get(tuple(environment), None, preload)
                async with asyncio.timeout(timeout_seconds):
                    reply, received = await zygote.ask(
                        plan.instance, message, [theirs.fileno(), log_descriptor, *named.values()]
                    )
            if reply["kind"] != "forked":
                raise ProcessError(f"process {plan.instance}", reply["message"], "restart the agent")
            pidfd = received[0]
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
            zygote.statuses.get(reply["pid"]) or _cancelled(),
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
        zygotes, self._zygotes = self._zygotes, {}
        for zygote in zygotes.values():
            await zygote.close()

    async def _get(
        self, environment: Environment, progress: ProgressSaid | None, preload: Sequence[str] = ()
    ) -> _Zygote:
        lock = self._locks.setdefault(environment, asyncio.Lock())
        async with lock:
            zygote = self._zygotes.get(environment)
            if zygote is not None and zygote.alive:
                return zygote
            zygote = await self._derive(environment, preload) if environment else await self._exec((), progress)
            self._zygotes[environment] = zygote
            return zygote

    async def _derive(self, environment: Environment, preload: Sequence[str]) -> _Zygote:
        """Fork the zygote of an environment from the base, so that torch is imported and held once."""
        base = await self._get((), None)
        ours, theirs = socket_pair()
        log_path = self._log_path()
        key = "\0".join(environment)
        request = {"op": "derive", "key": key, "environment": list(environment), "preload": list(preload)}
        with theirs, log_path.open("wb") as log_file:
            reply, received = await base.ask(key, request, [theirs.fileno(), log_file.fileno()])
        for descriptor in received:
            os.close(descriptor)
        if reply["kind"] == "refused":
            ours.close()
            raise ProcessError("zygote", reply["message"], "restart the agent")
        if reply["kind"] == "conflict":
            ours.close()
            log.info("zygote_apart environment=%s modules=%s", environment, ",".join(reply["modules"]))
            return await self._exec(environment, None)
        return await self._up(_Zygote(AsyncChannel(ours), None, log_path), environment)

    async def _exec(self, environment: Environment, progress: ProgressSaid | None) -> _Zygote:
        ours, theirs = socket_pair()
        log_path = self._log_path()
        command = [self._python, "-P", "-m", "omnimodel.runtime.zygote", str(theirs.fileno())]
        if self._preload is not None:
            command += ["--preload", ",".join(self._preload)]
        package_parent = str(Path(__file__).parents[2])
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        path = os.pathsep.join((*environment, *self._import_path, package_parent))
        with theirs, log_path.open("wb") as log_file:
            process = await asyncio.to_thread(
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
        zygote = _Zygote(AsyncChannel(ours), process, log_path)
        zygote.progress = progress
        return await self._up(zygote, environment)

    async def _up(self, zygote: _Zygote, environment: Environment) -> _Zygote:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._start_seconds):
                report = await asyncio.shield(zygote.report)
        except (TimeoutError, ProcessError) as error:
            await zygote.close(kill=True)
            late = isinstance(error, TimeoutError)
            raise ProcessError(
                "zygote",
                f"it was not up after {self._start_seconds:g} s"
                if late
                else f"it ended while it started: {_tail(zygote)}",
                f"see {zygote.log_path}",
                reason=Reason.ENVIRONMENT_FAILED,
            ) from error
        except BaseException:
            await zygote.close(kill=True)
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


def _cancelled() -> asyncio.Future[int]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


def _kill(pidfd: int) -> None:
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _failure(plan: SandboxPlan, message: Mapping[str, Any]) -> OmniError:
    reason = Reason(message["reason"])
    kind = IsolationError if reason is Reason.ISOLATION_UNAVAILABLE else ProcessError
    return kind(f"process {plan.instance}", message["message"], message["detail"], reason=reason)


def _tail(zygote: _Zygote) -> str:
    with contextlib.suppress(OSError):
        text = zygote.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "it printed nothing"
    return "it has no log"
