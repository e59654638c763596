"""An agent under an init, as in a pod: it is killed, and the next one goes on with what it left.

`python restarting.py FOLDER` is the container's program. Tests send the agent code to run (`Container.run`).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.world import World, pool
from omnimodel.agent.agent import Agent
from omnimodel.agent.descriptors import DescriptorStore
from omnimodel.agent.instance import State
from omnimodel.agent.zygotes import Zygotes
from omnimodel.cli import init

log = logging.getLogger(__name__)

CATALOGUE, CONTROL, FAULT, LOG = "catalogue.json", "control", "fault.py", "agent.log"
PRELOAD = ("numpy", "torch", "aiohttp.web", "omnimodel.runtime.serve", "omnimodel.runtime.engines.own")


class Container:
    """The container, from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = World(folder)  # knows manifests and answers; its agent is never started
        tests = Path(__file__).parents[1]
        with (folder / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, __file__, str(folder)],
                env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent / 'operator'}"}, stdout=log, stderr=log,
            )  # fmt: skip

    async def run(self, code: str, seconds: float = 120.0, **values: Any) -> Any:
        """Run code in the agent, where `world` is, with these variables; the value of its last line."""
        sent = json.dumps([inspect.cleandoc(code), values]).encode() + b"\n"
        async with asyncio.timeout(seconds):
            while not (line := await self._answer(sent)):
                assert self.process.poll() is None, self.log()
                await asyncio.sleep(0.02)
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{self.log()}")
        return answer["value"]

    async def _answer(self, sent: bytes) -> bytes:
        """Empty when there is no agent, or there was one."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.folder / CONTROL))
        except OSError:
            return b""
        try:
            writer.write(sent)
            return await reader.readline()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def dies(self, code: str = "", **values: Any) -> None:
        """Run code at the end of which the agent is killed."""
        (self.folder / CONTROL).rename(self.folder / "control.before")
        reader, writer = await asyncio.open_unix_connection(str(self.folder / "control.before"))
        writer.write(json.dumps([f"{inspect.cleandoc(code)}\nos.kill(os.getpid(), 9)", values]).encode() + b"\n")
        async with asyncio.timeout(60):
            said = await reader.read()
        writer.close()
        assert not said, said

    async def apply(self, *manifests: dict, **of_pool: Any) -> None:
        """Make these models the catalogue, of the next agents too, and wait for them."""
        self.write(*manifests, **of_pool)
        await self.run("await world.read()\nawait world.settled()")

    def write(self, *manifests: dict, memory_mib: int = 176, **of_pool: Any) -> None:
        """Let the next agent have this catalogue."""
        (self.folder / CATALOGUE).write_text(json.dumps([manifests, memory_mib << 20, of_pool]))

    def log(self) -> str:
        return (self.folder / LOG).read_text(errors="replace")[-6000:]

    def init(self) -> int:
        """Its pid, as this namespace has it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def kept(self) -> int:
        """How many descriptors the init has."""
        return len(os.listdir(f"/proc/{self.init()}/fd"))

    def stop(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(IndexError, FileNotFoundError):
                os.kill(self.init(), signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def container(folder: Path) -> Iterator[Container]:
    running = Container(folder)
    try:
        yield running
    finally:
        running.stop()


class Inside(World):
    """The world inside."""

    def __init__(self, folder: Path, store: DescriptorStore) -> None:
        super().__init__(folder)
        self.agent = Agent(folder / "state", store)

    async def read(self) -> None:
        manifests, memory_bytes, of_pool = json.loads((self.folder / CATALOGUE).read_text())
        self.pool = pool(memory_bytes, **of_pool)
        await self.apply(*manifests, wait=False)

    async def settled(self) -> None:
        """Wait until the revision that is wanted of every model is ready, and nothing moves any more."""
        models = self.agent._models
        for key, spec in self.agent._specs.items():
            await self.until(lambda key=key, spec=spec: models[key].serving.spec["hash"] == spec["hash"], key)
        for name in self.manifests:
            await self.until(lambda name=name: self.report(name).ready, name)
        await self.until(lambda: not any(name in self.broker.moves for name in self.broker.instances), "all rests")

    async def tier(self, name: str, tier: str) -> None:
        """Bring a model to a tier."""
        with contextlib.suppress(KeyError):
            await (self.agent.wake if tier == "resident" else self.agent.evict)("default", name, 60.0)
        state = State.RESIDENT if tier == "resident" else State.WARM
        await self.until(lambda: self.instance(name).state is state, tier)

    def look(self) -> dict[str, Any]:
        """Process, tier and bytes of every model, and what the ledger says in all."""
        device = self.ledger.snapshot().device
        self.check_ledger()
        models = {}
        for name in self.manifests:
            report = self.report(name)
            models[name] = [report.process.pid if report.process else 0, report.tier, report.device_bytes]
        return {"models": models, "held": sum(sum(kinds.values()) for kinds in device.held.values())}


async def _serve(folder: Path, store: DescriptorStore) -> None:
    world = Inside(folder, store)
    if (fault := folder / FAULT).exists():
        text = fault.read_text()
        fault.unlink()
        exec(compile(text, FAULT, "exec"), {"os": os, "world": world})
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await world.agent.start()
    if (folder / CATALOGUE).exists():
        await world.read()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text, values = json.loads(await reader.readline())
        scope = {"world": world, "asyncio": asyncio, "os": os, **values}
        try:
            tree = ast.parse(text)
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                tree.body[-1] = (
                    ast.parse("value = 0")
                    .body[0]
                    .__class__(targets=[ast.Name("value", ast.Store())], value=tree.body[-1].value)
                )
            code = compile(ast.fix_missing_locations(tree), "sent", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            made = eval(code, scope)
            if made is not None:
                await made
            said = {"value": scope.get("value")}
        except Exception as error:
            said = {"error": repr(error)}
        writer.write(json.dumps(said).encode() + b"\n")
        writer.close()

    (folder / CONTROL).unlink(missing_ok=True)
    server = await asyncio.start_unix_server(answer, str(folder / CONTROL))
    await ended.wait()
    server.close()
    await world.agent.stop(1.0)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    init.RESTARTS, init.RESTART_PAUSE_SECONDS = 1000, 0.0
    Zygotes.__init__.__kwdefaults__["preload"] = PRELOAD
    folder = Path(sys.argv[1])

    def work(store: DescriptorStore) -> int:
        log.info("agent_begins pid=%d seconds=%.3f kept=%d", os.getpid(), time.monotonic(), len(store.found))
        asyncio.run(_serve(folder, store))
        return 0

    return init.run_under_init(work)


if __name__ == "__main__":
    sys.exit(main())
