"""The controller of one machine: manifests of a folder in, desired processes to an agent, status out.

One task reconciles; the folder's watcher and the agent only ring its bell. Every round works on a snapshot: what the
folder says, what the agent reports, and what was decided before. It can be run again at any time with the same result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from omnimodel.api import OmniModel, OmniPool, OmniProcess, ProcessSpec, Resource
from omnimodel.catalog import Catalog, watch
from omnimodel.controllers.local_backend import RefusedModel
from omnimodel.controllers.local_snapshot import Desired, Snapshot, decide, other_pool
from omnimodel.controllers.local_state import IdentityFile
from omnimodel.controllers.pool_status import pool_status
from omnimodel.controllers.status import model_status, process_status
from omnimodel.errors import ManifestError, OmniError, Reason
from omnimodel.protocol.admin import Event
from omnimodel.protocol.report import AgentReport, ModelReport
from omnimodel.render import files_of_sources, fill_secrets

log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0)


class Events(Protocol):
    """A log of events that can be added to and followed."""

    def add(self, kind: str, namespace: str, name: str, reason: str, message: str, *, warning: bool = False) -> None:
        """Record an event of one object."""

    def follow(self, *, follow: bool) -> AsyncIterator[Event]:
        """The events there are, then, with `follow`, those to come."""


class LocalAgent(Protocol):
    """What the controller needs of an agent in the same process."""

    @property
    def events(self) -> Events:
        """What happened."""

    async def attach(self, files: Mapping[str, bytes]) -> None:
        """Put the files that the pool's sources refer to where fetches look for them."""

    async def apply(self, processes: Sequence[OmniProcess], pool: OmniPool) -> None:
        """Make these processes, and no others, the ones that are kept available. Returns before they are."""

    def report(self) -> AgentReport:
        """Everything at this moment."""

    async def wait_changed(self) -> None:
        """Return when the report may have changed since the last call."""

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """See `protocol.admin.Admin`."""

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """See `protocol.admin.Admin`."""

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        """See `protocol.admin.Admin`."""

    def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """See `protocol.admin.Admin`."""


