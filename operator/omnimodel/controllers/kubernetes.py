"""The operator: kopf brings news of objects, one leader reconciles, everyone keeps a cache and answers probes.

kopf is used for `on.event` alone: it lists and watches, and its handlers only put objects into the cache. It never
writes. A fault of it ends the process, and the next one begins from what the cluster says.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from omnimodel.api.crd import SCHEMA_LABEL, SCHEMA_VERSION
from omnimodel.api.meta import API_VERSION
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.kubernetes_cache import POOL_LABEL, Cache, Key, version_of
from omnimodel.controllers.kubernetes_children import AgentSettings
from omnimodel.controllers.kubernetes_health import Hearing, Numbers, health_application
from omnimodel.controllers.kubernetes_kopf import SELECTORS, watch
from omnimodel.controllers.kubernetes_reconcile import Reconciler
from omnimodel.controllers.kubernetes_writes import Writer
from omnimodel.errors import OmniError, Reason
from omnimodel.kube import (
    DEFINITIONS,
    LEASES,
    MODELS,
    POOLS,
    PROCESSES,
    Election,
    Kind,
    Kube,
    KubeError,
    Recorder,
    key_of,
)

log = logging.getLogger(__name__)

WORKERS = 16
SWEEP_SECONDS = 300.0
CANARY_SECONDS = 60.0
WAIT_SECONDS = 5.0
STOP_SECONDS = 5.0
STORE_FULL = "database space exceeded"  # as etcd says it
STORE_CURE = "the API server's store is full: compact and defragment etcd, or give it more room, and disarm its alarm"
CANARY_LABELS = {POOL_LABEL: "", "omnimodel.io/canary": "true"}  # the first lets the watch of leases bring it


@dataclass(frozen=True)
class OperatorSettings:
    """How the operator runs.

    Args:
        identity: its own name; no two may have the same.
        namespace: its own.
        release: prefix of its Lease.
        namespaces: that it looks after; empty for all.
        port: of probes and metrics; 0 for any.
        agents: what pods of pools have.
        lease_seconds, renew_seconds, retry_seconds: of the election.
        sweep_seconds: between two full lists.
    """

    identity: str
    namespace: str = "default"
    release: str = "omnimodel"
    namespaces: tuple[str, ...] = ()
    port: int = 8711
    agents: AgentSettings = field(default_factory=AgentSettings)
    lease_seconds: float = 20.0
    renew_seconds: float = 12.0
    retry_seconds: float = 4.0
    sweep_seconds: float = SWEEP_SECONDS


class Operator:
    """See the module.

    Args:
        kube: the connection.
        settings: how it runs.
        on_lost: called when someone else leads; ends the process at once unless it is given.
    """

    def __init__(self, kube: Kube, settings: OperatorSettings, *, on_lost: Callable[[], object] | None = None) -> None:
        self._kube = kube
        self._on_lost = on_lost or end_process
        self._settings = settings
        self.cache = Cache()
        self.hearing = Hearing(settings.namespaces)
        self.election = Election(
            kube,
            settings.namespace,
            f"{settings.release}-operator",
            settings.identity,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.renew_seconds,
            retry_seconds=settings.retry_seconds,
        )
        writer = Writer(kube, self.cache, self.hearing, lambda: self.election.leads)
        recorder = Recorder(kube, "omni-operator", settings.identity)
        self.reconciler = Reconciler(kube, self.cache, writer, recorder, settings.agents, done=self._round_done)
        self.numbers = Numbers(
            kube.calls,
            self.hearing,
            lambda: self.reconciler.queue.depth,
            lambda: self.election.leads,
            lambda: {kind.plural: len(items) for kind, items in self.cache.items.items()},
        )
        self._synced = asyncio.Event()
        self._stop = asyncio.Event()
        self.waits_for = "the API server"
        self.port = 0

    def _round_done(self, kind: str, seconds: float, error: Exception | None) -> None:
        self.numbers.reconcile_seconds.labels(kind).observe(seconds)
        if error is not None:
            self.numbers.failures.labels(kind).inc()

    def stop(self) -> None:
        """End `run` in order."""
        self._stop.set()

    async def run(self) -> None:
        """Run until stopped by `stop` or by a signal.

        Raises:
            Exception: a watch failed for good; to be started anew.
        """
        runner = web.AppRunner(health_application(self.numbers, self._why_dead, self._why_not_ready), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "0.0.0.0", self._settings.port)  # noqa: S104 - the kubelet asks
        await site.start()
        self.port = runner.addresses[0][1]
        log.info("operator started identity=%s port=%d", self._settings.identity, self.port)
        stopping = asyncio.create_task(self._stop.wait())
        work = asyncio.create_task(self._run())
        try:
            await asyncio.wait({stopping, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            stopping.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work
            if self._stop.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await self.election.resign()
            await runner.cleanup()

    async def _run(self) -> None:
        await self._wait_for_definitions()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch(self._kube, self._settings.namespaces, self._heard), name="kopf")
                await self._sweep_until_done()
                self._synced.set()
                self.waits_for = ""
                tasks.create_task(self._elected(), name="election")
                tasks.create_task(self._sweeps(), name="sweep")
                tasks.create_task(self._canary(), name="canary")
                tasks.create_task(self.reconciler.nodes.run(), name="nodes")
                tasks.create_task(self._lead(), name="lead")
        except* OmniError as group:
            raise group.exceptions[0] from None

    async def _wait_for_definitions(self) -> None:
        """Wait until the API server has our kinds: a chart may bring them later than us."""
        told = ""
        while True:
            try:
                found = await self._kube.get_path(f"/apis/{API_VERSION}")
            except KubeError as error:
                why = f"the API server: {error.problem}"
            else:
                known = {resource["name"] for resource in (found or {}).get("resources") or ()}
                missing = sorted(kind.plural for kind in (MODELS, POOLS, PROCESSES) if kind.plural not in known)
                if not missing:
                    return
                cure = "install them with the chart, or kubectl apply --server-side -f crds/"
                why = f"the CRDs {', '.join(missing)}; {cure}"
            self.waits_for = why
            if why != told:
                log.warning("waiting for=%s", why)
                told = why
            await asyncio.sleep(WAIT_SECONDS)

    async def _elected(self) -> None:
        await self.election.run()
        self._on_lost()

    async def _lead(self) -> None:
        """What only the leader does."""
        await self.election.wait_elected()
        # What the last leader wrote in its last moments may not have come through the watches yet.
        await self._sweep_until_done()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.queue.run(WORKERS))
            tasks.create_task(self.reconciler.references.run())
            tasks.create_task(self.reconciler.tick())

    # News

    def _heard(self, kind: Kind, change: str | None, item: Mapping[str, Any]) -> None:
        self.hearing.heard(kind, item)
        if change == "DELETED":
            self._drop(kind, key_of(item), item["metadata"].get("uid", ""))
        else:
            self._put(kind, item)

    def _put(self, kind: Kind, item: Mapping[str, Any]) -> None:
        taken, before = self.cache.put(kind, item)
        if taken:
            self.reconciler.news.changed(kind, before, self.cache.items[kind][key_of(item)])

    def _drop(self, kind: Kind, key: Key, uid: str = "") -> None:
        known = self.cache.drop(kind, key, uid)
        if known is not None:
            self.reconciler.news.changed(kind, known, None)

    # Sweeping

    async def _sweep_until_done(self) -> None:
        failures = 0
        while True:
            try:
                await self.sweep()
            except KubeError as error:
                failures += 1
                self.waits_for = f"the API server: {error.problem}"
                log.warning("sweep failed failures=%d error=%s", failures, error)
                await asyncio.sleep(min(30.0, 0.5 * 2 ** min(failures, 6)))
            else:
                return

    async def _sweeps(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_seconds)
            await self._sweep_until_done()

    async def sweep(self) -> None:
        """List everything: what the watches missed is put right, and everything has a round.

        A deletion in a gap of a watch is told by nothing else.

        Raises:
            KubeError: a list could not be had.
        """
        await self._check_definitions()
        for kind, labels in SELECTORS.items():
            for namespace in self._settings.namespaces or ("",):
                known = {key: version_of(item) for key, item in self.cache.items[kind].items()}
                page = await self._kube.list(kind, namespace, labels=labels)
                at = int(page.resource_version) if page.resource_version.isdigit() else 0
                there = set()
                for item in page.items:
                    there.add(key_of(item))
                    self.hearing.expect(kind, item)
                    self._put(kind, item)
                for key, version in known.items():
                    same = self.cache.items[kind].get(key)
                    if key in there or same is None or (namespace and key[0] != namespace):
                        continue
                    if version_of(same) == version and version <= at:
                        log.info("missed deletion kind=%s namespace=%s name=%s", kind.plural, *key)
                        self._drop(kind, key)
        self.reconciler.news.all()

    async def _check_definitions(self) -> None:
        """See whether the CRDs are as new as we are."""
        old = []
        for kind in (MODELS, POOLS, PROCESSES):
            name = f"{kind.plural}.{kind.group}"
            try:
                item = await self._kube.get(DEFINITIONS, name)
            except KubeError as error:
                if error.status == 403:  # then it is not to be known, and what is dropped shows in the answers
                    return
                raise
            labels = (item or {}).get("metadata", {}).get("labels") or {}
            found = labels.get(SCHEMA_LABEL, "0")
            if not found.isdigit() or int(found) < SCHEMA_VERSION:
                old.append(name)
        problem = f"the CRDs {', '.join(old)} are older than the operator"
        self.reconciler.outdated = Refusal(Reason.OUTDATED_DEFINITIONS, problem) if old else None
        if old:
            log.error("definitions outdated names=%s", ",".join(old))

    async def _canary(self) -> None:
        """Touch an object that the watches must bring back."""
        if self._settings.namespaces and self._settings.namespace not in self._settings.namespaces:
            return  # no watch looks there: agents renew leases where one does, and each sweep expects those it finds
        metadata = {
            "name": f"{self._settings.release}-operator-canary",
            "namespace": self._settings.namespace,
            "labels": CANARY_LABELS,
        }
        while True:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            body = {"metadata": metadata, "spec": {"holderIdentity": self._settings.identity, "renewTime": now}}
            try:
                answer = await self._kube.apply(LEASES, body, manager="omni-operator-canary")
            except KubeError as error:
                log.warning("canary not touched error=%s", error)
            else:
                self.hearing.expect(LEASES, answer)
            await asyncio.sleep(CANARY_SECONDS)

    # Probes

    def _why_dead(self) -> str:
        deaf = self.hearing.deaf()
        return f"watches are dead: {', '.join(deaf)}" if deaf else ""

    def _why_not_ready(self) -> str:
        if not self._synced.is_set():
            return f"waits for {self.waits_for}"
        problem = self.election.problem
        if not problem or self.election.leads:
            return ""
        cure = STORE_CURE if STORE_FULL in problem else "see the API server"
        return f"cannot write, for its Lease is not to be had: {problem}; {cure}"


def end_process() -> None:
    """End without another write: someone else leads by now."""
    logging.shutdown()
    os._exit(1)
