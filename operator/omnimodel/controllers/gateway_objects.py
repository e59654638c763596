"""Objects as a gateway shows them: made of what its agents say, or the API server's with the agents' newest word.

Status in the API server is written on transitions only; what a person watches with `omni top` is fresher than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omnimodel.api.meta import API_VERSION
from omnimodel.controllers.pool_status import pod_entry, pool_report, pool_status
from omnimodel.controllers.status import model_status, process_status, residency_entry, spokesman
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.protocol.dispatch import ModelCard
from omnimodel.protocol.ingress import Snapshot, key_of
from omnimodel.protocol.report import ModelReport


class AgentObjects:
    """Objects without an API server: what the agents say there is.

    Args:
        backend: its agents.
        wall: Unix time.
    """

    def __init__(self, backend: RoutingBackend, wall: Callable[[], float] = time.time) -> None:
        self._backend = backend
        self._wall = wall
        self._before: dict[str, Mapping[str, Any]] = {}

    def __call__(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Whole objects of a kind, in the order of their names."""
        match kind:
            case "OmniModel":
                found = list(self._models())
            case "OmniPool":
                found = list(self._pools())
            case "OmniProcess":
                found = list(processes(self._backend))
            case _:
                found = []
        return found

    def _models(self) -> Iterator[dict[str, Any]]:
        by_key = reports(self._backend)
        cards = {key_of(card): card for card in self._backend.models()}
        self._before = {key: status for key, status in self._before.items() if key in cards or key.startswith("pool ")}
        for key, card in cards.items():
            told = by_key.get(key, {})
            generation = max((report.generation for report in told.values()), default=1)
            status = model_status(
                generation=generation,
                pod="",
                report=spokesman(list(told.values()), generation),
                refusal=None,
                suspended=False,
                before=self._before.get(key, {}),
                now_seconds=self._wall(),
                served_names=card.served_names,
            )
            status["residency"] = [residency_entry(pod, report) for pod, report in told.items()]
            self._before[key] = status
            yield _object("OmniModel", key, _spec(card, self._pool_of(key)), status, generation)

    def _pool_of(self, key: str) -> str:
        return next((snapshot.pool.pool for _, snapshot in _snapshots(self._backend) if key in snapshot.cards), "")

    def _pools(self) -> Iterator[dict[str, Any]]:
        pools: dict[str, list[tuple[str, Snapshot]]] = {}
        for pod, snapshot in _snapshots(self._backend):
            pools.setdefault(snapshot.pool.pool, []).append((pod, snapshot))
        for name, members in sorted(pools.items()):
            entries = [pod_entry(pod, snapshot.pool) for pod, snapshot in members]
            status = pool_status(
                generation=1,
                report=pool_report(name, entries),
                models=len({key for _, snapshot in members for key in snapshot.cards}),
                refusal=None,
                before=self._before.get(f"pool {name}", {}),
                now_seconds=self._wall(),
            )
            status["pods"] = entries
            self._before[f"pool {name}"] = status
            yield _object("OmniPool", f"default/{name}", {}, status, 1)


def processes(backend: RoutingBackend) -> Iterator[dict[str, Any]]:
    """One object for each model's process on each agent, as the agents say."""
    for key, told in sorted(reports(backend).items()):
        for pod, report in told.items():
            if report.process is not None:
                yield _object("OmniProcess", key, {}, {**process_status(report), "pod": pod}, report.generation)


def reports(backend: RoutingBackend) -> Mapping[str, dict[str, ModelReport]]:
    """What each agent says of each model: by `namespace/name`, then by pod."""
    found: dict[str, dict[str, ModelReport]] = {}
    for pod, snapshot in _snapshots(backend):
        for key, report in snapshot.models.items():
            found.setdefault(key, {})[pod] = report
    return found


def refreshed(item: Mapping[str, Any], told: Mapping[str, ModelReport]) -> Mapping[str, Any]:
    """An OmniModel of the API server with the newest word of the agents that answer this gateway."""
    if not told:
        return item
    status = item.get("status") or {}
    entries = [told_entry for told_entry in status.get("residency") or () if told_entry.get("pod") not in told]
    entries += [residency_entry(pod, report) for pod, report in told.items()]
    entries.sort(key=lambda entry: str(entry["pod"]))
    return {**item, "status": {**status, "residency": entries}}


def _snapshots(backend: RoutingBackend) -> Iterator[tuple[str, Snapshot]]:
    for seat in backend.seats.values():
        if seat.snapshot is not None:
            yield seat.agent.name, seat.snapshot


def _spec(card: ModelCard, pool: str) -> dict[str, Any]:
    return {"pool": pool, "runtime": {"task": card.task}}


def _object(kind: str, key: str, spec: Mapping[str, Any], status: Mapping[str, Any], generation: int) -> dict[str, Any]:
    namespace, name = key.split("/", 1)
    metadata = {"name": name, "namespace": namespace, "generation": generation}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec, "status": status}