class LocalController:
    """Reconciles one folder with one agent, and answers for both (`protocol.admin.Admin`).

    Args:
        folder: of the manifests.
        agent: started already.
        identities: uids and generations of the folder's objects.
        pool: the pool this machine serves; empty for the only one, or `default`.
        memory: device budget that replaces the pool's own; None to leave it.
        wall: Unix time.
    """

    def __init__(
        self,
        folder: Path,
        agent: LocalAgent,
        identities: IdentityFile,
        *,
        pool: str = "",
        memory: int | str | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._agent = agent
        self._identities = identities
        self._pool = pool
        self._memory = memory
        self._wall = wall
        self._catalog: Catalog | None = None
        self._desired: Desired | None = None
        self._footprints: dict[str, int] = {}
        self._applied: object = None
        self._attached: Mapping[str, bytes] | None = None
        self._untold = ""
        self._told: set[tuple[str, str]] = set()
        self._before: dict[str, Mapping[str, Any]] = {}
        self._bell = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Reconcile until cancelled.

        Raises:
            OmniError: the first round could not be done: the pool is none of this folder or of this machine.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(), name="catalog-watch")
                tasks.create_task(self._follow_agent(), name="agent-follow")
                tasks.create_task(self._loop(), name="reconcile")
        except* OmniError as group:
            raise group.exceptions[0] from None

    async def _watch(self) -> None:
        async for catalog in watch(self._folder, identities=self._identities.read()):
            self._catalog = catalog
            counts = len(catalog.models), len(catalog.pools), len(catalog.errors)
            log.info("catalog read models=%d pools=%d errors=%d", *counts)
            self._bell.set()

    async def _follow_agent(self) -> None:
        while True:
            await self._agent.wait_changed()
            self._bell.set()

    async def _loop(self) -> None:
        failures = 0
        while True:
            await self._bell.wait()
            self._bell.clear()
            try:
                await self._reconcile()
                failures = 0
            except Exception as error:
                if self._applied is None and isinstance(error, OmniError):
                    raise
                # A fault of one round must not end the loop that repairs everything else.
                pause_seconds = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures += 1
                log.exception("reconcile failed pause_seconds=%.0f", pause_seconds)
                reason = error.reason if isinstance(error, OmniError) else Reason.INTERNAL
                self._tell("OmniPool", "", self._pool or "default", reason, str(error))
                asyncio.get_running_loop().call_later(pause_seconds, self._bell.set)
            self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_changed(self) -> None:
        """Return after the next round."""
        await self._changed.wait()

    async def _reconcile(self) -> None:
        if self._catalog is None:
            return
        report = self._agent.report()
        desired = decide(
            Snapshot(
                catalog=self._catalog,
                budgets={report.pool.pool: report.pool.budget_bytes},
                footprints=self._remember_footprints(report),
                pool=self._pool,
                memory=self._memory,
            )
        )
        self._identities.write(self._catalog.identities)
        self._desired = desired
        await self._attach(desired.pool)
        if desired.fingerprint != self._applied:
            filled = [_with_secrets(process, self._catalog) for process in desired.processes]
            await self._agent.apply(filled, desired.pool)
            self._applied = desired.fingerprint
            log.info("applied processes=%d refused=%d", len(desired.processes), len(desired.refused))
        self._tell_news(desired)

    async def _attach(self, pool: OmniPool) -> None:
        """Give the agent what the pool's sources refer to; what is missing is told, and not there."""
        assert self._catalog is not None
        try:
            files = files_of_sources(pool, self._catalog.config(pool.metadata.namespace))
        except ManifestError as error:
            files = {}
            if self._untold != str(error):
                self._tell("OmniPool", "", pool.metadata.name, error.reason, str(error))
            self._untold = str(error)
        if files != self._attached:
            await self._agent.attach(files)
            self._attached = files

    def _remember_footprints(self, report: AgentReport) -> Mapping[str, int]:
        """Footprints as measured. Kept for models that are not assigned now, else they would come and go for ever."""
        for model in report.models:
            if model.working_bytes:  # weights alone are known before, and are not the whole
                key = f"{model.namespace}/{model.name}@{model.generation}"
                self._footprints[key] = model.weights_bytes + model.working_bytes
        return self._footprints

    def _tell_news(self, desired: Desired) -> None:
        """One event for each refusal, note and manifest error that was not there in the last round."""
        assert self._catalog is not None
        news: dict[tuple[str, str], tuple[str, str, str, str]] = {}
        for error in self._catalog.errors:
            news["", str(error)] = ("Manifest", "", error.file, error.reason)
        for model in desired.models:
            refusal = desired.refused.get(model.key)
            if refusal is not None and refusal.reason != Reason.SUSPENDED:
                news[model.key, refusal.message] = (
                    "OmniModel", model.metadata.namespace, model.metadata.name, refusal.reason,
                )  # fmt: skip
            for reason, message in desired.notes.get(model.key, ()):
                if reason != Reason.SIZE_UNKNOWN:
                    news[model.key, message] = ("OmniModel", model.metadata.namespace, model.metadata.name, reason)
        for key, (kind, namespace, name, reason) in news.items():
            if key not in self._told:
                self._tell(kind, namespace, name, reason, key[1])
        self._told = set(news)

    def _tell(self, kind: str, namespace: str, name: str, reason: str, message: str) -> None:
        self._agent.events.add(kind, namespace, name, str(reason), message, warning=True)

    def refused(self) -> Sequence[RefusedModel]:
        """Models that have no process here, for `LocalBackend`."""
        desired = self._desired
        if desired is None:
            return []
        return [
            RefusedModel(model, desired.refused[model.key], desired.plan.served_names.get(model.key, ()))
            for model in desired.models
            if model.key in desired.refused
        ]

    # protocol.admin.Admin

    def objects(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Whole objects of a kind, in the order of their names."""
        desired = self._desired
        if desired is None:
            return []
        report = self._agent.report()
        subjects = {item.subject for item in (*desired.models, *desired.pools)}
        self._before = {subject: status for subject, status in self._before.items() if subject in subjects}
        by_key = {f"{model.namespace}/{model.name}": model for model in report.models}
        match kind:
            case "OmniModel":
                found = [self._model(model, by_key.get(model.key), desired, report) for model in desired.models]
            case "OmniPool":
                found = [self._pool_object(pool, desired, report) for pool in desired.pools]
            case "OmniProcess":
                found = [_whole(process, process_status(by_key.get(process.key))) for process in desired.processes]
            case _:
                found = []
        return sorted(found, key=lambda item: (item["metadata"].get("namespace", ""), item["metadata"]["name"]))

    def _model(
        self, model: OmniModel, model_report: ModelReport | None, desired: Desired, report: AgentReport
    ) -> dict[str, Any]:
        status = model_status(
            generation=model.metadata.generation,
            pod=report.pool.node,
            report=model_report,
            refusal=desired.refused.get(model.key),
            suspended=model.spec.suspend,
            before=self._before.get(model.subject, {}),
            now_seconds=self._wall(),
            notes=desired.notes.get(model.key, ()),
            served_names=desired.plan.served_names.get(model.key, ()),
        )
        self._before[model.subject] = status
        return _whole(model, status)

    def _pool_object(self, pool: OmniPool, desired: Desired, report: AgentReport) -> dict[str, Any]:
        name = pool.metadata.name
        served = name == desired.pool.metadata.name
        assigned = [model for model in desired.models if model.spec.pool == name and model.key not in desired.refused]
        refusal = None if served else other_pool(name, desired.pool)
        status = pool_status(
            generation=pool.metadata.generation,
            report=report.pool if served else None,
            models=len(assigned),
            refusal=refusal,
            before=self._before.get(pool.subject, {}),
            now_seconds=self._wall(),
        )
        self._before[pool.subject] = status
        return _whole(pool, status)

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Make a model resident and wait for it."""
        self._check_has_process(namespace, name)
        return await self._agent.wake(namespace, name, deadline_seconds)

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Drain a model and free its device bytes."""
        self._check_has_process(namespace, name)
        return await self._agent.evict(namespace, name, deadline_seconds)

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        """Remove what no model here needs."""
        return await self._agent.prune(dry_run=dry_run)

    def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """What the model's process printed."""
        self._check_has_process(namespace, name)
        return self._agent.logs(namespace, name, tail=tail, follow=follow)

    def _check_has_process(self, namespace: str, name: str) -> None:
        """Refuse a model that is there and has no process, with the reason for that.

        Raises:
            DispatchError: it has none.
        """
        key = f"{namespace}/{name}"
        if any(f"{model.namespace}/{model.name}" == key for model in self._agent.report().models):
            return
        for refused in self.refused():
            if refused.model.key == key:
                raise refused.error(409)

    def events(self, *, follow: bool) -> AsyncIterator[Event]:
        """What happened."""
        return self._agent.events.follow(follow=follow)

    def status_lines(self) -> Mapping[str, Any]:
        """`errors` of manifests, `activity` of models that are being worked on, `settled` (see `unsettled`)."""
        errors = self._catalog.errors if self._catalog is not None else ()
        activity = [
            {"model": f"{model.namespace}/{model.name}", "phase": model.phase, "progress": model.progress}
            for model in self._agent.report().models
            if model.phase not in {"serving", "idle", "failed", "suspended"}
        ]
        return {
            "errors": [_error_object(error) for error in errors],
            "activity": activity,
            "settled": not self.unsettled(),
        }

    def unsettled(self) -> list[str]:
        """Models that neither serve nor have failed yet; before the first round, the catalogue itself."""
        if self._desired is None:
            return ["the catalogue"]
        return [
            f"{item['metadata']['namespace']}/{item['metadata']['name']}"
            for item in self.objects("OmniModel")
            if any(c["type"] == "Reconciling" and c["status"] == "True" for c in item["status"]["conditions"])
        ]


def _whole(item: Resource, status: Mapping[str, Any]) -> dict[str, Any]:
    """An object as an API server would give it: with its namespace even where the manifest leaves it out."""
    body = item.to_dict()
    return {**body, "metadata": {**body["metadata"], "namespace": item.metadata.namespace}, "status": status}


def _with_secrets(process: OmniProcess, catalog: Catalog) -> OmniProcess:
    """The process with its secrets in it, for the agent alone; what is shown keeps the references."""
    spec = process.spec.to_dict()
    filled = fill_secrets(spec, catalog.secrets(process.metadata.namespace))
    return process if filled == spec else process.model_copy(update={"spec": ProcessSpec.model_validate(filled)})


def _error_object(error: ManifestError) -> dict[str, Any]:
    return {
        "file": error.file,
        "line": error.line,
        "field": error.field,
        "subject": error.subject,
        "problem": error.problem,
        "cure": error.cure,
        "reason": str(error.reason),
        "message": str(error),
    }
