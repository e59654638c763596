"""One model's process: its fork, sandbox, control group, output, commands and end. One object owns all of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from omnimodel.agent.conversation import Conversation, ProgressSaid
from omnimodel.agent.ending import KILL_SECONDS, signal_name, status_by_pidfd
from omnimodel.agent.family import family_of
from omnimodel.agent.journal import has_ended
from omnimodel.agent.limits import Group
from omnimodel.agent.output import Output
from omnimodel.agent.private import PrivateMemory
from omnimodel.agent.zygotes import Forked
from omnimodel.errors import ProcessError, Reason
from omnimodel.isolation import Level, SandboxPlan
from omnimodel.protocol.process import (
    Command,
    Reply,
    Start,
    Stop,
)

log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0
_STATUS_LOOKS, _LOOK_SECONDS = 20, 0.01
_DRAIN_SECONDS = 0.5
_WATCH_SECONDS = 0.5
_DEAF_SECONDS = 5.0


class ProcessExit(ProcessError):
    """Why a process ended.

    Args:
        status: its exit status, or the negative number of the signal that ended it; None when nobody knows.
    """

    def __init__(self, subject: str, problem: str, cure: str, *, reason: Reason, status: int | None) -> None:
        super().__init__(subject, problem, cure, reason=reason)
        self.status = status


class ModelProcess:
    """See the module. Made by `Spawner.spawn`.

    `exited` is done when the kernel has confirmed the end: only then do its frames count as free. `released` is done
    when its group, socket and folder are gone too.

    Args:
        subject: the object in messages.
        generation: of its spec.
        plan: of its sandbox.
        forked: the process.
        group: its control group.
        output: what it prints.
        listener: the socket it serves on, `socket_path` its address for the agent; None when it has it already.
        release: removes what belongs to it after its end.
        first_command: the number of the first command; numbers of one process only grow, whichever agent sends them.
        shared_bytes: anonymous memory that it shared with its zygote, when that is gone.
    """

    def __init__(
        self,
        subject: str,
        generation: int,
        plan: SandboxPlan,
        forked: Forked,
        group: Group,
        output: Output,
        listener: socket.socket | None,
        socket_path: Path,
        release: Callable[[ModelProcess], Awaitable[None]],
        *,
        first_command: int = 1,
        shared_bytes: int | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.subject = subject
        self.generation = generation
        self.instance = plan.instance
        self.plan = plan
        self.pid = forked.pid
        self.start_ticks = forked.start_ticks
        self.reached = forked.reached
        self.started_seconds = time.time()
        self.socket_path = socket_path
        self.group = group
        self._exited: asyncio.Future[ProcessExit] = loop.create_future()
        self._forked = forked
        self._channel = forked.channel
        self._pidfd = forked.pidfd
        self.output = output
        self.listener = listener
        self._release = release
        self._conversation = Conversation(
            subject, generation, plan.instance, forked.channel, first=first_command, not_understood=self._not_understood
        )
        self.computed = (0, 0)  # tokens of prompts, and generated, as it told last
        self._stopping = False
        self._killed = False
        self._over_memory = False
        self._private = PrivateMemory(None if shared_bytes is None else {self.pid: shared_bytes})
        self._garbled = ""  # what it said that it must not say
        self._deaf = False  # it closed its control channel
        self._dead = asyncio.Event()
        loop.add_reader(self._pidfd, self._died)
        self._reader = asyncio.create_task(self._conversation.listen(), name=f"read {self.instance}")
        self._released = asyncio.create_task(self._end(), name=f"end {self.instance}")
        watched = plan.memory_bytes and not group.limits_memory
        self._watcher = asyncio.create_task(self._watch_memory(), name=f"watch {self.instance}") if watched else None

    def told(self, texts: Iterable[str]) -> list[str]:
        """Texts of the manifest, mounts in them where they are for this process."""
        return [self.plan.told(text, self.reached.level) for text in texts]

    @property
    def exited(self) -> asyncio.Future[ProcessExit]:
        """Done when it has ended; a cancelled waiter does not cancel it."""
        return asyncio.shield(self._exited)

    @property
    def gone(self) -> bool:
        """Whether the kernel says at this moment that it has ended; `exited` follows."""
        return self._dead.is_set() or has_ended(self._pidfd)

    @property
    def told_to_end(self) -> bool:
        """Whether the agent has stopped or killed it."""
        return self._stopping or self._killed

    @property
    def released(self) -> asyncio.Future[None]:
        """Done when nothing of it is left; a cancelled waiter does not cancel it."""
        return asyncio.shield(self._released)

    # Commands

    async def command(
        self,
        command: Command,
        descriptors: Sequence[int] = (),
        timeout_seconds: float = 30.0,
        progress: ProgressSaid | None = None,
    ) -> Reply:
        """Send a command and wait for its reply; several may be under way. `Start` gets the listening socket added.

        Args:
            command: what to do.
            descriptors: sent along; they stay open here.
            timeout_seconds: for the reply; of those that may take long (`Start`, `Publish`, `Build`) without progress.
            progress: called with what the process says while it is at it.

        Raises:
            ProcessError: the process refused it, did not answer in time, or ended (`ProcessExit`).
        """
        if self._exited.done():
            raise self._exited.result()
        if isinstance(command, Start):
            assert self.listener is not None
            descriptors = (self.listener.fileno(), *descriptors)
        return await self._conversation.ask(command, descriptors, timeout_seconds, progress)

    def _not_understood(self, problem: str) -> None:
        log.warning("message_not_understood instance=%s problem=%r", self.instance, problem)
        self._garbled = problem
        self.kill()

    # Memory

    def private_bytes(self) -> int:
        """Memory that is this process's own (its children's included), without the frames it has mapped."""
        usage = self.group.usage_bytes()
        return self._private.of(self.pids()) if usage is None else usage

    def pids(self) -> set[int]:
        """Of it and its children, as this process sees them."""
        return set(self.group.pids()) or {self.pid, *family_of(self.pid)}

    @property
    def shared_bytes(self) -> int | None:
        """Anonymous memory that it shares with its zygote, as seen last; None when nobody looked."""
        return self._private.shared.get(self.pid)

    @property
    def held(self) -> dict[str, int]:
        """Its descriptors that must not be closed as long as it lives."""
        return {
            "channel": self._channel.sock.fileno(), "output": self.output.read_descriptor, "pidfd": self._pidfd,
        }  # fmt: skip

    async def _watch_memory(self) -> None:
        """The memory limit of a machine without control groups for it."""
        while not self._dead.is_set():
            if await asyncio.to_thread(self.private_bytes) > self.plan.memory_bytes:
                self._over_memory = True
                self.kill()
                return
            await asyncio.sleep(_WATCH_SECONDS)

    # The end

    def kill(self) -> None:
        """Send SIGKILL, to its children too; `exited` follows."""
        if self._dead.is_set():
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.group.kill()

    def _kill_children(self) -> None:
        """Below `namespaces` its children may have outlived it; the zygote ends those that have left its session."""
        self.group.kill()
        if self.reached.level is not Level.NAMESPACES:
            for pid in family_of(self.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    async def stop(self, grace_seconds: float) -> ProcessExit:
        """Let it finish its requests for at most `grace_seconds`, then kill it.

        Raises:
            ProcessError: the kernel did not confirm its end (it hangs in a driver).
        """
        self._stopping = True
        with contextlib.suppress(ProcessError):
            await self.command(Stop(grace_seconds), (), grace_seconds + 1.0)
        await asyncio.wait([self._exited], timeout=2.0)
        if not self._exited.done():
            self.kill()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                return await self.exited
        except TimeoutError as error:
            raise ProcessError(
                self.subject,
                f"its process {self.pid} is still there {KILL_SECONDS:g} s after SIGKILL",
                "it hangs in the kernel or a driver; its memory stays counted",
                reason=Reason.EVICT_TIMEOUT,
            ) from error

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._dead.set()

    async def _end(self) -> None:
        """From the kernel's word that it is gone to the last trace of it."""
        reader_left = asyncio.create_task(self._hung_up())
        await self._dead.wait()
        reader_left.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        status = await self._status()
        await asyncio.to_thread(self._kill_children)
        if self.listener is not None:  # nobody will take the connections that wait there: whoever made them is told
            self.listener.close()
        await asyncio.wait([self._reader, self.output.ended], timeout=_DRAIN_SECONDS)
        self._reader.cancel()
        reason = self._reason(status)
        self._conversation.end(reason)
        self._channel.close()
        os.close(self._pidfd)
        log.info(
            "exited instance=%s pid=%d status=%s reason=%s problem=%r",
            self.instance,
            self.pid,
            status,
            reason.reason,
            reason.problem,
        )
        self._exited.set_result(reason)
        await self._release(self)

    async def _hung_up(self) -> None:
        """A process that closes its control channel can be told nothing any more: it gets a moment to end."""
        await asyncio.wait([self._reader])
        await asyncio.sleep(_DEAF_SECONDS)
        self._deaf = not self._killed
        self.kill()

    async def _status(self) -> int | None:
        try:
            async with asyncio.timeout(_STATUS_SECONDS):
                return await asyncio.shield(self._forked.status)
        except (TimeoutError, asyncio.CancelledError):
            if self._released.cancelling():
                raise
        # The zygote that would have told it is gone. The kernel tells it once somebody has waited for the process.
        for _ in range(_STATUS_LOOKS):
            if (status := status_by_pidfd(self._pidfd)) is not None:
                return status
            await asyncio.sleep(_LOOK_SECONDS)
        return None

    def _reason(self, status: int | None) -> ProcessExit:
        lines = [line.strip() for line in self.output.tail(200).splitlines() if line.strip()]
        last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
        said = f"; it said {last[:300]!r}" if last else ""
        name = self.subject.partition("/")[2] or self.subject
        cure = f"see omni logs {name}"
        reason = Reason.CRASHED
        if self._over_memory or self.group.out_of_memory_kills():
            reason = Reason.OUT_OF_MEMORY
            problem = f"it needed more than its {self.plan.memory_bytes >> 20} MiB of working memory and was ended"
            cure = "raise resources.hostMemory, or ask for less at once"
        elif self._garbled:
            problem = f"its process was killed for what it said on its control channel: {self._garbled}"
        elif self._deaf:
            problem = "its process closed its control channel and was killed"
        elif self._stopping and not self._killed:
            problem = "it was stopped"
        elif self._killed:
            problem = "it was killed by the agent"
        elif status is None:
            problem = f"its process ended; its exit status is lost{said}"
        elif status == -signal.SIGKILL:
            problem = "its process was killed from outside (by an administrator, or the machine ran out of memory)"
        elif status < 0:
            problem = f"its process was ended by {signal_name(-status)}{said}"
        else:
            problem = f"its process ended by itself with exit status {status}{said}"
        return ProcessExit(self.subject, problem, cure, reason=reason, status=status)
