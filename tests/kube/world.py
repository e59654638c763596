"""A cluster with operators as processes, and agents that say what a test wants in pods that are faked."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from omnimodel.controllers.kubernetes import Operator, OperatorSettings
from omnimodel.controllers.kubernetes_children import AgentSettings
from omnimodel.kube import MODELS, PODS, POOLS, PROCESSES, STATEFUL_SETS, Kind, Kube, Mirror

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 60.0
GIB = 1 << 30
TOKEN_SECRET = "omnimodel-agents"
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
        """The sum of a metric, which has to be there, over all its labels but those given; 0 where none are these."""
        _, text = await self.ask("/metrics")
        families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
        known = {f"{family}{part}" for family in families for part in ("", "_sum", "_count", "_bucket")}
        assert name in known, f"there is no metric {name}"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name]
        assert all(f'{key}="' in line for key in labels for line in lines), f"{name} has no such labels: {labels}"
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
        own_namespace: where it runs; the one it looks after when empty.
        settings: further ones.
    """

    def __init__(
        self, kubeconfig: Path, namespace: str, name: str, *, own_namespace: str = "", **settings: Any
    ) -> None:
        self._kubeconfig = kubeconfig
        usual: dict[str, Any] = {
            "namespace": own_namespace or namespace, "namespaces": (namespace,), "port": 0,
            "agents": AgentSettings(token_secret=TOKEN_SECRET),
            "lease_seconds": 90.0, "renew_seconds": 75.0, "retry_seconds": 1.0,  # nobody is to lead in its place
        }  # fmt: skip
        self._settings = OperatorSettings(name, **usual | settings)

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

    async def crash(self) -> None:
        """End it with no more writes than a kill leaves it."""
        self._task.cancel()
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

    async def bind(self, pod: str, node: str) -> None:
        """Put a pod on a node, as a scheduler does."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        await self.kube._ask("create", "POST", PODS, path, {}, body)
        await until(lambda: (self.see(PODS, pod) or {}).get("spec", {}).get("nodeName") == node, "it is bound")

    async def ready(self, *names: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until models are Ready."""

        def lacking() -> list[str]:
            return [name for name in names if not is_ready(self.see(MODELS, name))]

        try:
            await until(lambda: not lacking(), "models are Ready", seconds)
        except AssertionError:
            left = {name: (self.see(MODELS, name) or {}).get("status") for name in lacking()[:3]}
            raise AssertionError(f"not Ready: {left}; pools: {self.all(POOLS)}") from None
