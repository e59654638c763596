"""`omni agent` and `omni gateway` as processes of their own, as a container runs them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from agent_kubernetes.world import eventually
from cli.conftest import environment

START_SECONDS = 240.0  # a zygote imports torch
ANSWER = [6.0, 22.0]
TOKEN_SECRET = "omnimodel-agents"


def free_port() -> int:
    """A port that is free on every loopback address."""
    with socket.socket() as found:
        found.bind(("0.0.0.0", 0))
        return int(found.getsockname()[1])


class Command:
    """A running command; its log is a file."""

    def __init__(self, log: Path, url: str, *arguments: str, state_dir: Path | None = None) -> None:
        self.url = url
        self.log = log
        self.arguments = arguments
        self.environment = environment(state_dir or log.parent)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "omnimodel.cli", *self.arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """SIGKILL to the command alone: what it started lives on until someone ends it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and wait for the end; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return int(await asyncio.to_thread(self.process.wait, seconds))

    @property
    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Commands:
    """Everything that runs, and how to ask it."""

    def __init__(self, folder: Path, kubeconfig: Path, namespace: str, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self.session = session
        self.port = free_port()
        self.token_file = folder / "token"
        self.agents: list[Command] = []
        self.gateway: Command | None = None

    def add_agent(self) -> Command:
        index = len(self.agents)
        host = f"127.0.0.{index + 1}"
        name = f"default-{index}"
        state_dir = self.folder / name
        state_dir.mkdir(mode=0o711)
        agent = Command(
            self.folder / f"{name}.log", f"http://{host}:{self.port}",
            "agent", "--listen", f"{host}:{self.port}", "--pod", name, "--pod-namespace", self.namespace,
            "--pool", "default", "--kubeconfig", str(self.kubeconfig), "--drain", "20",
            "--token-file", str(self.token_file),
            state_dir=state_dir,
        )  # fmt: skip
        self.agents.append(agent)
        return agent

    def add_gateway(self, *more: str) -> Command:
        port = free_port()
        self.gateway = Command(
            self.folder / "gateway.log", f"http://127.0.0.1:{port}",
            "gateway", "--listen", f"127.0.0.1:{port}", "--agent-port", str(self.port),
            "--kubeconfig", str(self.kubeconfig), "--linger", "0", "--agent-token-secret", TOKEN_SECRET, *more,
        )  # fmt: skip
        return self.gateway

    async def get(self, url: str) -> Any:
        try:
            async with self.session.get(url) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None

    async def ask(self, model: str, *, url: str = "", **more: Any) -> tuple[int, Any]:
        """Ask the gateway the question; status and answer, 0 when there is no connection."""
        assert self.gateway is not None or url
        name = model if self.namespace == "default" else f"{self.namespace}/{model}"
        target = f"{url or self.gateway.url}/v2/models/{name}/infer"
        question = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}
        try:
            async with self.session.post(target, data=json.dumps(question), **more) as response:
                body = await response.read()
                return response.status, json.loads(body)
        except (aiohttp.ClientError, OSError) as error:
            return 0, repr(error)

    async def answers(self, model: str, **more: Any) -> bool:
        status, answer = await self.ask(model, **more)
        return status == 200 and answer["outputs"][0]["data"] == ANSWER

    async def stop(self) -> None:
        everything = [command for command in (self.gateway, *self.agents) if command is not None]
        await asyncio.gather(*(command.stop() for command in everything))


class Load:
    """Asks without end, and keeps what was answered."""

    def __init__(self, commands: Commands, *models: str, workers: int = 3, pause: float = 0.05) -> None:
        self.statuses: list[int] = []
        self.failures: list[Any] = []
        self._commands = commands
        self._pause = pause
        self._ending = False
        self._tasks = [asyncio.create_task(self._ask(model)) for model in models for _ in range(workers)]

    async def _ask(self, model: str) -> None:
        while not self._ending:
            status, answer = await self._commands.ask(model)
            self.statuses.append(status)
            if status != 200 or answer["outputs"][0]["data"] != ANSWER:
                self.failures.append((status, answer))
            await asyncio.sleep(self._pause)

    async def more(self, count: int, what: str) -> None:
        """Wait for so many further answers."""
        wanted = len(self.statuses) + count
        await eventually(lambda: len(self.statuses) >= wanted, f"{count} more answers {what}", 60)

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)


def descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
