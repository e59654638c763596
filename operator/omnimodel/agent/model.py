"""One model of the catalogue on this agent: the revision that serves, and the one that is to follow it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omnimodel.agent.broker import SMALLEST_WORKING_BYTES
from omnimodel.agent.instance import Instance, State
from omnimodel.agent.preparation import Footprint, finish
from omnimodel.agent.proof import prove
from omnimodel.errors import OmniError, Reason
from omnimodel.protocol.dispatch import ModelCard
from omnimodel.protocol.report import ModelReport, ProcessReport
from omnimodel.render import spec_card

if TYPE_CHECKING:
    from omnimodel.agent.broker import Broker
    from omnimodel.agent.layout import Layout
    from omnimodel.agent.preparation import Preparation

log = logging.getLogger(__name__)

_MIB = 1 << 20
WORKING_STEP_BYTES = 4 * _MIB
WORKING_HEADROOM_BYTES = 16 * _MIB  # beside a quarter more than was measured: other requests ask for more
_LONG_PHASES = {  # told as events: they can take minutes
    "building": "its environment is being built",
    "publishing": "its weights are being published as an image",
}


def working_from_measured(peak_bytes: int, coming_bytes: int = 0) -> int:
    """The working memory a model is granted.

    Args:
        peak_bytes: the most that its process held until its first answer.
        coming_bytes: what its engine knows that it will need beyond that, such as a cache of keys and values; 0 when
            it does not know.
    """
    wanted = peak_bytes + max(coming_bytes, peak_bytes // 4) + WORKING_HEADROOM_BYTES
    return -(-max(wanted, SMALLEST_WORKING_BYTES) // WORKING_STEP_BYTES) * WORKING_STEP_BYTES


class Model:
    """See the module. Its `bring` task is the only one that takes a revision from its spec to serving.

    Args:
        key: `namespace/name`.
        instance: the first revision.
        make: makes the instance of a later revision from its spec.
    """

    def __init__(
        self,
        key: str,
        instance: Instance,
        *,
        make: Callable[[dict[str, Any]], Instance],
        broker: Broker,
        preparation: Preparation,
        layout: Layout,
        changed: Callable[[], None],
    ) -> None:
        self.key = key
        self.serving = instance
        self.incoming: Instance | None = None
        self.phase = "fetching"
        self.progress = -1.0
        self.problem: OmniError | None = None
        self.created_seconds = int(time.time())
        self._make = make
        self._broker = broker
        self._preparation = preparation
        self._layout = layout
        self._changed = changed
        self._task: asyncio.Task[None] | None = None
        self._revising: asyncio.Task[None] | None = None
        self._discarding: set[asyncio.Task[None]] = set()
        self._card: ModelCard | None = None
        self._card_of: tuple[object, ...] = ()
        self._bring(instance)

    @property
    def instances(self) -> list[Instance]:
        """Every revision there is."""
        return [instance for instance in (self.serving, self.incoming) if instance is not None]

    @property
    def latest(self) -> Instance:
        """The revision that shall serve."""
        return self.incoming or self.serving

    def revise(self, spec: dict[str, Any]) -> None:
        """Take a changed spec, after those that came before it."""
        if spec["hash"] != self.latest.spec["hash"] or not self.latest.verified:
            self.problem = None
            self._say("fetching")
        self._revising = asyncio.create_task(self._revise(spec, self._revising), name=f"revise {self.key}")

    async def _revise(self, spec: dict[str, Any], earlier: asyncio.Task[None] | None) -> None:
        """At once where the process need not change, else by a revision beside the one that serves."""
        if earlier is not None:
            await asyncio.gather(earlier, return_exceptions=True)
        latest = self.latest
        if spec["hash"] == latest.spec["hash"]:
            latest.update(spec)
            if not latest.verified:  # the edit may be the cure
                await finish(self._task)
                latest.recovered()
                self._bring(latest)
        elif spec["hash"] == self.serving.spec["hash"] and self.serving.verified:
            self.serving.update(spec)
            await finish(self._task)
            self._discard(self.incoming, "the edit was taken back")
            self.incoming = None
            self.phase, self.problem = "serving", None
        else:
            await self._replace(self._make(spec))
        self._changed()

    async def _replace(self, instance: Instance) -> None:
        await finish(self._task)
        if self.serving.verified:
            abandoned, self.incoming = self.incoming, instance
        else:
            abandoned, self.serving = self.serving, instance
        if abandoned is not None:
            abandoned.line.hand_over(instance.line)
        self._discard(abandoned, "a newer revision takes its place")
        self._bring(instance)

    def _discard(self, instance: Instance | None, why: str) -> None:
        """Remove a revision; its requests in flight finish first."""
        if instance is None:
            return
        task = asyncio.create_task(
            self._broker.remove(instance, why, instance.limits.deadline_seconds), name=f"discard {instance.name}"
        )
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)

    async def remove(self, drain_seconds: float) -> None:
        """Take the model away: requests in flight finish, then its processes go."""
        await self.halt()
        self.phase = "draining"
        await asyncio.gather(
            *self._discarding,
            *(self._broker.remove(instance, "the model was deleted", drain_seconds) for instance in self.instances),
        )

    async def halt(self) -> None:
        """Bring nothing up any more."""
        await finish(self._revising)
        await finish(self._task)

    # From a spec to serving

    def _bring(self, instance: Instance) -> None:
        self._task = asyncio.create_task(self._until_it_serves(instance), name=f"bring {instance.name}")

    async def _until_it_serves(self, instance: Instance) -> None:
        while True:
            try:
                if instance.prepared is None:
                    instance.prepared = await self._preparation.prepare(instance.subject, instance.spec, self._report)
                    self._size(instance)
                self._broker.instances[instance.name] = instance
                self._say("starting")
                await self._verify(instance)
                break
            except OmniError as error:
                self.problem = error
                self._say("failed")
                if instance.failure is None or time.monotonic() >= instance.retry_at_seconds:
                    self._broker.moves.failed(instance, error)
                log.warning("model_failed model=%s reason=%s problem=%r", instance.name, error.reason, error.problem)
            await asyncio.sleep(max(0.05, instance.retry_at_seconds - time.monotonic()))
        self.problem = None
        self._broker.moves.tell(
            instance, "Ready", "it answered its probe" if instance.spec["probe"] else "it was woken"
        )
        if instance is self.incoming:
            self._switch(instance)
        self._say("serving")

    def _say(self, phase: str, progress: float = -1.0) -> None:
        self.phase, self.progress = phase, progress
        self._changed()

    def _report(self, phase: str, progress: float) -> None:
        if phase != self.phase and phase in _LONG_PHASES:
            self._broker.moves.tell(self.latest, phase.capitalize(), _LONG_PHASES[phase])
        self.latest.message = phase
        self._say(phase, progress)

    def _size(self, instance: Instance) -> None:
        """Set its working memory: as the manifest says, or as measured before; else it gets a grant to be measured."""
        spec = instance.spec
        declared = spec["deviceMemoryBytes"]
        known = Footprint.load(self._layout, spec["hash"])
        if declared:
            instance.working_bytes = max(declared - instance.weights_bytes, WORKING_STEP_BYTES)
            instance.measured = True
        elif known is not None:
            instance.working_bytes = known.working_bytes
            instance.measured = True
        else:
            instance.measured = False

    async def _verify(self, instance: Instance) -> None:
        """Have it woken and check its known answer; then measure it.

        Raises:
            OmniError: it could not be woken, or answers wrongly.
        """
        waiter = instance.line.arrive(time.monotonic(), system=True)
        self._broker.kick()
        renew = False
        try:
            await waiter.admitted
            self._say("probing")
            await prove(instance)
            await self._broker.accounting.measure(instance)
            if not instance.measured:
                peak_bytes = instance.process.group.peak_bytes() if instance.process else None
                measured_bytes = max(peak_bytes or 0, instance.private_bytes)
                self._broker.learn_working(instance, working_from_measured(measured_bytes, instance.coming_bytes))
                Footprint(instance.working_bytes).save(self._layout, instance.spec["hash"])
                renew = not instance.spec["limits"]["memoryBytes"]
        finally:
            self._broker.moves.end_measuring(instance)
            waiter.leave()
        if renew:  # the process still has the grant for its limit; the next one has what was measured
            await self._broker.stop(instance, "its size is known now")
        instance.verified = True
        instance.recovered()
        if instance.residency.preload:
            instance.wanted_since_seconds = None if instance.resident else time.monotonic()
        instance.admit()

    def _switch(self, instance: Instance) -> None:
        """Let a verified revision take over: whoever waits goes to it, who is in flight finishes with the old one."""
        old = self.serving
        self.serving, self.incoming = instance, None
        old.line.hand_over(instance.line)
        self._changed()
        self._broker.kick()
        self._discard(old, "a newer revision serves")

    def doubt(self, instance: Instance) -> None:
        """Bring an instance that answered wrongly after a wake up anew; every byte of its image is checked again."""
        if instance is not self.serving or self.incoming is not None or not instance.verified:
            return
        instance.verified = False
        if instance.prepared is not None and instance.prepared.image is not None:
            self._preparation.distrust(instance.prepared.image.digest)
        instance.prepared = None
        self._bring(instance)

    def outgrown(self, instance: Instance) -> None:
        """Grant more working memory to a model that ran out of what was measured, lest it dies of it again."""
        if instance.spec["deviceMemoryBytes"] or instance.spec["limits"]["memoryBytes"]:
            return
        wanted = (instance.working_bytes * 3 // 2) // WORKING_STEP_BYTES * WORKING_STEP_BYTES
        room = (self._broker.budget_bytes - instance.weights_bytes) // WORKING_STEP_BYTES * WORKING_STEP_BYTES
        if instance.working_bytes < min(wanted, room):
            instance.working_bytes = min(wanted, room)
            Footprint(instance.working_bytes).save(self._layout, instance.spec["hash"])

    # What is reported

    def card(self) -> ModelCard:
        """The model for a gateway. Asked for with every request, so that it is made anew only when it changes."""
        instance = self.serving
        seen = (instance, instance.spec, instance.prepared, instance.tier, *self._readiness())
        if self._card is None or seen != self._card_of:
            self._card, self._card_of = self._make_card(*self._readiness()), seen
        return self._card

    def _make_card(self, ready: bool, reason: str, message: str) -> ModelCard:
        return replace(
            spec_card(self.serving.spec),
            tier=self.serving.tier,
            ready=ready,
            reason=reason,
            message=message,
            inputs=self._tensors("inputs"),
            outputs=self._tensors("outputs"),
            created_seconds=self.created_seconds,
        )

    def _tensors(self, which: str) -> tuple[dict[str, Any], ...]:
        prepared = self.serving.prepared
        return tuple(prepared.image.index.metadata.get(which) or ()) if prepared and prepared.image else ()

    def _readiness(self) -> tuple[bool, str, str]:
        """Whether the revision that serves is ready; reason and sentence when it, or the one to follow, is not."""
        instance = self.serving
        if instance.blocked:
            return False, str(Reason.TOO_LARGE), instance.blocked
        failing = instance.failure if not instance.verified or instance.retry_at_seconds > time.monotonic() else None
        problem = self.problem or failing
        ready = instance.verified and failing is None
        return ready, str(problem.reason) if problem else "", problem.problem if problem else ""

    def report(self) -> ModelReport:
        """The model now."""
        instance = self.serving
        ready, reason, message = self._readiness()
        device_bytes, host_bytes = self._broker.memory.ledger.held_by(instance.name)
        return ModelReport(
            namespace=instance.namespace,
            name=instance.model,
            generation=instance.generation,
            tier=instance.tier,
            phase=self._phase(instance),
            ready=ready,
            progress=self.progress,
            reason=reason,
            message=message or instance.message,
            weights_bytes=instance.prepared.image_bytes if instance.prepared else 0,
            working_bytes=instance.working_bytes if instance.measured else 0,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            waiting=sum(not waiter.system for waiter in instance.line.waiting),
            in_flight=instance.line.in_flight - instance.line.system_in_flight,
            served=instance.line.served,
            failed=instance.line.failed,
            wakes=instance.wakes,
            evictions=instance.evictions,
            swaps=dict(sorted(instance.causes.items())),
            last_wake_seconds=instance.last_wake_seconds,
            last_request_seconds=instance.last_request_seconds,
            since_seconds=instance.since_seconds,
            inputs=self._tensors("inputs"),
            outputs=self._tensors("outputs"),
            process=self._process(instance),
        )

    def _phase(self, instance: Instance) -> str:
        if self.phase != "serving":
            return self.phase
        moving = {State.WAKING: "waking", State.EVICTING: "evicting", State.STARTING: "starting"}
        if instance.state in moving:
            return moving[instance.state]
        if instance.draining:
            return "draining"
        return "serving" if instance.line.busy else "idle"

    @staticmethod
    def _process(instance: Instance) -> ProcessReport | None:
        process = instance.process
        if process is None:
            return None
        return ProcessReport(
            instance=process.instance,
            pid=process.pid,
            state="draining" if instance.draining else "starting" if instance.state is State.STARTING else "ready",
            started_seconds=process.started_seconds,
            private_bytes=instance.private_bytes,
            restarts=instance.restarts,
            isolation_level=str(process.reached.level),
            isolation_missing=process.reached.missing,
            cgroup=",".join(process.group.paths),
        )
