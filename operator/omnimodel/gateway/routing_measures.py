"""Prometheus metrics of routing. Labels are names of pods that there are, and words of fixed lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class _Seat(Protocol):
    @property
    def label(self) -> str: ...
    @property
    def there(self) -> bool: ...
    @property
    def open_total(self) -> int: ...


class RoutingMeasures:
    """All metrics of one routing backend.

    Args:
        registry: what /metrics shows.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self.routed = Counter(
            "omni_routed_requests",
            "Requests by agent and by how it stood to the model when it was chosen.",
            ["agent", "standing"],
            registry=registry,
        )
        self.retries = Counter(
            "omni_routing_retries",
            "Requests that an agent did not give to its model and that went on elsewhere or ended.",
            ["reason"],
            registry=registry,
        )
        self.seats: Mapping[str, _Seat] = {}
        self.held: Mapping[str, int] = {}
        registry.register(_Table(self))

    def forget(self, agent: str) -> None:
        """Drop the series of an agent that is gone."""
        self.routed.remove_by_labels({"agent": agent})


class _Table(Collector):
    """The table of agents, read when the metrics are scraped."""

    def __init__(self, measures: RoutingMeasures) -> None:
        self._measures = measures

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("omni_agent_up", "Whether an agent is in the routing table.", labels=["agent"])
        running = GaugeMetricFamily("omni_agent_requests", "Requests of this gateway on an agent.", labels=["agent"])
        for seat in self._measures.seats.values():
            up.add_metric([seat.label], float(seat.there))
            running.add_metric([seat.label], float(seat.open_total))
        held = GaugeMetricFamily("omni_requests_without_agent", "Requests held because no agent has their model.")
        held.add_metric([], float(sum(self._measures.held.values())))
        yield from (up, running, held)
