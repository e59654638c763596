"""A pool and its models on a real API server, and a line to it that a test can cut."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from omnimodel.api import OmniModel, OmniPool
from omnimodel.kube import MODELS, POOLS, PROCESSES, SECRETS, Kube
from omnimodel.render import render_process

WORDS = {
    "source": {"package": {"name": "wordllama", "version": "0.4.0"}},
    "runtime": {
        "engine": "python",
        "task": "embeddings",
        "handler": {"entry": "w:W", "files": {"w.py": "class W: ..."}},
    },
}


async def eventually(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """Wait until a condition, or what it awaits, is true."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.05)


POD = "default-0"


class Catalogue:
    """What a person and the operator have put into a namespace."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace

    async def pool(self, name: str = "default", **spec: Any) -> dict[str, Any]:
        spec = {"device": {"type": "cpu", "memory": "512Mi"}, **spec}
        return await self.kube.create(POOLS, {"metadata": self._metadata(name), "spec": spec})

    async def model(self, name: str, **spec: Any) -> dict[str, Any]:
        return await self.kube.create(MODELS, {"metadata": self._metadata(name), "spec": {**WORDS, **spec}})

    async def assign(
        self, model: Mapping[str, Any], *pods: str, pool: str = "default", secrets: Mapping[str, Any] | None = None
    ) -> None:
        """Write its OmniProcess, as the operator does."""
        whole = await self.kube.get(POOLS, pool, self.namespace)
        found = OmniModel.model_validate({k: v for k, v in model.items() if k != "status"})
        process = render_process(
            found, OmniPool.model_validate({k: v for k, v in whole.items() if k != "status"}),
            config={"configmaps": {}, "secrets": dict(secrets or {})}, served_names=found.names,
        ).to_dict()  # fmt: skip
        process["spec"]["pods"] = list(pods)
        metadata = model["metadata"]
        process["metadata"] = {
            "name": metadata["name"],
            "namespace": self.namespace,
            "labels": {"omnimodel.io/pool": pool, "omnimodel.io/pool-namespace": self.namespace},
            "ownerReferences": [
                {
                    "apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniModel", "name": metadata["name"],
                    "uid": metadata["uid"], "controller": True,
                }
            ],
        }  # fmt: skip
        process.pop("status", None)
        await self.kube.apply(PROCESSES, process, manager="test-operator")

    async def unassign(self, name: str) -> None:
        await self.kube.delete(PROCESSES, name, self.namespace)

    async def delete(self, name: str) -> None:
        await self.kube.delete(MODELS, name, self.namespace)
        await self.unassign(name)

    async def secret(self, name: str, **content: str) -> None:
        body = {"metadata": self._metadata(name), "stringData": content}
        await self.kube.apply(SECRETS, body, manager="test")

    async def entries(self, name: str) -> dict[str, dict[str, Any]]:
        """The residency of a model, by pod."""
        item = await self.kube.get(MODELS, name, self.namespace) or {}
        return {entry["pod"]: entry for entry in (item.get("status") or {}).get("residency") or ()}

    async def entry(self, name: str, pod: str = "default-0") -> dict[str, Any]:
        return (await self.entries(name)).get(pod, {})

    def key(self, name: str) -> str:
        return f"{self.namespace}/{name}"

    def _metadata(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": self.namespace}


class Line:
    """A TCP line to the API server; while it is cut, connections break and new ones are refused."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._config = yaml.safe_load(kubeconfig.read_text())
        parts = urlsplit(self._config["clusters"][0]["cluster"]["server"])
        self._target = parts.hostname, parts.port
        self.kubeconfig = folder / "line.kubeconfig"
        self._server: asyncio.Server | None = None
        self._port = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        cluster = self._config["clusters"][0]["cluster"]
        cluster["server"] = f"https://127.0.0.1:{self._port}"
        cluster["tls-server-name"] = self._target[0]
        self.kubeconfig.write_text(json.dumps(self._config))

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._open |= {writer, far_writer}
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, *(w for w in list(self._open) if w is not writer and w.is_closing())):
                end.close()
            self._open.discard(writer)
            self._tasks.discard(task)

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


async def serving(catalogue: Catalogue, start, *models: str):
    """A pod that has these models, and whose entries are written."""
    for name in models:
        await catalogue.assign(await catalogue.model(name), POD)
    pod = await start()
    for name in models:
        await eventually(lambda name=name: catalogue.entry(name), f"the entry of {name}")
    await eventually(lambda: pool_entry(catalogue), "the entry of the pool")
    return pod


async def pool_entry(catalogue: Catalogue) -> dict:
    item = await catalogue.kube.get(POOLS, "default", catalogue.namespace)
    return next((entry for entry in (item.get("status") or {}).get("pods") or () if entry["pod"] == POD), {})


async def quiet(pod, seconds: float = 1.0) -> int:
    """Wait until nothing is written for a while; the writes there were."""
    count = pod.writes
    while True:
        await asyncio.sleep(seconds)
        if pod.writes == count:
            return count
        count = pod.writes
