"""One model of the catalogue on this agent: the revision that serves, and the one that is to follow it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omnimodel.agent.instance import Instance
from omnimodel.agent.preparation import finish
from omnimodel.agent.proof import prove
from omnimodel.agent.reporting import instance_report, tensors
from omnimodel.agent.sizing import Sizes
from omnimodel.errors import OmniError, Reason
from omnimodel.protocol.dispatch import ModelCard
from omnimodel.protocol.report import ModelReport
from omnimodel.render import spec_card

if TYPE_CHECKING:
    from omnimodel.agent.broker import Broker
    from omnimodel.agent.devices import Devices
    from omnimodel.agent.layout import Layout
    from omnimodel.agent.preparation import Preparation, Prepared

log = logging.getLogger(__name__)

_BOUNDED_PHASES = {  # with a limit on silence; publishing has its own, and who is queued waits for others
    "fetching": "its source was fetched",
    "building": "its environment was built",
}
_LONG_PHASES = {  # told as events: they can take minutes
    "building": "its environment is being built",
    "publishing": "its weights are being published as an image",
}


def _one_process(spec: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one process can serve both specs: an edit between them needs no other, nor another size."""
    return all(spec[field] == other[field] for field in ("hash", "deviceMemoryBytes"))


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
        devices: Devices,
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
        self._devices = devices
        self._preparation = preparation
        self._sizes = Sizes(devices, layout)
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
        if not _one_process(spec, self.latest.spec) or not self.latest.verified:
            self.problem = None
            self._say("fetching")
        self._revising = asyncio.create_task(self._revise(spec, self._revising), name=f"revise {self.key}")

    async def _revise(self, spec: dict[str, Any], earlier: asyncio.Task[None] | None) -> None:
        """At once where the process need not change, else by a revision beside the one that serves."""
        if earlier is not None:
            await asyncio.gather(earlier, return_exceptions=True)
        latest = self.latest
        if _one_process(spec, latest.spec):
            latest.update(spec)
            if not latest.verified:  # the edit may be the cure
                await finish(self._task)
                latest.failures.recovered()
                self._bring(latest)
        elif _one_process(spec, self.serving.spec) and self.serving.verified:
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

    def _broker(self, instance: Instance) -> Broker:
        """Who decides about a revision: it may be on another device than the last one."""
        return self._devices.of(instance)

    def _discard(self, instance: Instance | None, why: str) -> None:
        """Remove a revision; its requests in flight finish first, within its `limits.drainTimeout`."""
        if instance is None:
            return
        task = asyncio.create_task(self._broker(instance).orders.remove(instance, why), name=f"discard {instance.name}")
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)

    async def remove(self) -> None:
        """Take the model away: requests in flight finish within its `limits.drainTimeout`, then its processes go."""
        await self.halt()
        self.phase = "draining"
        await asyncio.gather(
            *self._discarding,
            *(self._broker(instance).orders.remove(instance, "the model was deleted") for instance in self.instances),
        )

    async def halt(self) -> None:
        """Bring nothing up any more."""
        await finish(self._revising)
        await finish(self._task)

    # From a spec to serving

    def _bring(self, instance: Instance) -> None:
        self._task = asyncio.create_task(self._until_it_serves(instance), name=f"bring {instance.name}")

    async def _until_it_serves(self, instance: Instance) -> None:
        if instance.verified:  # an earlier agent has brought it up
            self._say("serving")
            return
        while True:
            try:
                if instance.prepared is None:
                    instance.prepared = await self._prepare(instance)
                    self._sizes.find(instance)
                self._devices.add(instance)
                self._say("starting")
                await self._verify(instance)
                break
            except OmniError as error:
                self._failed(instance, error)
            except Exception as error:
                log.exception("bring_failed model=%s", instance.name)
                told = f"{type(error).__name__}: {error}"
                self._failed(
                    instance, OmniError(instance.subject, told, "see the log of the agent", reason=Reason.INTERNAL)
                )
            await asyncio.sleep(max(0.05, instance.failures.retry_at_seconds - time.monotonic()))
        self.problem = None
        self._broker(instance).moves.tell(
            instance, "Ready", "it answered its probe" if instance.spec["probe"] else "it was woken"
        )
        if instance is self.incoming:
            self._switch(instance)
        self._say("serving")

    async def _prepare(self, instance: Instance) -> Prepared:
        """Fetch, build and publish; what does not move for `limits.loadDeadline` is given up.

        Raises:
            OmniError: it cannot be prepared, or nothing moved any more.
        """
        seconds = instance.limits.load_deadline_seconds
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)

        def moved(phase: str, progress: float) -> None:
            self._report(phase, progress)
            with contextlib.suppress(RuntimeError):  # it is over
                limit.reschedule(loop.time() + seconds if phase in _BOUNDED_PHASES else None)

        try:
            async with limit:
                return await self._preparation.prepare(instance.subject, instance.spec, moved)
        except TimeoutError:
            if not limit.expired():
                raise
            raise OmniError(
                instance.subject,
                f"while {_BOUNDED_PHASES.get(self.phase, 'it was prepared')} nothing moved for {seconds:g} s, "
                "its limits.loadDeadline",
                "see whether what it needs can be reached, or raise limits.loadDeadline",
                reason=Reason.LOAD_TIMEOUT,
            ) from None

    def _failed(self, instance: Instance, error: OmniError) -> None:
        self.problem = error
        self._say("failed")
        if instance.failure is None or time.monotonic() >= instance.failures.retry_at_seconds:
            self._broker(instance).moves.failed(instance, error)
        log.warning("model_failed model=%s reason=%s problem=%r", instance.name, error.reason, error.problem)

    def _say(self, phase: str, progress: float = -1.0) -> None:
        self.phase, self.progress = phase, progress
        self._changed()

    def _report(self, phase: str, progress: float) -> None:
        if phase != self.phase and phase in _LONG_PHASES:
            self._broker(self.latest).moves.tell(self.latest, phase.capitalize(), _LONG_PHASES[phase])
        self.latest.message = phase
        self._say(phase, progress)

    async def _verify(self, instance: Instance) -> None:
        """Have it woken and check its known answer; then measure it.

        Raises:
            OmniError: it could not be woken, or answers wrongly.
        """
        waiter = instance.line.arrive(time.monotonic(), system=True)
        self._broker(instance).kick()
        renew = False
        try:
            await waiter.admitted
            self._say("probing")
            await prove(instance)
            process = instance.process
            await self._broker(instance).accounting.measure(instance)
            if process is None or instance.process is not process:
                raise OmniError(instance.subject, "its process ended after its first answer", reason=Reason.CRASHED)
            if not instance.measured:
                await self._sizes.measure(instance, process)
                renew = not instance.spec["limits"]["memoryBytes"]
        finally:
            self._broker(instance).moves.end_measuring(instance)
            waiter.leave()
        if renew:
            await self._sizes.apply(instance)
        instance.verified = True
        instance.keep()
        instance.failures.recovered()
        instance.wish_again()
        instance.door.admit()
        self._broker(instance).kick()

    def _switch(self, instance: Instance) -> None:
        """Let a verified revision take over: whoever waits goes to it, who is in flight finishes with the old one."""
        old = self.serving
        self.serving, self.incoming = instance, None
        old.line.hand_over(instance.line)
        self._changed()
        self._broker(instance).kick()
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
        self._sizes.outgrown(instance)

    # What is reported

    def card(self) -> ModelCard:
        """The model for a gateway. Asked for with every request, so that it is made anew only when it changes."""
        instance = self.serving
        readiness = self._readiness(instance.failures.waiting(time.monotonic()))
        seen = (instance, instance.spec, instance.prepared, instance.tier, *readiness)
        if self._card is None or seen != self._card_of:
            self._card, self._card_of = self._make_card(*readiness), seen
        return self._card

    def _make_card(self, ready: bool, reason: str, message: str) -> ModelCard:
        return replace(
            spec_card(self.serving.spec),
            tier=self.serving.tier,
            ready=ready,
            reason=reason,
            message=message,
            inputs=tensors(self.serving, "inputs"),
            outputs=tensors(self.serving, "outputs"),
            created_seconds=self.created_seconds,
        )

    def _readiness(self, failing: bool) -> tuple[bool, str, str]:
        """Whether the revision that serves is ready; reason and sentence when it, or the one to follow, is not.

        Args:
            failing: whether one that has worked before counts as not ready. For a gateway it does while its requests
                are refused, for it has to be asked to recover; for people until it has answered again.
        """
        instance = self.serving
        if why := instance.blocked:
            return False, str(why.reason), why.message
        failure = instance.failures.last if failing or not instance.verified else None
        problem = self.problem or failure
        ready = instance.verified and failure is None
        return ready, str(problem.reason) if problem else "", problem.advice if problem else ""

    def report(self) -> ModelReport:
        """The model now."""
        failures = self.serving.failures
        ready, reason, message = self._readiness(failures.repeated or failures.waiting(time.monotonic()))
        report = instance_report(self.serving, [moves.memory for moves in self._devices.moves_of(self.serving)])
        return replace(
            report,
            phase=report.phase if self.phase == "serving" else self.phase,
            progress=self.progress,
            ready=ready,
            reason=reason,
            message=message or report.message,
        )
