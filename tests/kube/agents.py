"""Agents that say what a test wants, in pods that are faked, with a kubelet that believes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from kube.world import GIB, Item, World
from omnimodel.controllers.pool_status import pod_entry
from omnimodel.controllers.status import residency_entry
from omnimodel.kube import LEASES, MODELS, PODS, POOLS, PROCESSES, KubeError
from omnimodel.kube.election import micro_time
from omnimodel.protocol.report import ModelReport, PoolReport

log = logging.getLogger(__name__)


class Agents:
    """An agent in each pod of a namespace's pools, as far as the operator can see, and the kubelet that asks it.

    A pod runs, its agent is heard of and says what it has; it is ready in the kubelet's eyes once every model that it
    began with has been ready or has failed, and stays so.

    Args:
        world: of the test.
        budget_bytes: of each pod.
        size_bytes: of each model.
    """

    def __init__(
        self,
        world: World,
        *,
        budget_bytes: int = GIB,
        size_bytes: int = 64 << 20,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.world = self._world = world
        self.budget_bytes = budget_bytes
        self.size_bytes = size_bytes
        self._labels = dict(labels or {})
        self.clock: Callable[[], str] = micro_time
        self.beat_seconds = 5.0
        self.beats = 0
        self.silent: set[str] = set()
        self.publishing: set[str] = set()  # models, by name, that are not ready yet
        self.held = asyncio.Event()  # while it is clear, agents write nothing
        self.held.set()
        self.reports: dict[tuple[str, str], Mapping[str, Any]] = {}  # (pod, model) -> what to say otherwise
        self._said: dict[tuple[str, str], object] = {}
        self._up: dict[str, str] = {}
        self._beat: dict[str, float] = {}
        self._settled: set[str] = set()
        self.writes = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._follow()
        except Exception:
            log.exception("the agents ended")
            raise

    async def _follow(self) -> None:
        while True:
            await self.held.wait()
            pods = self._world.all(PODS)
            for name, pod in pods.items():
                label = (pod["metadata"].get("labels") or {}).get("omnimodel.io/pool")
                if not label or name in self.silent or pod["metadata"].get("deletionTimestamp"):
                    continue
                try:
                    await self._pod(name, pod, label)
                except KubeError as error:  # as an agent does: later again
                    log.info("agent of %s: %s", name, error)
            for key in [key for key in self._up if key not in pods]:
                del self._up[key]
            await asyncio.sleep(0.05)

    async def _pod(self, name: str, pod: Item, label: str) -> None:
        kube, namespace = self._world.kube, self._world.namespace
        uid = pod["metadata"]["uid"]
        entries = ((self._world.see(POOLS, label) or {}).get("status") or {}).get("pods") or ()
        if self._up.get(name) != uid:
            await kube.patch_status(PODS, name, namespace, running(ready=False), manager="kubelet")
            self._settled.discard(name)
        if self._up.get(name) != uid or name not in {entry["pod"] for entry in entries}:
            for key in [key for key in self._said if key[0] == name]:
                del self._said[key]
            await self._renew(name, uid, label)  # before anything else is said
            entry = pod_entry(name, pool_report(label, name, self.budget_bytes), pod_uid=uid)
            await kube.patch_status(POOLS, label, namespace, {"pods": [entry]}, manager=f"omni-agent.{name}")
            self._up[name] = uid
        if asyncio.get_running_loop().time() - self._beat.get(name, -100.0) > self.beat_seconds:
            await self._renew(name, uid, label)
        await self._speak(name, uid)
        mine = [key for pod, key in self._said if pod == name]
        if name not in self._settled and not self.publishing & set(mine):
            await kube.patch_status(PODS, name, namespace, running(ready=True), manager="kubelet")
            self._settled.add(name)

    async def _renew(self, name: str, uid: str, label: str) -> None:
        self._beat[name] = asyncio.get_running_loop().time()
        namespace = self._world.namespace
        lease = {
            "metadata": {"name": name, "namespace": namespace, "labels": {"omnimodel.io/pool": label}},
            "spec": {"holderIdentity": uid, "leaseDurationSeconds": 40, "renewTime": self.clock()},
        }
        await self._world.kube.apply(LEASES, lease, manager=f"omni-agent.{name}")
        self.beats += 1

    async def _speak(self, name: str, uid: str) -> None:
        """Say what a pod has to say of its models."""
        kube, namespace = self._world.kube, self._world.namespace
        mine = {k: p for k, p in self._world.all(PROCESSES).items() if name in (p["spec"].get("pods") or ())}
        for key, process in mine.items():
            generation, ready = process["spec"]["generation"], key not in self.publishing
            said = (process["metadata"]["uid"], generation, ready, self.reports.get((name, key)))
            if self._said.get((name, key)) == said:
                continue
            report = ModelReport(
                namespace, key, generation, "warm" if ready else "cold", "idle" if ready else "publishing", ready=ready,
                weights_bytes=self.size_bytes // 2, working_bytes=self.size_bytes // 2, idle_bytes=5 << 20,
            )  # fmt: skip
            report = replace(report, **self.reports.get((name, key), {}))
            status = {"residency": [residency_entry(name, report, uid)]}
            self.writes += 1
            await kube.patch_status(MODELS, key, namespace, status, manager=f"omni-agent.{name}")
            self._said[name, key] = said
        for pod_name, key in [said for said in self._said if said[0] == name and said[1] not in mine]:
            del self._said[pod_name, key]
            if self._world.see(MODELS, key) is not None:
                await kube.patch_status(MODELS, key, namespace, {}, manager=f"omni-agent.{name}")


def pool_report(pool_name: str, pod: str, budget_bytes: int) -> PoolReport:
    """What an idle agent says of its device."""
    return PoolReport(
        pool_name, pod, "cpu", budget_bytes, 0, 0, 0, budget_bytes, 4 * GIB, 0, 0, 0, "namespaces", (), ready=True
    )


def running(*, ready: bool) -> Item:
    now = micro_time()[:19] + "Z"
    return {
        "phase": "Running",
        "podIP": "10.88.0.7",
        "conditions": [
            {"type": kind, "status": str(ready or "Ready" not in kind), "lastTransitionTime": now}
            for kind in ("Initialized", "PodScheduled", "ContainersReady", "Ready")
        ],
    }
