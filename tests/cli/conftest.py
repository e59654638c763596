"""A running system for the command line: real gateway, controller, files and sockets; only the agent is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from controllers.manifests import write_model, write_pool
from controllers.standin import StandInAgent, until
from omnimodel.controllers.local import LocalController
from omnimodel.controllers.local_backend import LocalBackend
from omnimodel.controllers.local_state import OBJECTS_FILE, IdentityFile, StateLock
from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway.app import create_app
from omnimodel.protocol.dispatch import Estimate, Hold, InferenceRequest, InferenceResponse, ModelCard
from omnimodel.protocol.report import ProcessReport

PROBE = """\
probe:
  path: /v1/embeddings
  json: {input: cat}
  expect:
    - {at: /data/0/index, equals: INDEX}"""

PROCESS = ProcessReport("words-1", 4711, "ready", time.time(), 30 << 20, 2, "process", ("namespaces",), "/omni/words-1")


class AnsweringAgent(StandInAgent):
    """A stand-in that answers every request for embeddings with one vector."""

    def models(self) -> Sequence[ModelCard]:
        return [
            ModelCard(model.name, model.namespace, (model.name,), "embeddings", model.tier, model.ready)
            for _, model in sorted(self.reports.items())
        ]

    @contextlib.asynccontextmanager
    async def open(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        async def body() -> AsyncIterator[bytes]:
            yield json.dumps({"object": "list", "data": [{"index": 0, "embedding": [1.0]}]}).encode()

        yield InferenceResponse(200, {"Content-Type": "application/json"}, body(), Hold(0.0, "none", 0.0))

    def estimate(self, model: str) -> Estimate:
        return Estimate(1, 0.0)

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> dict[str, Any]:
        if f"{namespace}/{name}" not in self.reports:
            raise DispatchError(
                f"OmniModel {namespace}/{name}", "there is no such model", reason=Reason.MODEL_NOT_FOUND, status=404
            )
        if name == "slow":
            raise DispatchError(
                "OmniModel default/slow", "it was not woken in time", reason=Reason.DEADLINE_EXCEEDED, status=504
            )
        return {"tier": "resident", "wakeSeconds": 0.021}

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        if name == "slow":
            raise DispatchError(
                "OmniModel default/slow", "it did not answer in time", reason=Reason.EVICT_TIMEOUT, status=502
            )
        return await super().evict(namespace, name, deadline_seconds)


@dataclass
class Running:
    """The system and how to call the command line against it."""

    address: str = ""
    folder: Path = Path()
    state_dir: Path = Path()
    environment: dict[str, str] = field(default_factory=dict)

    def omni(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "omnimodel.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
            check=False,
        )


def environment(state_dir: Path) -> dict[str, str]:
    """Of a command: this source tree, this state directory, nothing else of OmniModel's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_")}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2] / "operator"), "OMNI_STATE_DIR": str(state_dir)}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A system with models `words` (serves), `wrong` (its probe expects something else), `slow`, and a broken file."""
    root = tmp_path_factory.mktemp("system")
    folder, state_dir = root / "catalog", root / "state"
    folder.mkdir()
    write_pool(folder, "default")
    write_model(folder, "words", extra=PROBE.replace("INDEX", "0"))
    write_model(folder, "wrong", extra=PROBE.replace("INDEX", "7"))
    write_model(folder, "slow")
    (folder / "broken.yaml").write_text(
        "apiVersion: omnimodel.io/v1alpha1\nkind: OmniModel\nmetadata: {name: broken}\n"
    )
    running = Running(folder=folder, state_dir=state_dir, environment=environment(state_dir))
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        agent = AnsweringAgent()
        with StateLock(state_dir) as lock:
            controller = LocalController(folder, agent, IdentityFile(state_dir / OBJECTS_FILE))
            runner = web.AppRunner(create_app(LocalBackend(agent, controller.refused), controller))
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            running.address = "http://{}:{}".format(*runner.addresses[0][:2])
            lock.publish_address(running.address)
            task = asyncio.create_task(controller.run())
            await until(lambda: len(agent.names) == 3, "the models")
            agent.say("default/words", process=PROCESS)
            ready.set()
            await stop.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60), "the system did not start"
    yield running
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
