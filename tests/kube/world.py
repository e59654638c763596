"""A cluster with operators as processes, and agents that say what a test wants in pods that are faked."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import aiohttp

from omnimodel.controllers.kubernetes import Operator, OperatorSettings
from omnimodel.controllers.status import pod_entry, residency_entry
from omnimodel.kube import LEASES, MODELS, PODS, POOLS, PROCESSES, STATEFUL_SETS, Kind, Kube, KubeError, Mirror
from omnimodel.kube.election import micro_time
from omnimodel.protocol.report import ModelReport, PoolReport

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 60.0
GIB = 1 << 30
Item = dict[str, Any]


async def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Wait until a condition, plain or awaitable, gives something true."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


def model(name: str, namespace: str, *, pool: str = "gpu", flavour: str = "plain", **spec: Any) -> Item:
    """A model that any pool takes."""
    return {
        "apiVersion": "omnimodel.io/v1alpha1",
        "kind": "OmniModel",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "pool": pool,
            "source": {"package": {"name": "wordllama", "version": "0.4.0.post1"}},
            "runtime": {
                "engine": "python",
                "task": "embeddings",
                "handler": {"entry": "words:Words", "files": {"words.py": "class Words: ...\n"}},
                "options": {"flavour": flavour},
            },
            **spec,
        },
    }


def pool(name: str, namespace: str, **spec: Any) -> Item:
    """A pool."""
    return {
        "apiVersion": "omnimodel.io/v1alpha1",
        "kind": "OmniPool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"device": {"type": "cpu", "memory": "1Gi"}, **spec},
    }


def conditions(item: Mapping[str, Any] | None) -> dict[str, tuple[str, str]]:
    """Condition type -> status and reason."""
    status = (item or {}).get("status") or {}
    return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions") or ()}


def is_ready(item: Mapping[str, Any] | None) -> bool:
    """Whether an object is Ready, by a status that speaks of its present generation."""
    status = (item or {}).get("status") or {}
    seen = status.get("observedGeneration") == (item or {}).get("metadata", {}).get("generation")
    return seen and conditions(item).get("Ready", ("",))[0] == "True"


class Probed:
    """What answers probes and shows metrics."""

    async def url(self) -> str:
        """Where; empty while that is not known."""
        raise NotImplementedError

    async def ask(self, path: str) -> tuple[int, str]:
        """Status and text of a probe."""

        async def answered() -> tuple[int, str] | None:
            url = await self.url()
            if not url:
                return None
            try:
                async with aiohttp.ClientSession() as session, session.get(f"{url}{path}") as answer:
                    return answer.status, await answer.text()
            except aiohttp.ClientError:  # it is being started anew
                return None

        found: tuple[int, str] = await until(answered, "the operator answers")
        return found

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its labels but those given."""
        _, text = await self.ask("/metrics")
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))


