"""One revision of one model on this agent: its image, its process, and what it holds.

An instance does what it is told (start, wake, evict, stop), one thing at a time, and knows its state; the broker alone
tells it. When its process dies, the instance says so once, after the kernel has confirmed it, and only then do its
frames count as free.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from omnimodel.agent.declared import Limits, Residency
from omnimodel.agent.door import Door
from omnimodel.agent.ending import KILL_SECONDS
from omnimodel.agent.failures import Failures
from omnimodel.agent.history import History
from omnimodel.agent.lifetime import Lifetime
from omnimodel.agent.line import Line
from omnimodel.agent.rest import Rest
from omnimodel.agent.spread import Spread
from omnimodel.agent.tokens import told
from omnimodel.errors import OmniError, ProcessError
from omnimodel.protocol.process import SLEEP_SECONDS, Evict, Settle, Start, Wake

if TYPE_CHECKING:
    import aiohttp

    from omnimodel.agent.preparation import Prepared
    from omnimodel.agent.process import ModelProcess
    from omnimodel.memory.devices import Fence, Frame
    from omnimodel.placement.state import Blocked

log = logging.getLogger(__name__)

_ACKNOWLEDGE_SECONDS = 10.0  # to map or unmap frames
MARGIN_SECONDS = 5.0  # beyond what a foreign engine is given, so that its own word on why it was late arrives


class State(StrEnum):
    """What an instance is doing."""

    COLD = "cold"
    STARTING = "starting"
    WARM = "warm"
    WAKING = "waking"
    RESIDENT = "resident"
    EVICTING = "evicting"
    FROZEN = "frozen"
    PARKED = "parked"
    STOPPING = "stopping"


class Spawn(Protocol):
    """Makes the process of an instance. Raises OmniError."""

    def __call__(self, instance: Instance) -> Awaitable[ModelProcess]:
        """Make it."""


class Instance:
    """See the module.

    Args:
        name: unique on this agent: `namespace/name`, and `@number` for a revision that is to replace another.
        spec: the process spec, as rendered.
        spawn: makes the process.
        changed: called after every change that the broker may have to act on.
        on_exit: called once a process is seen to be gone, with the reason when it was not told to go.
        keep: provides for the agent being killed; called when what its process has or may have mapped changes.
    """

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        *,
        spawn: Spawn,
        changed: Callable[[], None],
        on_exit: Callable[[Instance, OmniError | None], None],
        keep: Callable[[Instance], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.namespace: str = spec["model"]["namespace"]
        self.model: str = spec["model"]["name"]
        self.subject = f"OmniModel {self.namespace}/{self.model}"
        self.spec = spec
        self.limits = Limits.of(spec)
        self.residency = Residency.of(spec)
        self.line = Line(self, self.limits.concurrency, self.limits.queue, changed)
        self.door = Door(self)
        self.failures = Failures()

        self.state = State.COLD
        self.since_seconds = time.time()
        self.message = ""
        self.spread = Spread(spec["devices"])  # its process, while it has one, is bound to these devices
        self.moved_seconds = -math.inf  # when its process was ended for another device
        self.shunned: dict[str, float] = {}  # devices that had no memory for it, and until when it goes elsewhere
        self.wakes_before = 0  # when its process was started
        self.prepared: Prepared | None = None
        self.verified = False
        self.measured = False
        self.working_bytes = 0
        self.context_bytes = 0  # what its process holds on the device beside frames and working memory
        self.lifetime = Lifetime(name, gone=self._process_gone, buried=self._process_buried)
        self.rest = Rest()  # what its process has of its devices while it is not resident
        self.coming_bytes = 0  # what its engine knows that it will need beyond a first answer
        self.private_bytes = 0
        self.fence: Fence | None = None  # of its process
        self.mapped: Sequence[Frame] | None = None  # what its process may have mapped; None when it is not resident

        # Set by the broker when it has decided, before the move begins.
        self.draining = False
        self.leaving = False
        self.going: State | None = None  # where the move it is in takes it: PARKED or COLD
        self.freezing = False
        self.made_room = ""  # for whom it left the device, until it is back
        self.reserved = False
        self.proving = False  # it was woken, and is asked its known answer or measured before anybody is let in
        self.blocked: Blocked | None = None  # why it can never be resident
        self.blocked_by = ""  # the device that says so
        self.removed = ""

        self.wanted_since_seconds: float | None = None
        self.frozen_since_seconds: float | None = None
        self.woken_seconds = -math.inf
        self.evicted_seconds = -math.inf
        self.idle_seconds = time.monotonic()
        self.history = History()

        self._spawn = spawn
        self._changed = changed
        self._on_exit = on_exit
        self._keep = keep

    def update(self, spec: dict[str, Any]) -> None:
        """Take over what may change without a new process: limits of the queue, residency, names, probe."""
        self.spec = spec
        self.limits = Limits.of(spec)
        preloaded, self.residency = self.residency.preload, Residency.of(spec)
        if not preloaded and self.verified:
            self.wish_again()
        self.line.concurrency, self.line.limit = self.limits.concurrency, self.limits.queue
        self._changed()

    def wish_again(self) -> None:
        """Want a preloaded model resident without a request, unless it stays so anyway."""
        if self.residency.preload and (self.leaving or not self.resident):
            self.wanted_since_seconds = time.monotonic()

    # What it is

    @property
    def process(self) -> ModelProcess | None:
        """That it has, from its start until it is seen to be gone."""
        return self.lifetime.process

    @property
    def session(self) -> aiohttp.ClientSession | None:
        """Connections to its process."""
        return self.lifetime.session

    @property
    def device(self) -> str:
        """That it is placed on, of several the first; empty for none."""
        return next(iter(self.spread.devices), "")

    @property
    def generation(self) -> int:
        """Generation of the OmniModel that it was rendered from."""
        return int(self.spec["generation"])

    @property
    def resident(self) -> bool:
        """Whether its process can compute now."""
        return self.state is State.RESIDENT

    @property
    def foreign(self) -> bool:
        """Whether it has no frames: its engine keeps its weights itself."""
        return self.prepared is not None and self.prepared.image_bytes == 0

    @property
    def freezable(self) -> bool:
        """Whether its requests can be stopped between two tokens."""
        return bool(self.spec["engine"] == "transformers" and self.spec["task"] == "text-generation")

    @property
    def weights_bytes(self) -> int:
        """Bytes of its frames when it is resident."""
        return self.prepared.frame_count * self.prepared.frame_bytes if self.prepared else 0

    @property
    def beside_bytes(self) -> int:
        """Memory of each device that it needs beside its frames when it is resident."""
        return self.working_bytes + (0 if self.foreign else self.context_bytes)

    @property
    def held_bytes(self) -> int:
        """What it holds on each device, or will when moves under way are done; others can have a warm one parked."""
        if self.lifetime.hung:  # its frames are in quarantine
            return self.beside_bytes
        if self.reserved or (self.state is State.RESIDENT and not self.leaving):
            return self.weights_bytes + self.beside_bytes
        if self.state is State.FROZEN or (self.leaving and self.freezing):
            return self.beside_bytes
        return 0

    @property
    def need_bytes(self) -> int:
        """What a wake needs on each device beyond what it holds already."""
        return self.weights_bytes + (0 if self.state is State.FROZEN else self.beside_bytes)

    @property
    def start_seconds(self) -> float:
        """What a wake takes beyond the copy."""
        if self.process is None or self.foreign:
            return self.history.last_start_seconds
        return self.history.last_unpark_seconds if self.state is State.PARKED else 0.0

    @property
    def wanted(self) -> bool:
        """Whether somebody wants it resident."""
        if self.frozen_since_seconds is not None:  # also of a removed one: its requests in flight finish
            return True
        return not self.removed and bool(
            self.line.waiting
            or self.wanted_since_seconds is not None
            or (self.residency.keep_resident and self.verified)
        )

    @property
    def tier(self) -> str:
        """`resident`, `warm`, `parked` or `cold`, as the status says it."""
        if self.state in {State.RESIDENT, State.EVICTING}:
            return "resident"
        if self.state is State.PARKED:
            return "parked"
        return "warm" if self.process is not None and self.state is not State.STARTING else "cold"

    def set_state(self, state: State, message: str) -> None:
        """Note a transition."""
        self.state = state
        self.since_seconds = time.time()
        self.message = message
        self._changed()

    @property
    def failure(self) -> OmniError | None:
        """Why it failed the last time, as long as it has not recovered."""
        return self.failures.last

    # What the broker tells it

    async def start(self) -> None:
        """COLD -> WARM: fork a process, let it build and bind the model.

        Raises:
            OmniError: it could not be started; the instance is COLD again.
        """
        assert self.state is State.COLD
        prepared = self.prepared
        assert prepared is not None
        began = time.monotonic()
        self.set_state(State.STARTING, "its process is being started")
        process: ModelProcess | None = None
        try:
            process = await self._spawn(self)
            start = Start(
                {**self.spec, **{part: process.told(self.spec.get(part) or ()) for part in ("command", "args")}},
                prepared.inside(process),
                prepared.image_bytes,
                prepared.frame_bytes,
                prepared.device,
                prepared.threads,
            )
            descriptors = () if self.fence is None else (self.fence.descriptor,)
            reply = await process.command(start, descriptors, self.limits.load_deadline_seconds)
        except BaseException as error:
            if process is not None:
                process.kill()
                await asyncio.wait([process.exited], timeout=KILL_SECONDS)
            self.set_state(State.COLD, error.problem if isinstance(error, OmniError) else "its start was cancelled")
            raise
        self.coming_bytes = reply.number("workingBytes")
        self.follow(process)
        self.history.last_start_seconds = time.monotonic() - began
        self.evicted_seconds = time.monotonic()
        self.set_state(State.WARM, "its process is started")
        self.keep()

    def follow(self, process: ModelProcess) -> None:
        """Have this process from now on, until it is seen to be gone."""
        self.lifetime.begin(process, foreign=self.foreign)
        self.rest.begin(process.pid, foreign=self.foreign)
        self.wakes_before = self.history.wakes

    def keep(self) -> None:
        """Provide for the agent being killed. Before its first right answer a process is not worth it."""
        if self.verified and self.process is not None:
            self._keep(self)

    async def settle(self) -> None:
        """WARM or WAKING -> WARM or RESIDENT: ask a process what the last command of another agent has come to.

        Raises:
            OmniError: it does not say, or does not know; it is to be killed.
        """
        process = self.process
        if process is None:
            raise ProcessError(self.subject, "its process ended with the agent")
        timeout_seconds = self._acknowledged_within(self.limits.load_deadline_seconds)
        reply = await process.command(Settle(), (), timeout_seconds)
        process.computed, tier = told(reply), reply.values.get("tier")
        if tier == "resident" and self.mapped is not None:
            self.woken_seconds = self.idle_seconds = time.monotonic()
            self.set_state(State.RESIDENT, "its process outlived the agent")
        elif tier == "warm":
            self.mapped = None
            self.evicted_seconds = time.monotonic()
            self.set_state(State.WARM, "its process outlived the agent")
        else:
            raise ProcessError(self.subject, "what the agent told its process last before it was killed has failed")

    def begin_wake(self) -> None:
        """WARM or FROZEN -> WAKING."""
        assert self.state in {State.WARM, State.FROZEN}
        self.set_state(State.WAKING, "being woken")

    async def wake(self, frames: Sequence[Frame], copy_seconds: float, fence_base: int | None = None) -> None:
        """WAKING -> RESIDENT: let the process map frames that hold the image, or will.

        Args:
            frames: of the image, in order.
            copy_seconds: that the copy took; 0 while it is under way.
            fence_base: of a copy that is under way; None when it is over.

        Raises:
            OmniError: it did not, or not in time; the instance is still WAKING and its process is to be killed.
        """
        assert self.state is State.WAKING
        process = self.process
        if process is None:
            raise ProcessError(self.subject, "its process ended while it was woken")
        began = time.monotonic()
        timeout_seconds = self._acknowledged_within(self.limits.load_deadline_seconds)
        self.mapped = frames
        self.keep()
        if self.rest.asleep:  # before it is started anew, if it has to be
            timeout_seconds += SLEEP_SECONDS
        working_bytes = 0 if self.prepared is None or self.prepared.device == "host" else self.working_bytes
        told = Wake([frame.id for frame in frames], fence_base, working_bytes)
        reply = await process.command(told, [frame.descriptor for frame in frames], timeout_seconds)
        self.rest.wake(sleepless=str(reply.values.get("restarted") or ""))
        now = time.monotonic()
        self.note_wake(copy_seconds + now - began)
        self.woken_seconds = self.idle_seconds = now
        self.history.wakes += 1
        self.wanted_since_seconds = self.frozen_since_seconds = None
        self.draining, self.made_room = False, ""
        self.line.owed = len(self.line.waiting)
        self.set_state(State.RESIDENT, self.message)

    def note_wake(self, seconds: float) -> None:
        """Say how long the last wake took."""
        self.history.last_wake_seconds = seconds
        self.message = f"woken in {seconds:.3f} s"

    def _acknowledged_within(self, engine_seconds: float) -> float:
        """How long the process has for a wake or an evict; a foreign engine starts or ends meanwhile."""
        return engine_seconds + MARGIN_SECONDS if self.foreign else _ACKNOWLEDGE_SECONDS

    def wake_failed(self) -> None:
        """WAKING -> where it was: nothing was mapped."""
        frozen = self.frozen_since_seconds is not None
        self.set_state(State.FROZEN if frozen else State.WARM, "its wake failed")

    async def evict(
        self,
        *,
        freeze: bool,
        why: str,
        trim: bool = True,
        leave: Callable[[ModelProcess], Awaitable[str]] | None = None,
    ) -> None:
        """RESIDENT -> WARM or FROZEN: let the process fence and unmap.

        Args:
            freeze: whether requests in flight go on after the next wake.
            why: for people.
            trim: whether it empties its caches.
            leave: how it leaves the device, where that takes more than a command, and what has become of it.

        Raises:
            OmniError: it did not in time; its process must be killed, and the frames are not free before it is gone.
        """
        assert self.state is State.RESIDENT
        process = self.process
        if process is None:
            raise ProcessError(self.subject, "its process ended")
        frozen = freeze and self.line.in_flight > 0
        self.set_state(State.EVICTING, why)
        timeout_seconds = self._acknowledged_within(self.limits.drain_seconds)
        if leave is None:
            self.line.tokens.hear(process, await process.command(Evict(freeze=frozen, trim=trim), (), timeout_seconds))
        else:
            why = f"{why}; {await leave(process)}"
        self.history.evictions += 1
        self.draining = False
        self.line.owed = 0
        self.evicted_seconds = time.monotonic()
        self.frozen_since_seconds = self.evicted_seconds if frozen else None
        self.set_state(State.FROZEN if frozen else State.WARM, why)
        self.mapped = None
        self.keep()

    async def trim(self) -> None:
        """WARM -> WARM: let the process empty its caches.

        Raises:
            OmniError: it did not in time.
        """
        if self.process is not None:
            await self.process.command(Evict(), (), _ACKNOWLEDGE_SECONDS)

    async def stop(self, why: str) -> None:
        """WARM -> COLD: end the process in peace."""
        if self.process is None:
            return
        self.set_state(State.STOPPING, why)
        await self.lifetime.stop()
        self.message = why

    async def kill(self, why: OmniError | None = None) -> bool:
        """End the process at once, in any state; whether it is seen to be gone.

        One that hangs in the kernel is not, and what it holds stays its own until it is.
        """
        return await self.lifetime.kill(why)

    def _process_gone(self) -> None:
        self.mapped = None
        self.set_state(State.STOPPING, "its process has ended")

    def _process_buried(self, error: OmniError | None) -> None:
        self.frozen_since_seconds = None
        self.rest.end()
        self.private_bytes = 0
        self.line.owed = 0
        if error is not None:
            self.history.restarts += 1
        self.set_state(State.COLD, error.problem if error is not None else self.message)
        self._on_exit(self, error)

    # Failure

    def fail(self, error: OmniError) -> None:
        """Note a failure: until it makes sense to try again, requests are refused with its reason."""
        wait_seconds = self.failures.note(error, time.monotonic(), verified=self.verified)
        self.message = error.problem
        if wait_seconds:
            self.line.refuse(self.door.refusal)
        self._changed()
