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
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from omnimodel.agent.abandoned import until_stopped
from omnimodel.agent.line import Line
from omnimodel.errors import DispatchError, OmniError, ProcessError, Reason
from omnimodel.protocol.process import Evict, Start, Wake

if TYPE_CHECKING:
    from omnimodel.agent.preparation import Prepared
    from omnimodel.agent.process import ModelProcess
    from omnimodel.memory.devices import Frame

log = logging.getLogger(__name__)

# A model that fails is tried again after these waits, so that a broken one that is asked for all the time is started
# five times in ten minutes, and one whose cause is gone recovers with the next request.
BACKOFF_SECONDS = (5.0, 20.0, 80.0, 300.0)
HEALTHY_SECONDS = 300.0
_ACKNOWLEDGE_SECONDS = 10.0  # to map or unmap frames
_STOP_SECONDS = 2.0
_NOTICEABLE_SECONDS = 0.001


class State(StrEnum):
    """What an instance is doing."""

    COLD = "cold"
    STARTING = "starting"
    WARM = "warm"
    WAKING = "waking"
    RESIDENT = "resident"
    EVICTING = "evicting"
    FROZEN = "frozen"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Limits:
    """What the manifest allows one model, resolved."""

    concurrency: int
    queue: int
    deadline_seconds: float
    load_deadline_seconds: float
    drain_seconds: float
    request_bytes: int
    response_bytes: int

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Limits:
        """Read them from a process spec."""
        limits = spec["limits"]
        return cls(
            concurrency=limits["concurrency"],
            queue=limits["queue"],
            deadline_seconds=limits["deadlineSeconds"],
            load_deadline_seconds=limits["loadDeadlineSeconds"],
            drain_seconds=limits["drainSeconds"],
            request_bytes=limits["requestBytes"],
            response_bytes=limits["responseBytes"],
        )


@dataclass(frozen=True)
class Residency:
    """What the manifest says about residency, resolved."""

    priority: int
    min_resident_seconds: float
    idle_after_seconds: float | None
    idle_tier: str
    keep_resident: bool
    preload: bool

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Residency:
        """Read it from a process spec."""
        residency = spec["residency"]
        return cls(
            priority=residency["priority"],
            min_resident_seconds=residency["minResidentSeconds"],
            idle_after_seconds=residency["idleAfterSeconds"],
            idle_tier=residency["idleTier"],
            keep_resident=residency["keepResident"],
            preload=residency["preload"],
        )


class Spawn(Protocol):
    """Makes the process of an instance. Raises OmniError."""

    def __call__(self, instance: Instance) -> Awaitable[ModelProcess]:
        """Make it."""