class OperatorProcess(Probed):
    """`omni operator`, started anew whenever it ends, as a Deployment would.

    Args:
        kubeconfig: how it reaches the cluster.
        namespace: that it looks after.
        name: identity.
        log: file it writes to.
        options: further ones.
    """

    def __init__(
        self, kubeconfig: Path, namespace: str, name: str, log: Path, *options: str, everywhere: bool = False
    ) -> None:
        self._log = log
        scope = [] if everywhere else ["--namespace", namespace]
        self._command = [
            sys.executable, "-m", "omnimodel.cli", "operator", "--kubeconfig", str(kubeconfig), "--identity", name,
            "--own-namespace", namespace, "--port", "0", "--lease", "4", *scope, *options,
        ]  # fmt: skip
        self.starts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._supervise())
        await until(lambda: self._process, "the operator's process")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self) -> None:
        """Kill it, and start it no more."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.kill()
        if self._process is not None:
            await self._process.wait()

    async def _supervise(self) -> None:
        while True:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdout=log, stderr=log, env={**os.environ, "KUBECONFIG": "/nonexistent"}
                )
            self.starts += 1
            await self._process.wait()
            await asyncio.sleep(0.2)

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, if it still is there."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def url(self) -> str:
        """Where it answers probes."""
        text = self._log.read_text() if self._log.exists() else ""
        line = next((line for line in reversed(text.splitlines()) if "operator started" in line), "")
        return f"http://127.0.0.1:{line.rpartition('port=')[2]}" if line else ""


class OperatorHere(Probed):
    """The operator in the test's own process: real in everything but that it cannot be killed.

    Args:
        kubeconfig, namespace, name: see `OperatorProcess`.
    """

    def __init__(self, kubeconfig: Path, namespace: str, name: str) -> None:
        self._kubeconfig = kubeconfig
        self._settings = OperatorSettings(
            identity=name, namespace=namespace, namespaces=(namespace,), port=0,
            lease_seconds=4.0, renew_seconds=2.4, retry_seconds=0.8,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        self.kube = await Kube.connect(str(self._kubeconfig), component=f"operator-{self._settings.identity}")
        self.operator = Operator(self.kube, self._settings, on_lost=lambda: None)
        self._task = asyncio.create_task(self.operator.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task.done():
            self._task.result()
        self.operator.stop()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.kube.close()

    async def url(self) -> str:
        """Where it answers probes."""
        return f"http://127.0.0.1:{self.operator.port}" if self.operator.port else ""


@dataclass
class World:
    """A namespace as a test sees it, kept up by watches.

    Args:
        kube: as the administrator.
        namespace: of the test.
    """

    kube: Kube
    namespace: str
    mirrors: dict[Kind, Mirror] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        for kind in (MODELS, POOLS, PROCESSES, PODS, STATEFUL_SETS):
            self.mirrors[kind] = mirror = Mirror(self.kube, kind, self.namespace)
            self._tasks.append(asyncio.create_task(mirror.run()))
        for mirror in self.mirrors.values():
            await mirror.wait_synced(DEADLINE_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def see(self, kind: Kind, name: str) -> Item | None:
        """An object as it is now."""
        return self.mirrors[kind].items.get((self.namespace, name))

    def all(self, kind: Kind) -> dict[str, Item]:
        """All objects of a kind by name."""
        return {name: item for (_, name), item in self.mirrors[kind].items.items()}

    async def apply(self, *items: Item) -> None:
        """As `kubectl apply --server-side` by a person."""
        kinds = {kind.name: kind for kind in (MODELS, POOLS, PROCESSES)}
        for item in items:
            await self.kube.apply(kinds[item["kind"]], item, manager="person")

    async def ready(self, *names: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until models are Ready."""

        def lacking() -> list[str]:
            return [name for name in names if not is_ready(self.see(MODELS, name))]

        try:
            await until(lambda: not lacking(), "models are Ready", seconds)
        except AssertionError:
            left = {name: (self.see(MODELS, name) or {}).get("status") for name in lacking()[:3]}
            raise AssertionError(f"not Ready: {left}; pools: {self.all(POOLS)}") from None


class Agents:
    """An agent in each pod of a namespace's pools, as far as the operator can see.

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
        self._world = world
        self.budget_bytes = budget_bytes
        self.size_bytes = size_bytes
        self._labels = dict(labels or {})
        self.silent: set[str] = set()
        self.held = asyncio.Event()  # while it is clear, agents write nothing
        self.held.set()
        self.reports: dict[tuple[str, str], Mapping[str, Any]] = {}  # (pod, model) -> what to say otherwise
        self._said: dict[tuple[str, str], object] = {}
        self._up: dict[str, str] = {}
        self._beat: dict[str, float] = {}
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
        if self._up.get(name) != uid or name not in {entry["pod"] for entry in entries}:
            for key in [key for key in self._said if key[0] == name]:
                del self._said[key]
            await kube.patch_status(PODS, name, namespace, _running(), manager="kubelet")
            entry = pod_entry(name, pool_report(label, name, self.budget_bytes))
            await kube.patch_status(POOLS, label, namespace, {"pods": [entry]}, manager=f"omni-agent.{name}")
            self._up[name] = uid
            self._beat.pop(name, None)
        now = asyncio.get_running_loop().time()
        if now - self._beat.get(name, -100.0) > 5.0:
            self._beat[name] = now
            lease = {
                "metadata": {"name": name, "namespace": namespace, "labels": {"omnimodel.io/pool": label}},
                "spec": {"holderIdentity": uid, "leaseDurationSeconds": 40, "renewTime": micro_time()},
            }
            await kube.apply(LEASES, lease, manager=f"omni-agent.{name}")
        mine = {k: p for k, p in self._world.all(PROCESSES).items() if name in (p["spec"].get("pods") or ())}
        for key, process in mine.items():
            said = (process["metadata"]["uid"], process["spec"]["generation"], self.reports.get((name, key)))
            if self._said.get((name, key)) == said:
                continue
            report = ModelReport(
                namespace, key, process["spec"]["generation"], "warm", "idle", ready=True,
                weights_bytes=self.size_bytes // 2, working_bytes=self.size_bytes // 2,
            )  # fmt: skip
            report = replace(report, **self.reports.get((name, key), {}))
            status = {"residency": [residency_entry(name, report)]}
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


def _running() -> Item:
    now = micro_time()[:19] + "Z"
    return {
        "phase": "Running",
        "podIP": "10.88.0.7",
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": now}
            for kind in ("Initialized", "PodScheduled", "ContainersReady", "Ready")
        ],
    }
