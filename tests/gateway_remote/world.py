"""Agents that listen on real ports, each with a model's process behind it, and a gateway before them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from gateway.standin import Agent, Process, System
from gateway.world import until
from omnimodel.gateway.app import Listening, create_app, serve
from omnimodel.gateway.gateway import GATEWAY, Gateway
from omnimodel.gateway.order import Place
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.gateway.seats import Address
from omnimodel.gateway.settings import Settings
from omnimodel.gateway.tokens import Tokens
from omnimodel.protocol.ingress import key_of
from omnimodel.protocol.report import AgentReport, ModelReport, PoolReport

PATH = "/v1/chat/completions"


class Reporter:
    """What an agent says of itself: the cards of the stand-in, and bytes that a test sets."""

    def __init__(self, agent: Agent, pool: str) -> None:
        self._agent = agent
        self.free_bytes = 1000
        self.footprint_bytes = 100
        self.pool = pool
        self._bell = asyncio.Event()

    def tell(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    async def wait_changed(self) -> None:
        await self._bell.wait()

    def report(self) -> AgentReport:
        pool = PoolReport(
            pool=self.pool, node="node", device="cpu", budget_bytes=1000, resident_bytes=0, promised_bytes=0,
            working_bytes=0, free_bytes=self.free_bytes, host_budget_bytes=0, host_bytes=0, arena_bytes=0,
            footprint_bytes=0, isolation_level="process", isolation_missing=(), ready=True,
        )  # fmt: skip
        return AgentReport(pool, tuple(self._model(line) for line in self._agent.lines.values()))

    def _model(self, line: Any) -> ModelReport:
        namespace, name = key_of(line.card).split("/")
        return ModelReport(
            namespace, name, 1, line.card.tier, "idle", line.card.ready, weights_bytes=self.footprint_bytes,
            waiting=line.waiting, in_flight=line.opened,
        )  # fmt: skip


@dataclass
class Pod:
    """One agent in a pod of its own, as far as HTTP can tell."""

    name: str
    process: Process
    agent: Agent
    system: System
    reporter: Reporter
    gateway: Gateway
    listening: Listening
    place: Place
    tokens: Tokens | None = None

    @property
    def address(self) -> Address:
        return Address(self.listening.address, self.name, self.place)

    def add(self, name: str, task: str = "text-generation", **more: Any) -> Any:
        line = self.agent.add(name, task, **more)
        self.reporter.tell()
        return line

    def change(self, name: str, **fields: Any) -> None:
        self.agent.change(name, **fields)
        self.reporter.tell()

    async def kill(self) -> None:
        """End it as SIGKILL does: every connection breaks, nothing is said."""
        runner = self.listening._runner
        server = runner.server
        for site in list(runner.sites):
            site._server.close()
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def revive(self) -> None:
        """Listen on the same port again."""
        old = self.listening
        await old._runner.cleanup()
        app = create_app(
            self.agent, self.system, settings=Settings(drain_seconds=0.2), reporting=self.reporter, tokens=self.tokens
        )
        self.listening = replace(old, _runner=(await serve(app, "127.0.0.1", old.port))._runner)
        self.gateway = app[GATEWAY]

    async def close(self) -> None:
        self.process.gate.set()
        await self.listening.close()
        await self.agent.session.close()
        await self.process.stop()


async def start_pod(
    folder: Path,
    name: str,
    place: Place | None = None,
    *,
    process: Process | None = None,
    agent: Agent | None = None,
    tokens: Tokens | None = None,
) -> Pod:
    """Start one; it has no models yet."""
    if process is None:
        process = Process(folder / f"{name}.sock")
        await process.start()
    agent = agent or Agent(process)
    system, reporter = System(), Reporter(agent, "default")
    app = create_app(agent, system, settings=Settings(drain_seconds=0.2), reporting=reporter, tokens=tokens)
    listening = await serve(app, "127.0.0.1", 0)
    return Pod(name, process, agent, system, reporter, app[GATEWAY], listening, place or Place(), tokens)


def chat(model: str = "m", **more) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


class Cluster:
    """Two pods and a gateway."""

    def __init__(self, pods: list[Pod], backend: RoutingBackend, url: str, gateway, session) -> None:
        self.pods = pods
        self.backend = backend
        self.url = url
        self.gateway = gateway
        self.session = session

    def add(self, name: str = "m", task: str = "text-generation", **more):
        return [pod.add(name, task, **more) for pod in self.pods]

    async def known(self, key: str = "default/m", pods: int = 2) -> None:
        await until(lambda: len(self.backend._by_model.get(key, ())) == pods)

    async def tiers(self, *tiers: str, key: str = "default/m") -> None:
        """Wait until the gateway knows where the model is."""
        seats = [self.backend.seats[pod.listening.address] for pod in self.pods]
        await until(lambda: [seat.snapshot and seat.snapshot.cards[key].tier for seat in seats] == list(tiers))

    async def post(self, path: str = PATH, **more) -> aiohttp.ClientResponse:
        response = await self.session.post(self.url + path, **more)
        await response.read()
        return response

    def asked(self) -> list[int]:
        return [len(pod.agent.requests) for pod in self.pods]
