"""Makes model processes: the fork, the sandbox, the control group, the socket and the output of each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omnimodel.agent.ahead import Ahead, remove
from omnimodel.agent.family import children_of_user
from omnimodel.agent.journal import Entry, Journal, clean_leftovers
from omnimodel.agent.limits import Group, GroupLimits, Groups
from omnimodel.agent.output import Output, OutputPump
from omnimodel.agent.private import anonymous_bytes
from omnimodel.agent.process import ModelProcess
from omnimodel.agent.survivors import Facts, Served, Survivor, facts_name, find_survivors, frame_name, frames_name
from omnimodel.agent.zygotes import SERVE, Forked, Zygotes
from omnimodel.errors import OmniError, ProcessError
from omnimodel.isolation import Level, Reached, SandboxPlan
from omnimodel.isolation.probe import probe_async
from omnimodel.protocol.channel import Allowance, AsyncChannel, ChannelClosed

if TYPE_CHECKING:
    from omnimodel.agent.descriptors import DescriptorStore
    from omnimodel.memory.devices import Frame

log = logging.getLogger(__name__)

_SOCKET_PATH_BYTES = 107  # man 7 unix
_BACKLOG = 512
_COMMANDS_OF_AN_AGENT = 1 << 32  # numbers that one agent has for its commands to one process
_OOM_SCORE = "500"  # when the whole machine is out of memory, a model goes before the agent


@dataclass(frozen=True)
class ProcessRequest:
    """A process to be made.

    Args:
        subject: the object in messages, such as `OmniModel default/smollm2`.
        generation: of its spec.
        plan: of its sandbox; folders in `writable` are given to its user.
        log_path: the file that its output goes to.
        environment: folders of packages.
        paths: further import paths, as the process sees them.
        env: environment variables, secrets included: they never pass through a zygote.
        working_dir: as the process sees it; empty for its /tmp.
        cpu_millis: thousandths of a core that it may compute with; 0 for no limit.
        target: what runs in it.
        fork_seconds: how long it may take until it is in its sandbox.
    """

    subject: str
    generation: int
    plan: SandboxPlan
    log_path: Path
    environment: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    cpu_millis: int = 0
    target: str = SERVE
    fork_seconds: float = 60.0


def mounts_folder(run: Path, instance: str) -> Path:
    """Where files that are written for the mounts of one process lie; they go with it."""
    return run / f"{instance}.mounts"


class Spawner:
    """Makes model processes: everything that they share on one agent.

    Args:
        state_dir: the agent's state directory.
        zygotes: where processes are forked from.
        reached: the isolation that this machine gives, from `open`.
        groups: control groups.
        store: keeps descriptors for the next agent; None when there is none to come.
    """

    def __init__(
        self,
        state_dir: Path,
        zygotes: Zygotes,
        reached: Reached,
        groups: Groups,
        store: DescriptorStore | None = None,
    ) -> None:
        self.state_dir = state_dir
        self.zygotes = zygotes
        self.groups = groups
        self.reached = reached
        self.journal = Journal(state_dir / "journal")
        self.pump = OutputPump()
        self.survivors: list[tuple[ModelProcess, Survivor]] = []  # of an earlier agent
        self.ahead = Ahead(groups, zygotes)
        self._store = store
        self._stored: dict[ModelProcess, frozenset[int]] = {}  # whose descriptors are kept, with which frames
        self._agents: dict[ModelProcess, int] = {}
        self._processes: set[ModelProcess] = set()
        self._run = state_dir / "run"
        self._run.mkdir(parents=True, exist_ok=True)
        self._run.chmod(0o711)
        self._run_descriptor = os.open(self._run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    @classmethod
    async def open(
        cls,
        state_dir: str | os.PathLike[str],
        zygotes: Zygotes | None = None,
        store: DescriptorStore | None = None,
    ) -> Spawner:
        """Find out what this machine allows, clean what a killed agent left, and take over what lives and is whole."""
        root = await asyncio.to_thread(lambda: Path(state_dir).resolve())
        survivors: list[Survivor] = []
        if store is not None:
            entries = await asyncio.to_thread(Journal(root / "journal").entries)
            survivors = await asyncio.to_thread(find_survivors, entries, store.found)
            store.leave([name for survivor in survivors for name in survivor.names])
        kept = [survivor.entry.instance for survivor in survivors]
        await asyncio.to_thread(clean_leftovers, root, kept, [survivor.facts.group for survivor in survivors])
        reached = await probe_async()
        groups = await asyncio.to_thread(Groups.detect, root)
        reached = replace(reached, missing=(*reached.missing, *groups.missing))
        log.info("isolation level=%s missing=%d", reached.level, len(reached.missing))
        spawner = cls(root, zygotes or Zygotes(root), reached, groups, store)
        spawner.survivors = [(spawner._take_over(survivor), survivor) for survivor in survivors]
        return spawner

    def _take_over(self, survivor: Survivor) -> ModelProcess:
        """Go on with a process: its output, its control channel, and the watch for its end."""
        entry, held, facts = survivor.entry, survivor.held, survivor.facts
        facts = replace(facts, agents=facts.agents + 1)
        self._put_facts(entry.instance, facts)  # before any command: no number comes twice
        os.close(held["facts"])
        if facts.shared_bytes is None:
            facts = replace(facts, shared_bytes=anonymous_bytes(entry.pid))
        channel = AsyncChannel(socket.socket(fileno=held["channel"]), allowance=Allowance())
        process = ModelProcess(
            facts.subject,
            facts.generation,
            facts.plan,
            Forked(entry.instance, entry.pid, entry.start_ticks, held["pidfd"], channel, facts.reached, 0.0, 0.0),
            Group(facts.group, self.groups.hierarchies, facts.group_missing),
            self.pump.add(Path(facts.log_path), held["output"]),
            None,
            self._socket_path(entry.instance),
            self._release,
            first_command=facts.agents * _COMMANDS_OF_AN_AGENT,
            shared_bytes=facts.shared_bytes,
        )
        process.started_seconds = facts.started_seconds
        self._processes.add(process)
        self._agents[process] = facts.agents
        self._stored[process] = frozenset(survivor.frames)
        log.info("taken_over instance=%s pid=%d agents=%d", entry.instance, entry.pid, facts.agents)
        return process

    def keep(self, process: ModelProcess, served: Served, frames: Sequence[Frame]) -> None:
        """Provide for the agent being killed: what the next one needs to go on with a process is kept.

        Args:
            process: that serves.
            served: what it serves, as it is from now on.
            frames: that it may have mapped from now on.
        """
        store, instance = self._store, process.instance
        if store is None:
            return
        kept, wanted = self._stored.get(process), frozenset(frame.id for frame in frames)
        named = {} if kept is not None else {f"{instance}/{name}": number for name, number in process.held.items()}
        named |= {frame_name(instance, frame.id): frame.descriptor for frame in frames if frame.id not in (kept or ())}
        if named:
            store.put(named)
        facts = Facts(
            process.subject,
            process.generation,
            process.plan,
            process.reached,
            process.started_seconds,
            process.group.name,
            process.group.missing,
            str(process.output.path),
            process.shared_bytes,
            self._agents.get(process, 1),
            served,
        )
        try:
            self._put_facts(instance, facts)
        except OSError as error:  # what is there is old now: nobody may go on by it
            log.warning("not_kept instance=%s error=%s", instance, error)
            store.drop(instance)
            self._stored.pop(process, None)
            return
        if gone := (kept or frozenset()) - wanted:
            for name in [frame_name(instance, number) for number in gone] if wanted else [frames_name(instance)]:
                store.drop(name)
        self._stored[process] = wanted

    def _put_facts(self, instance: str, facts: Facts) -> None:
        descriptor = facts.write()
        try:
            if self._store is not None:
                self._store.put({facts_name(instance): descriptor})
        finally:
            os.close(descriptor)

    async def spawn(self, request: ProcessRequest) -> ModelProcess:
        """Fork a process, put it into its sandbox and control group, and let its code begin.

        Raises:
            IsolationError: the machine does not give the plan's minimum.
            ProcessError: it did not start, or this machine is short of what a process takes.
        """
        plan = request.plan
        folder = self._run / plan.instance
        output: Output | None = None
        group: Group | None = None
        forked: Forked | None = None
        listener: socket.socket | None = None
        process: ModelProcess | None = None
        moving: asyncio.Future[None] | None = None

        def born(pid: int) -> None:
            nonlocal moving
            assert group is not None
            moving = asyncio.ensure_future(asyncio.to_thread(group.add_uncounted, pid))

        try:
            socket_path, listener = self._listen(plan.instance)
            plan = self._prepare(plan, folder)
            output = self.pump.add(request.log_path)
            limits = GroupLimits(plan.memory_bytes, plan.processes, request.cpu_millis)
            group = await self.ahead.take()
            await asyncio.to_thread(group.limit, limits)
            with group.doors() as doors:
                forked = await self.zygotes.fork(
                    plan,
                    log_descriptor=output.write_descriptor,
                    group=group.name,
                    group_descriptors=doors,
                    environment=request.environment,
                    paths=request.paths,
                    target=request.target,
                    timeout_seconds=request.fork_seconds,
                    born=born,
                )
            output.close_writer()
            self.journal.record(Entry(plan.instance, forked.pid, forked.start_ticks, self._paths(plan.instance)))
            _offer_to_oom_killer(forked.pid)
            if not group.holds(forked.pid):
                await asyncio.to_thread(group.add, forked.pid)
            forked.reached = replace(forked.reached, missing=(*forked.reached.missing, *group.missing))
            scratch = {"TMPDIR": plan.scratch, "HOME": plan.scratch} if plan.scratch else {}
            process = ModelProcess(
                request.subject,
                request.generation,
                plan,
                forked,
                group,
                output,
                listener,
                socket_path,
                self._release,
            )
            self._processes.add(process)
            env = dict(zip(request.env, process.told(request.env.values()), strict=True))
            (folder_inside,) = process.told([request.working_dir])
            await forked.go({**scratch, **env}, folder_inside or plan.scratch)
            if moving is not None:  # before it is told to start, and runs any code of the model's
                await moving
            self.ahead.provide()
        except BaseException as error:
            if process is not None:
                process.kill()
                await process.released
            else:
                if forked is not None:
                    forked.abandon()
                await self._undo(plan.instance, group, output, listener)
            if isinstance(error, ChannelClosed | ProcessLookupError):
                raise ProcessError(request.subject, "its process ended before it began", "see its log") from error
            if isinstance(error, OSError):
                raise ProcessError(request.subject, f"its process cannot be made: {error}") from error
            if isinstance(error, OmniError):
                error.subject = request.subject
            raise
        return process

    def _prepare(self, plan: SandboxPlan, folder: Path) -> SandboxPlan:
        """Give the folders made for the process to its user, and a scratch folder where it can have no /tmp."""
        owned = list(plan.writable)
        if self.reached.level is not Level.NAMESPACES or plan.wanted is not Level.NAMESPACES:
            folder.mkdir(mode=0o700, exist_ok=True)
            plan = replace(plan, scratch=str(folder))
            owned.append(str(folder))
        if plan.uid and os.geteuid() == 0:
            for path in owned:  # by its group: where it cannot get a user of its own, it stays the owner
                os.chown(path, -1, plan.uid)
                os.chmod(path, 0o770)  # noqa: S103 - no other user
        return plan

    def _listen(self, instance: str) -> tuple[Path, socket.socket]:
        """The socket that the process will serve on; only the agent may connect."""
        path = self._socket_path(instance)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return path, listener

    def _socket_path(self, instance: str) -> Path:
        name = f"{instance}.sock"
        path = self._run / name
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
            path = Path(f"/proc/self/fd/{self._run_descriptor}/{name}")
        return path

    def _paths(self, instance: str) -> tuple[str, ...]:
        """What lies in the run folder for a process."""
        return (str(self._run / f"{instance}.sock"), str(self._run / instance))

    async def _undo(
        self, instance: str, group: Group | None, output: Output | None, listener: socket.socket | None
    ) -> None:
        """Remove what belongs to a process that is gone or never was."""
        if output is not None:
            output.close_writer()
            self.pump.drop(output)
        if listener is not None:
            listener.close()
        (self._run / f"{instance}.sock").unlink(missing_ok=True)
        for folder in (self._run / instance, mounts_folder(self._run, instance)):
            if folder.exists():
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if group is not None:
            await remove(group)
        self.journal.forget(instance)

    async def _release(self, process: ModelProcess) -> None:
        """Remove what belonged to a process that has ended."""
        await self._undo(process.instance, process.group, process.output, process.listener)
        self._processes.discard(process)
        self._agents.pop(process, None)
        if self._store is None:
            return
        if self._stored.pop(process, None) is not None:
            self._store.drop(process.instance)
        if process.reached.level is not Level.NAMESPACES and process.plan.uid not in {0, os.geteuid()}:
            living = {process.pid for process in self._processes}
            await asyncio.to_thread(self._end_strays, process.plan.uid, living)

    @staticmethod
    def _end_strays(uid: int, living: set[int]) -> None:
        """End what a model has left that got away from its session, where the zygote that would do so is gone.

        The init has it then, with processes of models that live: one user may have several.
        """
        for pid in set(children_of_user(os.getppid(), uid)) - living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill every process, end the zygotes, remove the groups."""
        processes = list(self._processes)
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.released for process in processes), return_exceptions=True)
        await self.zygotes.close()
        await self.ahead.close()
        self.pump.close()
        self.groups.close()
        os.close(self._run_descriptor)


def _offer_to_oom_killer(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(_OOM_SCORE)
