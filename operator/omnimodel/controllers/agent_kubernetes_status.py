"""What an agent in a pod writes to the API server: its residency entries, its pool entry, its heartbeat, events.

Entries are written on transitions only, by server-side apply of this pod's own field manager, and at a pace: a device
that swaps all the time must not make the API server busy. What is at rest is always written in the end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from omnimodel.api.meta import API_VERSION
from omnimodel.controllers.pool_status import pod_entry
from omnimodel.controllers.status import residency_entry
from omnimodel.kube import LEASES, MODELS, POOLS, Kube, KubeError, Recorder
from omnimodel.protocol.admin import Event
from omnimodel.protocol.report import AgentReport, ModelReport, PoolReport

log = logging.getLogger(__name__)

BURST_WRITES = 50  # at once, such as for a whole catalogue at the start
WRITES_PER_SECOND = 1.0  # of one pod for long; the API server sees that times the pods
POOL_SECONDS = 10.0  # between two writes of the pool's entry because of bytes alone
RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
HEARTBEAT_SECONDS = 10.0
MISSED_SECONDS = 35.0  # without a heartbeat that arrived: the operator may have taken the agent for dead
LEASE_SECONDS = 40  # without a heartbeat for so long the operator takes the agent for dead
QUIET_SECONDS = 60.0  # between two events of one kind about one object
_MOVING = frozenset({"starting", "waking", "probing", "draining", "evicting"})


@dataclass(frozen=True)
class PodIdentity:
    """Which pod this is, and of which pool."""

    name: str
    namespace: str
    pool: str
    pool_namespace: str
    uid: str = ""

    @property
    def manager(self) -> str:
        """The field manager of everything that this pod writes."""
        return f"omni-agent.{self.name}"


class Pace:
    """How many writes may be made: a bucket that fills again.

    Args:
        burst: its size.
        per_second: how fast it fills.
        clock: monotonic.
    """

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._left = burst
        self._looked = clock()

    def take(self) -> float:
        """Take one; 0 when there was one, else the seconds until there will be."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._looked) * self._per_second)
        self._looked = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._per_second


def transition(report: ModelReport) -> tuple[object, ...] | None:
    """What has to change before an entry is written anew; None while the model moves between two tiers."""
    if report.ready and report.phase in _MOVING:
        return None
    phase = "" if report.ready else report.phase
    message = "" if report.ready else report.message
    return (
        report.tier, report.ready, phase, report.generation, report.reason, message, report.device_bytes,
        report.weights_bytes, report.working_bytes, report.idle_bytes, report.store, report.device,
    )  # fmt: skip


def pool_transition(report: PoolReport, images: Sequence[str]) -> tuple[object, ...]:
    """What has to change before the pool's entry is written anew at once."""
    return (
        report.ready, report.reason, report.message, report.device, report.budget_bytes, report.host_budget_bytes,
        report.footprint_bytes, report.isolation_level, report.isolation_missing, report.store_path, tuple(images),
        tuple(device.problem for device in report.devices),
    )  # fmt: skip