class Instance:
    """See the module.

    Args:
        name: unique on this agent: `namespace/name`, and `@generation` for a revision that is to replace another.
        spec: the process spec, as rendered.
        spawn: makes the process.
        changed: called after every change that the broker may have to act on.
        on_exit: called once a process is seen to be gone, with the reason when it was not told to go.
    """

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        *,
        spawn: Spawn,
        changed: Callable[[], None],
        on_exit: Callable[[Instance, OmniError | None], None],
    ) -> None:
        self.name = name
        self.namespace: str = spec["model"]["namespace"]
        self.model: str = spec["model"]["name"]
        self.subject = f"OmniModel {self.namespace}/{self.model}"
        self.spec = spec
        self.limits = Limits.of(spec)
        self.residency = Residency.of(spec)
        self.line = Line(self, self.limits.concurrency, self.limits.queue, changed)

        self.state = State.COLD
        self.since_seconds = time.time()
        self.message = ""
        self.prepared: Prepared | None = None
        self.verified = False
        self.measured = False
        self.working_bytes = 0
        self.coming_bytes = 0  # what its engine knows that it will need beyond a first answer
        self.private_bytes = 0
        self.process: ModelProcess | None = None
        self.session: aiohttp.ClientSession | None = None

        # Set by the broker when it has decided, before the move begins.
        self.draining = False
        self.leaving = False
        self.freezing = False
        self.reserved = False
        self.proving = False  # it is asked its known answer after a wake
        self.blocked = ""
        self.removed = ""

        self.failure: OmniError | None = None
        self.failures = 0
        self.failed_seconds = -math.inf
        self.retry_at_seconds = 0.0

        self.wanted_since_seconds: float | None = None
        self.frozen_since_seconds: float | None = None
        self.woken_seconds = -math.inf
        self.evicted_seconds = -math.inf
        self.idle_seconds = time.monotonic()
        self.last_wake_seconds = 0.0
        self.last_evict_seconds = 0.0
        self.last_start_seconds = 0.0
        self.last_request_seconds = 0.0
        self.wakes = 0
        self.evictions = 0
        self.causes: Counter[str] = Counter()  # of its wakes and evictions
        self.restarts = 0

        self._spawn = spawn
        self._changed = changed
        self._on_exit = on_exit
        self._watch: asyncio.Task[None] | None = None
        self._abandoned: asyncio.Task[None] | None = None
        self._ending = False  # told to
        self._ending_because: OmniError | None = None

    def update(self, spec: dict[str, Any]) -> None:
        """Take over what may change without a new process: limits of the queue, residency, names, probe."""
        self.spec = spec
        self.limits = Limits.of(spec)
        self.residency = Residency.of(spec)
        self.line.concurrency, self.line.limit = self.limits.concurrency, self.limits.queue
        self._changed()

    # What it is

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
    def held_bytes(self) -> int:
        """What it holds on the device, or will when the moves under way are done."""
        if self.reserved or (self.state is State.RESIDENT and not self.leaving):
            return self.weights_bytes + self.working_bytes
        if self.state is State.FROZEN or (self.leaving and self.freezing):
            return self.working_bytes
        return 0

    @property
    def need_bytes(self) -> int:
        """What a wake needs beyond what it holds already."""
        return self.weights_bytes + self.working_bytes - (self.working_bytes if self.state is State.FROZEN else 0)

    @property
    def start_seconds(self) -> float:
        """What a wake takes beyond the copy."""
        return self.last_start_seconds if self.process is None or self.foreign else 0.0

    @property
    def wanted(self) -> bool:
        """Whether somebody wants it resident."""
        return not self.removed and bool(
            self.line.waiting
            or self.frozen_since_seconds is not None
            or self.wanted_since_seconds is not None
            or (self.residency.keep_resident and self.verified)
        )

    @property
    def tier(self) -> str:
        """`resident`, `warm` or `cold`, as the status says it."""
        if self.state in {State.RESIDENT, State.EVICTING}:
            return "resident"
        return "warm" if self.process is not None and self.state is not State.STARTING else "cold"

    def set_state(self, state: State, message: str) -> None:
        """Note a transition."""
        self.state = state
        self.since_seconds = time.time()
        self.message = message
        self._changed()

    # What requests ask

    def admit(self) -> None:
        """Let in who waits, if it may: not before its first answer was checked, and not while it drains."""
        if self.state is not State.RESIDENT or self.leaving or self.proving or self._abandoned is not None:
            return
        if not self.draining or self.line.owed:
            self.line.admit(system_only=not self.verified)

    def abandon(self, process: ModelProcess) -> None:
        """Note that nobody waits any more for an answer that the process has not finished."""
        if self._abandoned is None and self.process is process and not self.foreign and not self.freezable:
            self._abandoned = asyncio.create_task(until_stopped(self, process), name=f"abandoned {self.name}")
            self._abandoned.add_done_callback(self._stopped_computing)

    def _stopped_computing(self, _: asyncio.Task[None]) -> None:
        self._abandoned = None
        self.admit()

    def check_room_in_line(self) -> None:
        """Raise the DispatchError with which a request is refused at once, if there is one."""
        failing = self.failure is not None and time.monotonic() < self.retry_at_seconds
        if self.removed or self.blocked or failing:
            raise self.refusal()
        line = self.line
        if len(line.waiting) >= line.limit:
            raise DispatchError(
                self.subject,
                f"{line.limit} requests wait already, its limits.queue",
                "send it again later",
                reason=Reason.QUEUE_FULL,
                status=429,
                retry_after_seconds=max(1.0, round(self.expected_wake_seconds())),
            )

    def refusal(self) -> DispatchError:
        """The answer to a request that the model cannot take."""
        if self.removed:
            return DispatchError(self.subject, self.removed, reason=Reason.MODEL_NOT_FOUND, status=404)
        if self.blocked:
            return DispatchError(
                self.subject,
                self.blocked,
                "raise device.memory of the OmniPool, or use a smaller dtype",
                reason=Reason.TOO_LARGE,
                status=503,
            )
        failure = self.failure or OmniError(self.subject, "its process has just ended", reason=Reason.CRASHED)
        return DispatchError(
            self.subject,
            failure.problem,
            failure.cure,
            reason=failure.reason,
            status=503,
            retry_after_seconds=max(1.0, math.ceil(self.retry_at_seconds - time.monotonic())),
        )

    def expected_wake_seconds(self) -> float:
        """How long a request that comes now is likely to be held, from what earlier wakes took."""
        if self.resident and not self.draining:
            return 0.0
        return self.last_wake_seconds + (self.last_start_seconds if self.process is None else 0.0)

    def waiting_for(self) -> str:
        """What a held request waits for, for its error message."""
        if self.prepared is None:
            return f"its image ({self.message or 'being prepared'})"
        if self.resident:
            return "its turn in the queue of the model"
        return self.message or "room on the device"

    def waited_for(self, since_seconds: float, waited_seconds: float) -> str:
        """The reason for the wait of a request that came at `since_seconds`, for the response headers."""
        if self.woken_seconds > since_seconds:
            return "wake"
        return "queue" if waited_seconds > _NOTICEABLE_SECONDS else "none"

    async def ended(self, process: ModelProcess) -> None:
        """Wait until a process that does not take connections is seen to be gone; not for long."""
        watch = self._watch
        if self.process is process and watch is not None:
            await asyncio.wait([watch], timeout=_STOP_SECONDS)

    async def failure_of(self, process: ModelProcess, error: BaseException) -> DispatchError:
        """Why a connection to the process broke: it died (and of what), or it closed the connection."""
        try:
            async with asyncio.timeout(2):
                ended = await asyncio.shield(process.exited)
        except TimeoutError:
            return DispatchError(
                self.subject,
                f"its process closed the connection before the end of the answer ({type(error).__name__})",
                f"see omni logs {self.model}",
                reason=Reason.CRASHED,
                status=502,
            )
        return DispatchError(self.subject, ended.problem, ended.cure, reason=ended.reason, status=502)

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
        self._ending, self._ending_because = False, None
        self.set_state(State.STARTING, "its process is being started")
        process: ModelProcess | None = None
        try:
            process = await self._spawn(self)
            reply = await process.command(
                Start(
                    self.spec,
                    prepared.inside(process),
                    prepared.image_bytes,
                    prepared.frame_bytes,
                    prepared.device,
                    prepared.threads,
                ),
                (),
                self.limits.load_deadline_seconds,
            )
        except BaseException as error:
            if process is not None:
                process.kill()
                await process.exited
            self.set_state(State.COLD, error.problem if isinstance(error, OmniError) else "its start was cancelled")
            raise
        self.coming_bytes = int(reply.values.get("workingBytes") or 0)
        self.process = process
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(process.socket_path), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        self._watch = asyncio.create_task(self._watch_exit(process), name=f"watch {self.name}")
        self.last_start_seconds = time.monotonic() - began
        self.evicted_seconds = time.monotonic()
        self.set_state(State.WARM, "its process is started")

    def begin_wake(self) -> None:
        """WARM or FROZEN -> WAKING."""
        assert self.state in {State.WARM, State.FROZEN}
        self.set_state(State.WAKING, "being woken")

    async def wake(self, frames: Sequence[Frame], copy_seconds: float) -> None:
        """WAKING -> RESIDENT: let the process map frames that hold the image.

        Raises:
            OmniError: it did not, or not in time; the instance is still WAKING and its process is to be killed.
        """
        assert self.state is State.WAKING
        process = self.process
        if process is None:
            raise ProcessError(self.subject, "its process ended while it was woken")
        began = time.monotonic()
        timeout_seconds = self.limits.load_deadline_seconds if self.foreign else _ACKNOWLEDGE_SECONDS
        await process.command(
            Wake([frame.id for frame in frames]), [frame.descriptor for frame in frames], timeout_seconds
        )
        now = time.monotonic()
        self.last_wake_seconds = copy_seconds + now - began
        self.woken_seconds = self.idle_seconds = now
        self.wakes += 1
        self.wanted_since_seconds = self.frozen_since_seconds = None
        self.draining = False
        self.line.owed = len(self.line.waiting)
        self.set_state(State.RESIDENT, f"woken in {self.last_wake_seconds:.3f} s")

    def wake_failed(self) -> None:
        """WAKING -> where it was: nothing was mapped."""
        frozen = self.frozen_since_seconds is not None
        self.set_state(State.FROZEN if frozen else State.WARM, "its wake failed")

    async def evict(self, *, freeze: bool, why: str) -> None:
        """RESIDENT -> WARM or FROZEN: let the process fence and unmap.

        Raises:
            OmniError: it did not in time; its process must be killed, and the frames are not free before it is gone.
        """
        assert self.state is State.RESIDENT
        process = self.process
        if process is None:
            raise ProcessError(self.subject, "its process ended")
        frozen = freeze and self.line.in_flight > 0
        self.set_state(State.EVICTING, why)
        timeout_seconds = self.limits.drain_seconds if self.foreign else _ACKNOWLEDGE_SECONDS
        await process.command(Evict(freeze=frozen), (), timeout_seconds)
        self.evictions += 1
        self.draining = False
        self.line.owed = 0
        self.evicted_seconds = time.monotonic()
        self.frozen_since_seconds = self.evicted_seconds if frozen else None
        self.set_state(State.FROZEN if frozen else State.WARM, why)

    async def stop(self, why: str) -> None:
        """WARM -> COLD: end the process in peace."""
        process = self.process
        if process is None:
            return
        self._ending = True
        self.set_state(State.STOPPING, why)
        await process.stop(_STOP_SECONDS)
        await self._ended()
        self.message = why

    async def kill(self, why: OmniError | None = None) -> None:
        """End the process at once, in any state, and wait until it is seen to be gone."""
        if self.process is None:
            return
        self._ending, self._ending_because = True, why
        self.process.kill()
        await self._ended()

    async def _ended(self) -> None:
        if self._watch is not None:
            await asyncio.shield(self._watch)

    async def _watch_exit(self, process: ModelProcess) -> None:
        ended = await asyncio.shield(process.exited)
        session, self.session, self.process = self.session, None, None
        self.set_state(State.STOPPING, "its process has ended")
        if session is not None:
            await session.close()
        self.frozen_since_seconds = None
        self.private_bytes = 0
        self.line.owed = 0
        error = self._ending_because if self._ending else ended
        if error is not None:
            self.restarts += 1
        self.set_state(State.COLD, error.problem if error is not None else self.message)
        self._on_exit(self, error)

    # Failure

    def fail(self, error: OmniError) -> None:
        """Note a failure: until it makes sense to try again, requests are refused with its reason."""
        now = time.monotonic()
        if now - self.failed_seconds > HEALTHY_SECONDS:
            self.failures = 0
        self.failed_seconds = now
        self.failures += 1
        self.failure = error
        # The first death of a model that has worked is taken for an accident: it is started again at once.
        step = self.failures - (2 if self.verified else 1)
        wait_seconds = BACKOFF_SECONDS[min(step, len(BACKOFF_SECONDS) - 1)] if step >= 0 else 0.0
        self.retry_at_seconds = now + wait_seconds
        self.message = error.problem
        if wait_seconds:
            self.line.refuse(self.refusal)
        self._changed()

    def recovered(self) -> None:
        """Forget the failure: it has answered rightly."""
        self.failure = None
        self.retry_at_seconds = 0.0
