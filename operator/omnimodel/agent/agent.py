"""The agent as controllers and gateways use it: desired processes in, answers and reports out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from omnimodel.agent.adoption import Adoption, served_by
from omnimodel.agent.confinement import serving_request
from omnimodel.agent.descriptors import DescriptorStore
from omnimodel.agent.devices import Devices
from omnimodel.agent.events import EventLog
from omnimodel.agent.ingress import Ingress, stopping
from omnimodel.agent.instance import Instance
from omnimodel.agent.layout import Layout
from omnimodel.agent.logs import follow_log
from omnimodel.agent.model import Model
from omnimodel.agent.needed import needs_of, removed, removed_words
from omnimodel.agent.opened import OpenedPool
from omnimodel.agent.origins import write_files
from omnimodel.agent.process import ModelProcess
from omnimodel.agent.servers import SLEEPERS
from omnimodel.agent.spawner import Spawner
from omnimodel.agent.supply import Machine, Supply, supply, too_weak
from omnimodel.api import OmniPool, OmniProcess
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.protocol.dispatch import Estimate, InferenceRequest, InferenceResponse, ModelCard
from omnimodel.protocol.report import AgentReport, PoolReport

log = logging.getLogger(__name__)

_HOST_BYTES = 4 << 30  # that a process may have beside a device with memory of its own, if its manifest says nothing
_REPORT_SECONDS = 0.1  # changes closer together are told once


class Agent:
    """Serves the models of one pool on this machine.

    Args:
        state_dir: where it keeps images, environments and logs.
        store: keeps descriptors for the next agent, when this one is killed; None when no other will follow.
    """

    def __init__(self, state_dir: Path, store: DescriptorStore | None = None) -> None:
        self.layout = Layout(state_dir.resolve())
        self.events = EventLog()
        self.ingress = Ingress(self._serving)
        self._node = os.environ.get("OMNI_NODE_NAME") or socket.gethostname()
        self._store = store
        self._spawner: Spawner | None = None
        self._adoption = Adoption(())
        self._machine: Machine | None = None
        self._opened: OpenedPool | None = None
        self._pool: OmniPool | None = None
        self._models: dict[str, Model] = {}
        self._specs: dict[str, dict[str, Any]] = {}  # as applied last
        self._background: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._revisions = itertools.count(1)
        self._changed = asyncio.Event()
        self._refusal: OmniError | None = None
        self._doubted: set[str] = set()
        self._note = ""  # what of the pool's spec has no effect now
        self._stopping: asyncio.Task[None] | None = None
        self._draining: asyncio.Timeout | None = None

    # Life

    async def start(self) -> None:
        """Find out what the machine allows, clean what an earlier agent left behind, begin the first zygote."""
        await asyncio.to_thread(self.layout.make)
        self._spawner = await Spawner.open(self.layout.root, store=self._store)
        self._adoption = Adoption(self._spawner.survivors)
        self._numbers = itertools.count(self._adoption.first_number)
        # Nothing waits for it: the first fork does, if it comes before.
        self._background.add(asyncio.create_task(self._warm_up(self._spawner), name="first zygote"))

    async def _warm_up(self, spawner: Spawner) -> None:
        try:
            await spawner.zygotes.start()
        except OmniError as error:
            log.warning("zygote_failed error=%r", str(error))

    async def stop(self, drain_seconds: float) -> None:
        """Let requests in flight finish for at most `drain_seconds`, then end every process and free everything.

        A further call only shortens that time, and waits for the same end.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(drain_seconds), name="stop")
        elif self._draining is not None:
            sooner = asyncio.get_running_loop().time() + drain_seconds
            with contextlib.suppress(RuntimeError):  # it drains no more
                self._draining.reschedule(min(sooner, self._draining.when() or sooner))
        await asyncio.shield(self._stopping)

    async def _stop(self, drain_seconds: float) -> None:
        self.ingress.close()
        lines = [model.serving.line for model in self._models.values()]
        for line in lines:
            line.refuse(partial(stopping, line.instance.subject))
        try:
            async with asyncio.timeout(drain_seconds) as self._draining:
                await asyncio.gather(*(line.quiet() for line in lines))
        except TimeoutError:
            log.warning("drain_late in_flight=%d", sum(line.in_flight for line in lines))
        await asyncio.gather(*(model.halt() for model in self._models.values()))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._spawner is not None:
            await (self._opened.close(self._spawner) if self._opened is not None else self._spawner.close())

    # What controllers ask

    async def attach(self, files: Mapping[str, bytes]) -> None:
        """Put the files that the pool's sources refer to where fetches look for them (see `origins`)."""
        await asyncio.to_thread(write_files, self.layout.origins, files)

    async def apply(self, processes: Sequence[OmniProcess], pool: OmniPool) -> None:
        """Make these processes, and no others, the ones that are kept available. Returns before they are.

        Raises:
            OmniError: the pool cannot be served on this machine; what runs goes on.
        """
        wanted = {process.key: process for process in processes if not process.spec.suspend}
        if self._opened is None:
            self._machine = self._machine or self._adoption.machine(Machine.now())
            found = self._supply(pool, self._machine)
            await self._adoption.choose({key: process.spec.to_dict() for key, process in wanted.items()}, found)
        opened = self._serve(pool)
        opened.preparation.origins.follow(pool.spec.sources)
        for key in [key for key in self._models if key not in wanted]:
            self._remove(self._models.pop(key))
            self._specs.pop(key, None)
        for key, process in wanted.items():
            spec = process.spec.to_dict()
            if key not in self._models:
                self._models[key] = self._model(opened, key, spec)
            elif spec != self._specs.get(key):  # an unchanged one is left alone, whatever it is at
                self._models[key].revise(spec)
            self._specs[key] = spec
        self._tell_change()

    def _serve(self, pool: OmniPool) -> OpenedPool:
        assert self._spawner is not None
        if self._opened is not None and self._pool is not None and self._pool.spec == pool.spec:
            return self._opened
        self._machine = self._machine or Machine.now()  # later, what is held would count as missing
        found = self._supply(pool, self._machine)
        refusal = too_weak(pool, self._spawner.reached)
        if self._opened is None:
            try:
                self._opened = OpenedPool.open(
                    pool,
                    found,
                    self.layout.root,
                    self._spawner,
                    least_device_bytes=self._adoption.device_bytes,
                    events=self.events,
                    doubt=self._doubt_published,
                    tell_lost=lambda error: self._warn(str(error.reason), str(error)),
                    changed=self._tell_change,
                )
            except OmniError as error:
                self._refuse(pool, error)
                raise
            self.layout = self._opened.layout
            self._keep_house(self._opened)
        else:
            self._opened.devices.resize(found.budgets, found.host_bytes)
        self._pool, self._refusal = pool, refusal
        note = "; ".join(self._opened.without_effect(pool, found))
        if note and note != self._note:
            self._warn(str(Reason.WITHOUT_EFFECT), note)
        self._note = note
        return self._opened

    def _supply(self, pool: OmniPool, machine: Machine) -> Supply:
        try:
            return supply(pool, machine)
        except OmniError as error:
            if self._opened is None:
                self._refuse(pool, error)
            raise

    def _refuse(self, pool: OmniPool, error: OmniError) -> None:
        self._pool, self._refusal = pool, error
        self._tell_change()

    def _keep_house(self, opened: OpenedPool) -> None:
        keeping, devices = opened.preparation.housekeeping, opened.devices
        keeping.needs = lambda: needs_of(
            self._models.values(), self._specs.values(), devices.instances.values(), opened.supply.forms
        )
        keeping.tell = lambda gone: self.events.add("OmniPool", "", self._pool_name, "Pruned", removed_words(gone))

    def _doubt_published(self, error: OmniError) -> None:
        """Say once that something in a store of others cannot be used."""
        if str(error) not in self._doubted:
            self._doubted.add(str(error))
            self._warn(str(error.reason), str(error))

    def _warn(self, reason: str, message: str) -> None:
        self.events.add("OmniPool", "", self._pool_name, reason, message, warning=True)

    @property
    def _devices(self) -> Devices:
        assert self._opened is not None
        return self._opened.devices

    @property
    def _pool_name(self) -> str:
        return self._pool.metadata.name if self._pool else ""

    def _model(self, opened: OpenedPool, key: str, spec: dict[str, Any]) -> Model:
        leaving = any(task.get_name() == f"remove {key}" for task in self._background)
        instance = self._instance(spec, f"{key}@{next(self._revisions)}" if leaving else key)
        first = opened.devices.first  # processes outlive their agent where there is no other
        if self._adoption.adopt(key, instance, first.moves):
            opened.devices.add(instance, first.memory.device.name)
        return Model(
            key,
            instance,
            make=lambda newer: self._instance(newer, f"{key}@{next(self._revisions)}"),
            devices=opened.devices,
            preparation=opened.preparation,
            layout=self.layout,
            changed=self._tell_change,
        )

    def _instance(self, spec: dict[str, Any], name: str) -> Instance:
        instance = Instance(
            name,
            spec,
            spawn=self._spawn,
            changed=lambda: self._devices.kick(instance),
            on_exit=self._exited,
            keep=self._provide,
        )
        instance.context_bytes = self._devices.of(instance).memory.device.context_bytes
        return instance

    def _provide(self, instance: Instance) -> None:
        on_host = self._devices.on_host  # who wrote last into frames of a GPU, no later agent could say
        if on_host and self._store is not None and self._spawner is not None and instance.process is not None:
            self._spawner.keep(instance.process, served_by(instance), instance.mapped or ())

    def _exited(self, instance: Instance, error: OmniError | None) -> None:
        self._devices.of(instance).moves.on_exit(instance, error)
        model = self._models.get(f"{instance.namespace}/{instance.model}")
        if model is not None and error is not None and error.reason is Reason.OUT_OF_MEMORY:
            model.outgrown(instance)
        if model is not None and error is not None and error.reason is Reason.PROBE_FAILED:
            model.doubt(instance)

    def _remove(self, model: Model) -> None:
        task = asyncio.create_task(model.remove(), name=f"remove {model.key}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        namespace, name = model.key.split("/", 1)
        removed = "it was removed from the models that are served here"
        kept = "its image is kept until `omni prune`, or until the disk is short"
        self.events.add("OmniModel", namespace, name, "Removed", f"{removed}; {kept}")

    async def _spawn(self, instance: Instance) -> ModelProcess:
        assert self._spawner is not None
        assert instance.prepared is not None
        if self._refusal is not None:
            raise self._refusal
        own_bytes = instance.working_bytes if self._devices.on_host else _HOST_BYTES
        if instance.spec["engine"] in SLEEPERS:  # the weights are in its own memory while it sleeps
            own_bytes += instance.spec["deviceMemoryBytes"]
        memory_bytes = instance.spec["limits"]["memoryBytes"] or own_bytes
        request = serving_request(
            instance.subject,
            instance.spec,
            self.layout,
            instance.prepared,
            devices=instance.spread.devices,
            memory_bytes=memory_bytes,
            number=next(self._numbers),
        )
        return await self._spawner.spawn(request)

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """See `protocol.admin.Admin`."""
        instance = self._found(namespace, name).serving
        await self._devices.of(instance).orders.wake(instance, deadline_seconds)
        return {"tier": instance.tier, "wakeSeconds": instance.history.last_wake_seconds}

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """See `protocol.admin.Admin`."""
        instance = self._found(namespace, name).serving
        if instance.residency.keep_resident:
            raise DispatchError(
                instance.subject,
                "its manifest says residency.keepResident",
                "remove that first",
                reason=Reason.SHARES_WITH_KEPT,
                status=409,
            )
        await self._devices.of(instance).orders.evict(instance, deadline_seconds, "evicted by hand")
        return {"tier": instance.tier, "evictSeconds": instance.history.last_evict_seconds}

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        """See `protocol.admin.Admin`."""
        return removed(await self._opened.preparation.housekeeping.prune(dry_run=dry_run) if self._opened else [])

    def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """See `protocol.admin.Admin`."""
        self._found(namespace, name)
        return follow_log(self.layout.log(namespace, name), tail=tail, follow=follow)

    def _found(self, namespace: str, name: str) -> Model:
        model = self._models.get(f"{namespace}/{name}")
        if model is None:
            raise _unknown(f"{namespace}/{name}")
        return model

    # What a gateway asks (`protocol.dispatch.Backend`)

    def models(self) -> Sequence[ModelCard]:
        """Every model, in the order of their names."""
        return [model.card() for _, model in sorted(self._models.items())]

    def open(self, request: InferenceRequest) -> AbstractAsyncContextManager[InferenceResponse]:
        """See `protocol.dispatch.Backend`."""
        return self.ingress.open(request)

    def estimate(self, model: str) -> Estimate:
        """See `protocol.dispatch.Backend`."""
        return self.ingress.estimate(model)

    def _serving(self, name: str) -> Instance:
        model = self._models.get(name if "/" in name else f"default/{name}")
        if model is None:
            raise _unknown(name)
        return model.serving

    # What is reported

    def report(self) -> AgentReport:
        """Everything at this moment."""
        return AgentReport(self._pool_report(), tuple(model.report() for _, model in sorted(self._models.items())))

    def _pool_report(self) -> PoolReport:
        reached = self._spawner.reached if self._spawner else None
        opened, name = self._opened, self._pool_name
        level, missing = (str(reached.level), reached.missing) if reached else ("", ())
        refusal = self._refusal
        reason, why = (str(refusal.reason), f"{refusal.subject}: {refusal.advice}") if refusal else ("", "")
        if opened is None:
            return PoolReport(
                pool=name, node=self._node, device="", budget_bytes=0, resident_bytes=0, promised_bytes=0,
                working_bytes=0, free_bytes=0, host_budget_bytes=0, host_bytes=0, arena_bytes=0, footprint_bytes=0,
                isolation_level=level, isolation_missing=missing, ready=False, reason=reason, message=why,
            )  # fmt: skip
        devices = opened.devices.reports()
        problems = "; ".join(f"{device.name}: {device.problem}" for device in devices if device.problem)
        if refusal is None and not opened.devices.usable:
            reason, why = str(Reason.DEVICE_LOST), problems
        memory = opened.devices.first.memory
        memory.arena.follow()
        room = opened.preparation.room
        footprint_bytes = sum(
            model.serving.weights_bytes + model.serving.working_bytes * model.serving.spread.count
            for model in self._models.values()
            if model.serving.measured
        )
        return PoolReport(
            pool=name,
            node=self._node,
            device=devices[0].name if len(devices) == 1 else f"{devices[0].name} to {devices[-1].name}",
            budget_bytes=sum(device.budget_bytes for device in devices),
            resident_bytes=sum(device.resident_bytes for device in devices),
            promised_bytes=sum(device.promised_bytes for device in devices),
            working_bytes=sum(device.working_bytes for device in devices),
            free_bytes=sum(device.free_bytes for device in devices),
            host_budget_bytes=memory.ledger.host.capacity_bytes,
            host_bytes=memory.ledger.host.held_bytes(),
            arena_bytes=memory.arena.held_bytes,
            footprint_bytes=footprint_bytes,
            isolation_level=level,
            isolation_missing=missing,
            ready=not reason,
            reason=reason,
            message=why or "; ".join(filter(None, [problems, memory.device.pinning, self._note])),
            store_path=str(self.layout.kept),
            store_bytes=room.capacity_bytes,
            store_free_bytes=room.free_bytes,
            context_bytes=sum(device.context_bytes for device in devices),
            power_watts=sum(device.power_watts for device in devices),
            energy_joules=sum(device.energy_joules for device in devices),
            devices=devices if len(devices) > 1 else (),
        )

    async def wait_changed(self) -> None:
        """Return when the report may have changed since the last call."""
        await self._changed.wait()
        self._changed.clear()
        await asyncio.sleep(_REPORT_SECONDS)

    def _tell_change(self) -> None:
        self._changed.set()


def _unknown(name: str) -> DispatchError:
    return DispatchError(
        f"OmniModel {name}", "there is no such model", "see omni get models", reason=Reason.MODEL_NOT_FOUND, status=404
    )