class StatusWriter:
    """Writes this pod's entries.

    Args:
        kube: the connection.
        pod: whose they are.
        images: publish hashes of the images in the store, for placement.
        written: models that have an entry of this pod from an earlier run.
        pace: of all writes.
        clock: monotonic.
    """

    def __init__(
        self,
        kube: Kube,
        pod: PodIdentity,
        *,
        images: Callable[[], Sequence[str]] = tuple,
        written: Sequence[str] = (),
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._pod = pod
        self._images = images
        self._pace = pace or Pace(BURST_WRITES, WRITES_PER_SECOND, clock)
        self._clock = clock
        self._report: AgentReport | None = None
        self._assigned: Mapping[str, str] | None = None
        self._written: dict[str, object] = dict.fromkeys(written)  # what was said last, with the uid of the model
        self._missing: dict[str, object] = {}  # the same of models that are no more
        self._pool_written: tuple[object, ...] | None = None
        self._pool_bytes = -1
        self._pool_seconds = -POOL_SECONDS
        self._times: dict[str, float] = {}  # of the last write of each entry
        self._bell = asyncio.Event()
        self.writes = 0

    @property
    def written(self) -> tuple[str, ...]:
        """Models whose status has an entry of this pod."""
        return tuple(self._written)

    def tell(self, report: AgentReport, assigned: Mapping[str, str] | None) -> None:
        """Take over what is true now.

        Args:
            report: of the agent.
            assigned: uids of the models that are this pod's, by `namespace/name`; None while that is not known, and
                then no entry is taken back.
        """
        self._report, self._assigned = report, assigned
        self._bell.set()

    async def sweep(self, namespaces: Sequence[str] = ("",)) -> None:
        """Compare with what the API server has.

        An entry that somebody removed is written anew, one that an earlier pod of this name left behind taken back.

        Raises:
            KubeError: it could not be read.
        """
        there = set()
        for namespace in namespaces:
            for item in (await self._kube.list(MODELS, namespace)).items:
                entries = (item.get("status") or {}).get("residency") or ()
                if any(entry.get("pod") == self._pod.name for entry in entries) and await self._is_ours(item):
                    there.add(f"{item['metadata']['namespace']}/{item['metadata']['name']}")
        for key in there - self._written.keys():
            self._written[key] = None
        for key in self._written.keys() - there:
            del self._written[key]
        self._pool_written = None
        self._bell.set()

    async def _is_ours(self, item: Mapping[str, Any]) -> bool:
        """Whether a model belongs to this pool: pods of pools of one name in two namespaces have the same names."""
        pool, namespace = (item.get("spec") or {}).get("pool", "default"), item["metadata"]["namespace"]
        if pool != self._pod.pool:
            return False
        if namespace == self._pod.pool_namespace:
            return True
        return self._pod.pool_namespace == "default" and await self._kube.get(POOLS, pool, namespace) is None

    async def run(self, heard: asyncio.Event) -> None:
        """Write until cancelled.

        Args:
            heard: set once the heartbeat of this pod has arrived, so that nobody takes what it writes for the words of
                a pod of its name before it.
        """
        await heard.wait()
        failures = 0
        wait: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._bell.wait()
            self._bell.clear()
            try:
                wait = await self._write_all()
                failures = 0
            except KubeError as error:
                wait = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures += 1
                log.warning("status_not_written failures=%d error=%s", failures, error)
                await asyncio.sleep(wait)

    async def _write_all(self) -> float | None:
        """Write what is due; the seconds until more will be, or None."""
        if self._report is None:
            return None
        models = {f"{model.namespace}/{model.name}": model for model in self._report.models}
        if self._assigned is not None:
            for key in [key for key in self._written if key not in models and key not in self._assigned]:
                # Not an empty status: where nobody else has said anything the API server would have to make it null.
                await self._patch(key, {"residency": []})
                self._written.pop(key, None)
        for key in [key for key in self._missing.keys() | self._times.keys() if key not in models]:
            self._missing.pop(key, None)
            self._times.pop(key, None)
        later = await self._write_pool(self._report.pool)  # at a pace of its own
        due = [(key, model) for key, model in models.items() if self._is_due(key, model)]
        # What is wrong is said first, and then what was said longest ago: nothing waits for ever.
        due.sort(key=lambda item: (item[1].ready, self._times.get(item[0], -math.inf)))
        for key, model in due:
            wait = self._pace.take()
            if wait > 0:
                return wait if later is None else min(wait, later)
            said = self._said(key, model)
            self._times[key] = self._clock()
            if await self._patch(key, {"residency": [residency_entry(self._pod.name, model, self._pod.uid)]}):
                self._written[key] = said
                self._missing.pop(key, None)
            else:
                self._written.pop(key, None)
                self._missing[key] = said
        return later

    def _is_due(self, key: str, model: ModelReport) -> bool:
        if self._assigned is not None and key not in self._assigned:
            return False
        said = self._said(key, model)
        return said is not None and said not in (self._written.get(key), self._missing.get(key))

    def _said(self, key: str, model: ModelReport) -> object:
        what = transition(model)
        return None if what is None else (self._assigned.get(key) if self._assigned is not None else None, what)

    async def _patch(self, key: str, status: Mapping[str, Any]) -> bool:
        """Write one entry, or take it back; False when there is no such model or it is not accepted."""
        namespace, name = key.split("/", 1)
        try:
            self.writes += 1
            await self._kube.patch_status(MODELS, name, namespace, status, manager=self._pod.manager)
        except KubeError as error:
            if error.missing:
                return False
            if error.invalid or error.status == 403:
                log.warning("status_refused model=%s error=%s", key, error)
                return False
            raise
        return True

    async def _write_pool(self, report: PoolReport) -> float | None:
        if not report.pool:
            return None
        images = list(self._images())
        said = pool_transition(report, images)
        now = self._clock()
        if said == self._pool_written:
            if report.resident_bytes == self._pool_bytes:
                return None
            wait = self._pool_seconds + POOL_SECONDS - now
            if wait > 0:
                return wait
        try:
            self.writes += 1
            entry = pod_entry(self._pod.name, report, images, self._pod.uid)
            await self._kube.patch_status(
                POOLS, self._pod.pool, self._pod.pool_namespace, {"pods": [entry]}, manager=self._pod.manager
            )
        except KubeError as error:
            if not (error.missing or error.invalid or error.status == 403):
                raise
            log.warning("pool_status_refused pool=%s error=%s", self._pod.pool, error)
        self._pool_written, self._pool_bytes, self._pool_seconds = said, report.resident_bytes, now
        return None


async def beat(
    kube: Kube,
    pod: PodIdentity,
    heard: asyncio.Event,
    missed: Callable[[], None],
    *,
    seconds: float = HEARTBEAT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Renew this pod's lease until cancelled; a renewal that fails is made up for by the next.

    Args:
        kube: the connection.
        pod: whose lease it is.
        heard: set with the first one that the API server answered.
        missed: called when one has arrived after so long that the operator may have taken the agent for dead.
        seconds: between two.
        clock: monotonic.
    """
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
    metadata: dict[str, Any] = {
        "name": pod.name,
        "namespace": pod.namespace,
        "labels": {"omnimodel.io/pool": pod.pool, "omnimodel.io/pool-namespace": pod.pool_namespace},
    }
    if pod.uid:
        metadata["ownerReferences"] = [owner]
    arrived = clock()
    while True:
        spec = {
            "holderIdentity": pod.uid or pod.name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        try:
            await kube.apply(LEASES, {"metadata": metadata, "spec": spec}, manager=pod.manager)
        except KubeError as error:
            log.warning("heartbeat_failed error=%s", error)
            if error.status == 403:  # then no heartbeat will ever arrive, and people should read the rest
                heard.set()
        else:
            heard.set()
            if clock() - arrived > MISSED_SECONDS:
                missed()
            arrived = clock()
        await asyncio.sleep(seconds)


async def tell_events(
    recorder: Recorder,
    events: AsyncIterator[Event],
    uid_of: Callable[[str, str, str], str],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Copy what happened to the API server, for `kubectl describe`; not each of a thousand swaps.

    Args:
        recorder: writes them.
        events: of the agent.
        uid_of: kind, namespace and name of an object to its uid; empty when there is no such object.
        clock: monotonic.
    """
    pace = Pace(BURST_WRITES, WRITES_PER_SECOND / 4, clock)
    told: dict[tuple[str, str, str, str], float] = {}
    async for event in events:
        uid = uid_of(event.kind, event.namespace, event.name)
        if not uid:
            continue
        key, now = (event.kind, event.namespace, event.name, event.reason), clock()
        if now - told.get(key, -QUIET_SECONDS) < QUIET_SECONDS or pace.take() > 0:
            continue
        told = {old: at for old, at in told.items() if now - at < QUIET_SECONDS} | {key: now}
        about = {
            "apiVersion": API_VERSION,
            "kind": event.kind,
            "metadata": {"namespace": event.namespace, "name": event.name, "uid": uid},
        }
        await recorder.tell(about, event.reason, event.message, warning=event.type == "Warning")
