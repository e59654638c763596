"""Prometheus metrics of the gateway, and of the models as the running system reports them.

Labels are names of models of the catalogue and of nothing else, whatever clients type: a name that is not served has
the label `-`, and a model that is gone loses its series.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from omnimodel.protocol.admin import Admin
from omnimodel.protocol.dispatch import Backend

NO_MODEL = "-"
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Held:
    """The requests that wait for their model, each with the time it began."""

    def __init__(self) -> None:
        self._since: dict[str, dict[object, float]] = {}

    def enter(self, model: str) -> object:
        """A request begins to wait; the ticket is for `leave`."""
        ticket = object()
        self._since.setdefault(model, {})[ticket] = time.monotonic()
        return ticket

    def leave(self, model: str, ticket: object) -> None:
        """It waits no longer; to be called once or more."""
        tickets = self._since.get(model)
        if tickets is not None and tickets.pop(ticket, None) is not None and not tickets:
            del self._since[model]

    def oldest_seconds(self) -> dict[str, float]:
        """Age of the oldest waiter of each model that has one."""
        now = time.monotonic()
        return {model: now - min(tickets.values()) for model, tickets in self._since.items()}

    def counts(self) -> dict[str, int]:
        """How many wait, by model."""
        return {model: len(tickets) for model, tickets in self._since.items()}


class Measures:
    """All metrics; `registry` is what /metrics shows.

    Args:
        registry: that of the process, when others put metrics there too.
        backend, admin: asked when the metrics are read.
    """

    def __init__(self, registry: CollectorRegistry, backend: Backend, admin: Admin) -> None:
        self.registry = registry
        self.held = Held()
        self.requests = Counter(
            "omni_requests", "Requests by model and how they ended.", ["model", "outcome"], registry=registry
        )
        self.wait = Histogram(
            "omni_request_wait_seconds",
            "How long requests were held until their model took them.",
            ["model"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.running = Gauge(
            "omni_requests_open",
            "Requests from their first byte to the last of the answer.",
            ["model"],
            registry=registry,
        )
        self._backend = backend
        self._seen: set[str] = set()
        registry.register(_Reported(admin, self.held))

    def ended(self, model: str, outcome: str) -> None:
        """Count one request."""
        self._seen.add(model)
        self.requests.labels(model, outcome).inc()

    def forget_gone_models(self) -> None:
        """Drop the series of models that are no longer in the catalogue."""
        there = {card.name for card in self._backend.models()} | {NO_MODEL}
        for model in self._seen - there:
            for metric in (self.requests, self.wait, self.running):
                metric.remove_by_labels({"model": model})
        self._seen &= there


class _Reported(Collector):
    """What the status of models and pools says, as metrics; read when they are scraped."""

    def __init__(self, admin: Admin, held: Held) -> None:
        self._admin = admin
        self._held = held

    def collect(self) -> Iterable[Metric]:
        oldest = GaugeMetricFamily("omni_oldest_waiter_seconds", "Age of the oldest held request.", labels=["model"])
        for model, seconds in self._held.oldest_seconds().items():
            oldest.add_metric([model], seconds)
        waiting = GaugeMetricFamily("omni_requests_held", "Requests that wait for their model.", labels=["model"])
        for model, count in self._held.counts().items():
            waiting.add_metric([model], count)
        yield from (oldest, waiting, *self._models(), *self._pools())

    def _models(self) -> Iterable[Metric]:
        tiers: dict[str, int] = dict.fromkeys(("resident", "warm", "parked", "cold"), 0)
        tier_bytes = dict.fromkeys([(t, m) for t in tiers for m in ("device", "host")], 0)
        swaps = CounterMetricFamily(
            "omni_swaps", "Wakes and evictions by model, pod and cause.", labels=["model", "pod", "cause"]
        )
        wake = GaugeMetricFamily("omni_last_wake_seconds", "How long the last wake took.", labels=["model", "pod"])
        rate = GaugeMetricFamily(
            "omni_last_wake_bytes_per_second", "At which the last wake copied.", labels=["model", "pod"]
        )
        waking = CounterMetricFamily("omni_wake_seconds", "How long wakes took in all.", labels=["model", "pod"])
        tokens = CounterMetricFamily(
            "omni_model_tokens", "Tokens that a model has computed.", labels=["model", "pod", "kind"]
        )
        held_by = GaugeMetricFamily("omni_model_bytes", "Bytes a model holds.", labels=["model", "pod", "memory"])
        for item in self._admin.objects("OmniModel"):
            name = _name(item)
            for pod, entry in _by_pod(item).items():
                tier = str(entry.get("tier", "cold"))
                tiers[tier] = tiers.get(tier, 0) + 1
                for memory in ("device", "host"):
                    held_bytes = int(entry.get(f"{memory}Bytes") or 0)
                    tier_bytes[tier, memory] = tier_bytes.get((tier, memory), 0) + held_bytes
                    held_by.add_metric([name, pod, memory], held_bytes)
                for cause, count in _swaps(entry).items():
                    swaps.add_metric([name, pod, cause], count)
                for kind in ("prompt", "generated"):
                    if entry.get(f"{kind}Tokens") is not None:
                        tokens.add_metric([name, pod, kind], float(entry[f"{kind}Tokens"]))
                if entry.get("lastWakeSeconds"):
                    wake.add_metric([name, pod], float(entry["lastWakeSeconds"]))
                    rate.add_metric([name, pod], float(entry.get("lastWakeBytesPerSecond") or 0))
                    waking.add_metric([name, pod], float(entry.get("wakeSeconds") or 0))
        by_tier = GaugeMetricFamily("omni_models", "Models by tier.", labels=["tier"])
        held = GaugeMetricFamily("omni_tier_bytes", "Bytes that models of a tier hold.", labels=["tier", "memory"])
        for tier, count in tiers.items():
            by_tier.add_metric([tier], count)
        for (tier, memory), held_bytes in tier_bytes.items():
            held.add_metric([tier, memory], held_bytes)
        return by_tier, held, held_by, swaps, tokens, wake, waking, rate

    def _pools(self) -> Iterable[Metric]:
        size = GaugeMetricFamily("omni_pool_bytes", "Device bytes of a pool.", labels=["pool", "kind"])
        ratio = GaugeMetricFamily("omni_pool_overcommit_ratio", "Sum of footprints / budget.", labels=["pool"])
        power = GaugeMetricFamily("omni_device_power_watts", "What a device draws.", labels=["pool", "device"])
        energy = CounterMetricFamily(
            "omni_device_energy_joules",
            "What a device has used since its driver was loaded.",
            labels=["pool", "device"],
        )
        for item in self._admin.objects("OmniPool"):
            name, status = _name(item), item.get("status") or {}
            for kind in ("budget", "resident", "promised", "working", "context", "free"):
                if status.get(f"{kind}Bytes") is not None:
                    size.add_metric([name, kind], float(status[f"{kind}Bytes"]))
            if status.get("overcommitRatio") is not None:
                ratio.add_metric([name], float(status["overcommitRatio"]))
            for device, drawn in _devices(status):
                if drawn.get("powerWatts") is not None:
                    power.add_metric([name, device], float(drawn["powerWatts"]))
                    energy.add_metric([name, device], float(drawn.get("energyJoules") or 0))
        return size, ratio, power, energy


def _devices(status: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Each device of a pool by its name, with what is said of it."""
    several = [(str(device["name"]), device) for device in status.get("perDevice") or ()]
    return several or [(str(status.get("device") or ""), status)]


def _name(item: Mapping[str, Any]) -> str:
    """As a card has it: with the namespace unless that is `default`."""
    namespace, name = str(item["metadata"].get("namespace") or "default"), str(item["metadata"]["name"])
    return name if namespace == "default" else f"{namespace}/{name}"


def _by_pod(item: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """What each pod says; one machine has no name for itself."""
    return {str(entry.get("pod") or ""): entry for entry in (item.get("status") or {}).get("residency") or ()}


def _swaps(entry: Mapping[str, Any]) -> Mapping[str, float]:
    """Swaps by cause where the agent tells the causes, else in all."""
    swaps = entry.get("swaps")
    if isinstance(swaps, Mapping):
        return {str(cause): float(count) for cause, count in swaps.items()}
    found = {"wake": entry.get("wakes"), "evict": entry.get("evictions")}
    return {cause: float(count) for cause, count in found.items() if count}
