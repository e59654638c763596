"""Whether the operator is alive, and its numbers: `/healthz`, `/readyz`, `/metrics`.

It is alive as long as its watches are. What a list or the answer to a write says must come back through the watch of
its kind and namespace; if it does not within three minutes, the watch is dead, whatever its connection says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omnimodel.controllers.kubernetes_cache import version_of
from omnimodel.kube import Calls, Kind, key_of

DEAF_SECONDS = 180.0
Watch = tuple[Kind, str]  # and the namespace; empty for all


class Hearing:
    """What each watch has to bring, and when it last brought anything.

    Args:
        namespaces: that have watches of their own; empty for one watch of a kind in all the cluster.
        clock: monotonic.
    """

    def __init__(self, namespaces: Collection[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._apart = bool(namespaces)
        self._clock = clock
        self._heard: dict[Watch, tuple[int, float]] = {}
        self._expected: dict[Watch, tuple[int, float]] = {}

    def heard(self, kind: Kind, item: Mapping[str, Any]) -> None:
        """A watch brought an object."""
        watch = self._watch(kind, item)
        newest = max(version_of(item), self._heard.get(watch, (0, 0.0))[0])
        self._heard[watch] = (newest, self._clock())
        expected = self._expected.get(watch)
        if expected is not None and newest >= expected[0]:
            del self._expected[watch]

    def expect(self, kind: Kind, item: Mapping[str, Any]) -> None:
        """There is this object, so its watch has to bring it."""
        watch, version = self._watch(kind, item), version_of(item)
        if version > self._heard.get(watch, (0, 0.0))[0] and watch not in self._expected:
            self._expected[watch] = (version, self._clock())

    def _watch(self, kind: Kind, item: Mapping[str, Any]) -> Watch:
        return kind, key_of(item)[0] if self._apart else ""

    def deaf(self) -> list[str]:
        """Watches that are dead."""
        now = self._clock()
        dead = (watch for watch, (_, since) in self._expected.items() if now - since > DEAF_SECONDS)
        return sorted(f"{kind.plural} in {namespace}" if namespace else kind.plural for kind, namespace in dead)

    def ages(self) -> Mapping[str, float]:
        """Seconds since a watch of each kind brought something, or first should have, by kind."""
        now = self._clock()
        newest: dict[str, float] = {}
        for (kind, _), (_, at) in self._heard.items():
            newest[kind.plural] = min(now - at, newest.get(kind.plural, now - at))
        for (kind, _), (_, since) in self._expected.items():
            newest.setdefault(kind.plural, now - since)
        return newest


class Numbers:
    """Metrics of the operator.

    Args:
        calls: of the client, by verb and plural.
        hearing: ages of the watches.
        depth: of the queue.
        leads: whether this one writes.
        objects: known objects by kind.
    """

    def __init__(
        self,
        calls: Calls,
        hearing: Hearing,
        depth: Callable[[], int],
        leads: Callable[[], bool],
        objects: Callable[[], Mapping[str, int]],
    ) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "omni_operator_reconcile_seconds",
            "Time of one round, by kind of object.",
            ["kind"],
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self.failures = Counter(
            "omni_operator_reconcile_failures", "Rounds that failed and are repeated.", ["kind"], registry=self.registry
        )
        Gauge("omni_operator_queue_depth", "Objects that wait for a round.", registry=self.registry).set_function(depth)
        Gauge("omni_operator_leader", "1 for the one that writes.", registry=self.registry).set_function(
            lambda: float(leads())
        )
        self.registry.register(_Live(calls, hearing, objects))

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _Live(Collector):
    """Numbers that others keep."""

    def __init__(self, calls: Calls, hearing: Hearing, objects: Callable[[], Mapping[str, int]]) -> None:
        self._calls = calls
        self._hearing = hearing
        self._objects = objects

    def collect(self) -> Iterable[Metric]:
        calls = CounterMetricFamily("omni_operator_api_calls", "Requests to the API server.", labels=["verb", "kind"])
        for (verb, kind), count in sorted(self._calls.items()):
            calls.add_metric([verb, kind], count)
        ages = GaugeMetricFamily(
            "omni_operator_watch_age_seconds", "Since the watch of a kind brought something.", labels=["kind"]
        )
        for kind, age_seconds in sorted(self._hearing.ages().items()):
            ages.add_metric([kind], age_seconds)
        objects = GaugeMetricFamily("omni_operator_objects", "Objects that are known.", labels=["kind"])
        for kind, count in sorted(self._objects().items()):
            objects.add_metric([kind], count)
        return [calls, ages, objects]


def health_application(numbers: Numbers, alive: Callable[[], str], ready: Callable[[], str]) -> web.Application:
    """The probes and the metrics.

    Args:
        numbers: to show.
        alive, ready: why not, as a sentence; empty when it is.
    """

    def probe(check: Callable[[], str]) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            why_not = check()
            return web.Response(text=why_not or "ok", status=503 if why_not else 200)

        return answer

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=numbers.page(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    application = web.Application()
    application.router.add_get("/healthz", probe(alive))  # type: ignore[arg-type]
    application.router.add_get("/readyz", probe(ready))  # type: ignore[arg-type]
    application.router.add_get("/metrics", metrics)
    return application
