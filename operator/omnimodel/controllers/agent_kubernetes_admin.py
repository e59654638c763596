"""The admin endpoints of one agent's pod (`protocol.admin.Admin`): its own models, its pool, its processes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from omnimodel.api import OmniPool, OmniProcess
from omnimodel.api.meta import API_VERSION
from omnimodel.controllers.agent_kubernetes import PodController
from omnimodel.controllers.local import LocalAgent
from omnimodel.controllers.pool_status import pool_status
from omnimodel.controllers.status import model_status, process_status
from omnimodel.protocol.admin import Event
from omnimodel.protocol.report import AgentReport, ModelReport


class PodAdmin:
    """See the module.

    Args:
        agent: of this pod.
        controller: knows what is assigned to it.
        wall: Unix time.
    """

    def __init__(self, agent: LocalAgent, controller: PodController, wall: Callable[[], float] = time.time) -> None:
        self._agent = agent
        self._controller = controller
        self._wall = wall
        self._before: dict[str, Mapping[str, Any]] = {}

    def objects(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Whole objects of a kind, as far as this pod knows them, in the order of their names."""
        applied = self._controller.applied
        if applied is None:
            return [self._unknown_pool()] if kind == "OmniPool" else []
        report = self._controller.report()
        told = {f"{model.namespace}/{model.name}": model for model in report.models}
        match kind:
            case "OmniModel":
                here = {process.key for process in applied.processes}
                self._before = {key: said for key, said in self._before.items() if not key or key in here}
                return [self._model(process, told.get(process.key)) for process in applied.processes]
            case "OmniPool":
                return [self._pool(applied.pool, report, len(applied.processes))]
            case "OmniProcess":
                return [
                    {**process.to_dict(), "status": process_status(told.get(process.key))}
                    for process in applied.processes
                ]
            case _:
                return []

    def _model(self, process: OmniProcess, report: ModelReport | None) -> Mapping[str, Any]:
        spec = process.spec
        status = model_status(
            generation=spec.generation,
            pod=self._controller.pod.name,
            report=report,
            refusal=None,
            suspended=spec.suspend,
            before=self._before.get(process.key, {}),
            now_seconds=self._wall(),
            served_names=[name.name for name in spec.served_names],
        )
        self._before[process.key] = status
        return {
            "apiVersion": API_VERSION,
            "kind": "OmniModel",
            "metadata": {
                "name": spec.model.name,
                "namespace": spec.model.namespace,
                "uid": spec.model.uid,
                "generation": spec.generation,
            },
            "spec": {"pool": spec.pool, "runtime": {"engine": spec.engine, "task": spec.task}},
            "status": status,
        }

    def _pool(self, pool: OmniPool, report: AgentReport, models: int) -> Mapping[str, Any]:
        status = pool_status(
            generation=pool.metadata.generation,
            report=report.pool if self._controller.settled else None,
            models=models,
            refusal=None,
            before=self._before.get("", {}),
            now_seconds=self._wall(),
        )
        self._before[""] = status
        return {**pool.to_dict(), "status": status}

    def _unknown_pool(self) -> Mapping[str, Any]:
        """Its pool before anything is known of it."""
        identity = self._controller.pod
        pool = OmniPool.model_validate({"metadata": {"name": identity.pool, "namespace": identity.pool_namespace}})
        status = pool_status(
            generation=0, report=None, models=0, refusal=None, before=self._before.get("", {}), now_seconds=self._wall()
        )
        self._before[""] = status
        return {**pool.to_dict(), "status": status}

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Make a model resident and wait for it."""
        return await self._agent.wake(namespace, name, deadline_seconds)

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Drain a model and free its device bytes."""
        return await self._agent.evict(namespace, name, deadline_seconds)

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        """Remove what no model of this pod needs."""
        return await self._agent.prune(dry_run=dry_run)

    def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """What the model's process printed."""
        return self._agent.logs(namespace, name, tail=tail, follow=follow)

    def events(self, *, follow: bool) -> AsyncIterator[Event]:
        """What happened."""
        return self._agent.events.follow(follow=follow)

    def status_lines(self) -> Mapping[str, Any]:
        """State of the whole: what could not be given to the agent, and what is being worked on."""
        activity = [
            {"model": f"{model.namespace}/{model.name}", "phase": model.phase, "progress": model.progress}
            for model in self._agent.report().models
            if model.phase not in {"serving", "idle", "failed", "suspended"}
        ]
        errors = [{"message": str(error)} for error in self._controller.refused.values()]
        return {
            "errors": errors,
            "activity": activity,
            "settled": not activity,
            "apiServer": {
                "synced": self._controller.synced,
                "ageSeconds": round(self._controller.age_seconds, 1),
                "writes": self._controller.writer.writes,
            },
        }
