"""The agent's side of a cluster: what the API server assigns to this pod becomes what the agent runs.

One task reconciles; watches and the agent only ring its bell. Without the API server the agent goes on with what it was
told last, also after a restart. What cannot be run (a secret is missing, a spec is unreadable) does not touch what
runs: the last good version of it stays.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omnimodel.api import OmniPool, OmniProcess
from omnimodel.controllers.agent_kubernetes_objects import content, read, secret_names, unreadable, with_secrets
from omnimodel.controllers.agent_kubernetes_state import Applied, AppliedFile
from omnimodel.controllers.agent_kubernetes_status import (
    PodIdentity,
    StatusWriter,
    beat,
    tell_events,
)
from omnimodel.controllers.local import LocalAgent
from omnimodel.errors import OmniError, Reason
from omnimodel.kube import POOLS, PROCESSES, SECRETS, Kube, KubeError, Mirror, Recorder
from omnimodel.protocol.report import AgentReport, ModelReport

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.1  # changes closer together are applied at once
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)
SWEEP_SECONDS = 600.0
TOLD = "told"  # of a pool as it is kept: whether it has an entry of this pod
POOL_LABEL = "omnimodel.io/pool"
POOL_NAMESPACE_LABEL = "omnimodel.io/pool-namespace"


class PodController:
    """See the module.

    Args:
        kube: the connection; the API server need not answer.
        agent: started already.
        pod: which pod this is.
        state_dir: where the last assignment is kept.
        namespaces: of the models; empty for all.
        images: publish hashes of the images in the agent's store.
        memory: where secrets are kept for a restart.
        clock: monotonic.
    """

    def __init__(
        self,
        kube: Kube,
        agent: LocalAgent,
        pod: PodIdentity,
        state_dir: Path,
        *,
        namespaces: Sequence[str] = (),
        images: Callable[[], Sequence[str]] = tuple,
        memory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._agent = agent
        self.pod = pod
        self._namespaces = list(namespaces) or [""]
        self._clock = clock
        self._file = AppliedFile(state_dir, pod.name, *([memory] if memory else []))
        self.applied: Applied | None = self._file.read()
        self._bell = asyncio.Event()
        self._changed = asyncio.Event()
        self._given: object = None
        self._settled = False
        self._secrets: dict[tuple[str, str], tuple[str, Mapping[str, bytes]]] = {}  # with the hash it was read for
        self.refused: dict[str, OmniError] = {}
        labels = f"{POOL_LABEL}={pod.pool},{POOL_NAMESPACE_LABEL}={pod.pool_namespace}"
        self._processes = [
            Mirror(
                kube, PROCESSES, place, labels=labels,
                on_change=self._ring, on_synced=self._ring, trim=_slim, clock=clock,
            )
            for place in self._namespaces
        ]  # fmt: skip
        self._pools = Mirror(
            kube, POOLS, pod.pool_namespace, fields=f"metadata.name={pod.pool}",
            on_change=self._pool_changed, on_synced=self._ring, trim=self._slim_pool, clock=clock,
        )  # fmt: skip
        self._compare = asyncio.Event()  # what this pod has written may have been taken back
        self.writer = StatusWriter(
            kube, pod, images=images, written=self.applied.written if self.applied else (), clock=clock
        )

    @property
    def synced(self) -> bool:
        """Whether the API server has told everything once."""
        return self._pools.synced and all(mirror.synced for mirror in self._processes)

    @property
    def age_seconds(self) -> float:
        """Since the API server's last sign of life."""
        return max(mirror.age_seconds for mirror in [self._pools, *self._processes])

    @property
    def settled(self) -> bool:
        """Whether every model that was assigned at the start has been ready once, or has failed.

        A pod is ready from then on, so that a change of all pods waits for the models of each.
        """
        if not self._settled and self._given is not None and self.applied is not None:
            told = {f"{model.namespace}/{model.name}": model for model in self.report().models}
            awaited = [process.key for process in self.applied.processes if not process.spec.suspend]
            self._settled = all(
                key in told and (told[key].ready or told[key].phase == "failed") for key in awaited
            )  # fmt: skip
        return self._settled

    async def run(self) -> None:
        """Reconcile until cancelled. Nothing that the API server does or does not do ends it."""
        await self._apply_kept()
        async with asyncio.TaskGroup() as tasks:
            for mirror in [self._pools, *self._processes]:
                tasks.create_task(mirror.run())
            tasks.create_task(self._follow_agent(), name="agent-follow")
            tasks.create_task(self._loop(), name="reconcile")
            heard = asyncio.Event()
            beating = beat(self._kube, self.pod, heard, self._compare.set, clock=self._clock)
            tasks.create_task(beating, name="heartbeat")
            tasks.create_task(self.writer.run(heard), name="status")
            tasks.create_task(self._sweep(), name="sweep")
            tasks.create_task(self._tell_events(), name="events")

    async def _tell_events(self) -> None:
        """Tell people what happened, also before the API server has said what it happened to."""
        await asyncio.gather(*(mirror.wait_synced() for mirror in [self._pools, *self._processes]))
        recorder = Recorder(self._kube, "omni-agent", self.pod.name, clock=self._clock)
        await tell_events(recorder, self._agent.events.follow(follow=True), self._uid, clock=self._clock)

    async def _apply_kept(self) -> None:
        """Begin with what an earlier run was told: the API server may be away."""
        if self.applied is None:
            return
        secrets = self.applied.secrets
        processes = []
        for process in self.applied.processes:
            try:
                processes.append(with_secrets(process, secrets))
            except OmniError as error:
                log.warning("kept_process_left_out model=%s error=%r", process.key, str(error))
        try:
            await self._agent.apply(processes, self.applied.pool)
            self._given = ()
            log.info("kept_applied processes=%d", len(processes))
        except OmniError as error:
            log.warning("kept_not_applied error=%r", str(error))

    def report(self) -> AgentReport:
        """What the agent reports, and of models that it could not be given, why."""
        report = self._agent.report()
        if not self.refused:
            return report
        models = {f"{model.namespace}/{model.name}": model for model in report.models}
        for key, error in self.refused.items():
            namespace, name = key.split("/", 1)
            model = models.get(key) or ModelReport(namespace, name, 0, "cold", "failed", ready=False)
            models[key] = replace(model, reason=str(error.reason), message=error.advice)
        return replace(report, models=tuple(models.values()))

    async def _follow_agent(self) -> None:
        while True:
            self.writer.tell(self.report(), self._assigned() if self.synced else None)
            self._changed.set()
            self._changed = asyncio.Event()
            await self._agent.wait_changed()

    async def wait_changed(self) -> None:
        """Return when the agent's report may have changed; any number may wait."""
        await self._changed.wait()

    async def _sweep(self) -> None:
        """Compare entries with the API server: at the start, when they may have been taken back, and now and then.

        The operator takes back the entries of a pod whose heartbeat it does not see.
        """
        await asyncio.gather(*(mirror.wait_synced() for mirror in [self._pools, *self._processes]))
        while True:
            self._compare.clear()
            try:
                await self.writer.sweep(self._namespaces)
            except KubeError as error:
                log.warning("sweep_failed error=%s", error)
                await asyncio.sleep(RETRY_SECONDS[2])
                continue
            pause_seconds = SWEEP_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311 - spreads, hides nothing
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._compare.wait()

    # Reconciling

    async def _loop(self) -> None:
        failures = 0
        while True:
            await self._bell.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._bell.clear()
            try:
                again = await self._reconcile()
            except Exception as error:
                # A fault of one round must not end the loop that repairs everything else.
                log.exception("reconcile failed")
                reason = error.reason if isinstance(error, OmniError) else Reason.INTERNAL
                self._agent.events.add(
                    "OmniPool", self.pod.pool_namespace, self.pod.pool, str(reason), str(error), warning=True
                )
                again = True
            if again:
                pause_seconds = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures += 1
                asyncio.get_running_loop().call_later(pause_seconds, self._bell.set)
            else:
                failures = 0

    async def _reconcile(self) -> bool:
        """Have the agent run what is assigned; whether to try again soon."""
        if not self.synced:
            return False
        pool = self._pool()
        if pool is None:  # the pool is deleted, and this pod will be; what is assigned may change until then
            pool = self.applied.pool if self.applied else None
            if pool is None:
                return False
        before = {process.key: process for process in self.applied.processes} if self.applied else {}
        filled: list[OmniProcess] = []
        kept: list[OmniProcess] = []
        secrets: dict[tuple[str, str], Mapping[str, bytes]] = {}
        refused: dict[str, OmniError] = {}
        again = False
        for item in self._items():
            key = f"{item['metadata']['namespace']}/{item['metadata']['name']}"
            for process in (read(item), before.get(key)):
                if isinstance(process, OmniError):
                    refused[key] = process
                    continue
                if process is None:
                    continue
                try:
                    own = await self._secrets_of(process)
                    filled.append(with_secrets(process, own))
                except OmniError as error:
                    refused[key] = error
                    again = True
                    continue
                kept.append(process)
                secrets |= own
                break
        self._tell_refused(refused)
        given = [(process.key, process.metadata.uid, process.spec) for process in filled], pool.spec
        if given != self._given:
            await self._agent.apply(filled, pool)
            self._given = given
            log.info("applied processes=%d refused=%d", len(filled), len(refused))
        self._secrets = {key: known for key, known in self._secrets.items() if key in secrets}
        self.applied = Applied(pool, tuple(kept), secrets, self.writer.written)
        await asyncio.to_thread(self._file.write, self.applied)
        self.writer.tell(self.report(), self._assigned())
        return again

    def _tell_refused(self, refused: Mapping[str, OmniError]) -> None:
        for key, error in refused.items():
            if str(self.refused.get(key)) != str(error):
                namespace, name = key.split("/", 1)
                self._agent.events.add("OmniModel", namespace, name, str(error.reason), str(error), warning=True)
        self.refused = dict(refused)

    async def _secrets_of(self, process: OmniProcess) -> dict[tuple[str, str], Mapping[str, bytes]]:
        """The secrets that a process refers to; read anew when its spec has changed.

        Raises:
            OmniError: one cannot be read. `KubeError` when that may pass.
        """
        found: dict[tuple[str, str], Mapping[str, bytes]] = {}
        for name in secret_names(process.spec.to_dict()):
            key = process.metadata.namespace, name
            known = self._secrets.get(key)
            if known is not None and known[0] == process.spec.hash:
                found[key] = known[1]
                continue
            try:
                item = await self._kube.get(SECRETS, name, key[0])
            except KubeError as error:
                before = self.applied.secrets.get(key) if self.applied else None
                if before is None or error.status:
                    raise
                found[key] = before  # the API server is away
                continue
            if item is not None:
                found[key] = content(item)
                self._secrets[key] = (process.spec.hash, found[key])
        return found

    # What the API server says

    def _items(self) -> list[Mapping[str, Any]]:
        """Processes that are assigned to this pod."""
        items = [item for mirror in self._processes for item in mirror.items.values()]
        return sorted(
            (
                item
                for item in items
                if self.pod.name in (item["spec"].get("pods") or ()) and not item["metadata"].get("deletionTimestamp")
            ),
            key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"]),
        )

    def _assigned(self) -> Mapping[str, str]:
        """Uids of the models that are this pod's, by `namespace/name`."""
        return {
            f"{item['metadata']['namespace']}/{item['metadata']['name']}": str(item["spec"]["model"]["uid"])
            for item in self._items()
        }

    def _pool(self) -> OmniPool | None:
        item = self._pools.items.get((self.pod.pool_namespace, self.pod.pool))
        if item is None:
            return None
        try:
            return OmniPool.model_validate({name: value for name, value in item.items() if name != TOLD})
        except ValidationError as error:
            raise unreadable(f"OmniPool {self.pod.pool_namespace}/{self.pod.pool}", error) from None

    def _uid(self, kind: str, namespace: str, name: str) -> str:
        """The uid of an object that events are about."""
        if kind == "OmniModel":
            return self._assigned().get(f"{namespace}/{name}", "")
        item = self._pools.items.get((self.pod.pool_namespace, self.pod.pool)) if kind == "OmniPool" else None
        return str(item["metadata"].get("uid", "")) if item else ""

    def _slim_pool(self, item: dict[str, Any]) -> dict[str, Any]:
        entries = (item.get("status") or {}).get("pods") or ()
        told = any(entry.get("pod") == self.pod.name for entry in entries)
        return {**_slim(item), TOLD: told}

    def _pool_changed(self, _: object, before: Mapping[str, Any] | None, item: Mapping[str, Any] | None) -> None:
        if before is not None and item is not None and before[TOLD] and not item[TOLD]:
            self._compare.set()
        self._bell.set()

    def _ring(self, *_: object) -> None:
        self._bell.set()


def _slim(item: dict[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    return {**{name: value for name, value in item.items() if name != "status"}, "metadata": metadata}
