"""A real agent with small real models: real zygotes, sandboxes, frames and sockets."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from omnimodel.agent.agent import Agent
from omnimodel.api import OmniModel, OmniPool, OmniProcess, ProcessSpec
from omnimodel.memory.ledger import Kind
from omnimodel.protocol.dispatch import InferenceRequest
from omnimodel.render import fill_secrets, render_process

MIB = 1 << 20

HANDLER = '''
import os
import time

import torch
from omnimodel.runtime.sdk import Model


class Handler(Model):
    """Sums its weights, and does what it is told."""

    def build(self):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.empty(self.options["mib"] * 262144))
        return module

    def predict(self, command: str) -> dict[str, float]:
        word, _, value = command.partition(":")
        if word == "sleep":
            time.sleep(float(value))
        elif word == "hoard":
            self.hoard = torch.ones(int(value) << 18)
        elif word == "exit":
            os._exit(int(value))
        return {"sum": float(self.module.weight.sum(dtype=torch.float64))}
'''


def pool(memory_bytes: int, **spec) -> OmniPool:
    """The pool of the tests."""
    device = {"type": "cpu", "memory": memory_bytes, "frameSize": 4 * MIB}
    return OmniPool.model_validate({"metadata": {"name": "default"}, "spec": {"device": device, **spec}})


class World:
    """An agent, its models, and what a test does with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agent = Agent(folder / "state")
        self.pool = pool(176 * MIB)
        self.config: dict[str, dict[str, dict[str, bytes]]] = {"configmaps": {}, "secrets": {}}
        self.manifests: dict[str, dict] = {}
        self.generations: dict[str, int] = {}

    def weights(self, mib: int, seed: int) -> tuple[Path, float]:
        """A checkpoint of that size, and what its model answers."""
        path = self.folder / f"weights-{mib}-{seed}"
        values = np.random.default_rng(seed).integers(-1000, 1000, mib * 262144).astype(np.float32)
        if not path.exists():
            path.mkdir()
            save_file({"weight": values}, path / "model.safetensors")
            (path / "model.safetensors").chmod(0o644)  # a model has a user of its own
        return path, float(values.astype(np.float64).sum())

    def manifest(
        self, name: str, *, mib: int = 8, seed: int = 1, working_mib: int = 48, handler: str = HANDLER, **spec
    ) -> dict:
        """A model of `mib` MiB of weights; `spec` is merged over what it has by default."""
        path, answer = self.weights(mib, seed)
        manifest = {
            "metadata": {"name": name},
            "spec": {
                "source": {"path": str(path)},
                "runtime": {
                    "engine": "python",
                    "task": "infer",
                    "handler": {"entry": "handler:Handler", "files": {"handler.py": handler}},
                    "options": {"mib": mib},
                    "dtype": "float32",
                    "threads": 1,
                },
                "resources": {"deviceMemory": (mib + working_mib) * MIB},
                "probe": {
                    "path": f"/v2/models/{name}/infer",
                    "json": command("hello"),
                    "expect": [{"at": "/outputs/0/data/0", "near": answer, "within": 0.5}],
                },
            },
        }
        for key, value in spec.items():
            manifest["spec"][key] = {**manifest["spec"].get(key, {}), **value} if isinstance(value, dict) else value
        return manifest

    def program(self, name: str, code: str, *, mib: int = 64, **spec) -> dict:
        """A model behind a server of its own: Python code that is given its port."""
        return {
            "metadata": {"name": name},
            "spec": {
                "source": {"path": str(self.weights(8, 1)[0])},
                "runtime": {"engine": "command", "task": "infer", "command": ["python", "-c", code, "{port}"]},
                "resources": {"deviceMemory": mib * MIB},
                **spec,
            },
        }

    async def apply(self, *manifests: dict, wait: bool = True) -> None:
        """Make these models the catalogue, and wait until each is ready or has failed."""
        self.manifests = {manifest["metadata"]["name"]: manifest for manifest in manifests}
        await self.agent.apply([self.process(manifest) for manifest in self.manifests.values()], self.pool)
        if wait:
            for name in self.manifests:
                await self.until(lambda name=name: self.report(name).phase in {"serving", "idle", "failed"}, name)

    def process(self, manifest: dict) -> OmniProcess:
        """A manifest as the agent gets it, one generation after the last."""
        name = manifest["metadata"]["name"]
        self.generations[name] = self.generations.get(name, 0) + 1
        model = OmniModel.model_validate(manifest).with_metadata(
            uid=f"uid-{name}", generation=self.generations[name], creation_timestamp="2026-01-01T00:00:00Z"
        )
        process = render_process(model, self.pool, self.config)
        spec = ProcessSpec.model_validate(fill_secrets(process.spec.to_dict(), self.config["secrets"]))
        return process.model_copy(update={"spec": spec})

    def report(self, name: str):
        """What the agent reports of one model."""
        return next(model for model in self.agent.report().models if model.name == name)

    def instance(self, name: str):
        """The revision that serves."""
        return self.agent._models[f"default/{name}"].serving

    @property
    def brokers(self):
        return self.agent._devices.brokers

    @property
    def broker(self):
        return self.agent._devices.first

    @property
    def ledger(self):
        return self.broker.memory.ledger

    async def until(self, condition, what="", seconds: float = 120.0) -> None:
        """Wait for a condition, with a deadline."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                reports = "\n".join(str(model) for model in self.agent.report().models)
                raise AssertionError(f"not so after {seconds} s: {what}\n{reports}")
            await asyncio.sleep(0.01)

    async def ask(self, name: str, text: str = "hello", *, deadline: float | None = None) -> float:
        """Send one request and read its answer."""
        async with self.request(name, text, deadline=deadline) as response:
            body = b"".join([chunk async for chunk in response.body])
        assert response.status == 200, body
        return json.loads(body)["outputs"][0]["data"][0]

    @asynccontextmanager
    async def request(self, name: str, text: str, *, deadline: float | None = None):
        """Send one request; the response."""
        body = json.dumps(command(text)).encode()
        headers = {"Content-Type": "application/json"}
        path = f"/v2/models/{name}/infer"
        async with self.agent.open(InferenceRequest(name, "POST", path, headers, body, deadline)) as response:
            yield response

    def answer(self, mib: int, seed: int) -> float:
        """What a model of these weights answers."""
        return self.weights(mib, seed)[1]

    def check_ledger(self) -> None:
        """The ledger agrees with the owner table of the frames, and nothing is over the budget."""
        for broker in self.brokers.values():
            self._check_account(broker.memory.ledger.device, broker.memory.frames)

    @staticmethod
    def _check_account(device, frames) -> None:
        owned: dict[str, int] = {}
        for owner in frames.owners().values():
            owned[owner] = owned.get(owner, 0) + device.frame_bytes
        held = device.snapshot().held
        by_ledger = {
            holder: kinds.get(Kind.FRAMES, 0) + kinds.get(Kind.QUARANTINE, 0)
            for holder, kinds in held.items()
            if kinds.get(Kind.FRAMES, 0) + kinds.get(Kind.QUARANTINE, 0)
        }
        assert owned == by_ledger
        assert device.frames * device.frame_bytes + device.held_bytes(kind=Kind.WORKING) <= device.capacity_bytes


def command(text: str) -> dict:
    """The body of a request."""
    return {"inputs": [{"name": "command", "datatype": "BYTES", "shape": [1], "data": [text]}]}
