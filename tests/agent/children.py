"""Real processes for these tests: a bare zygote (no torch), from which children run `isolation/inside.py`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from omnimodel.agent.limits import Group
from omnimodel.agent.process import ModelProcess, ProcessExit
from omnimodel.agent.spawner import ProcessRequest, Spawner
from omnimodel.agent.zygotes import Zygotes
from omnimodel.isolation import SandboxPlan
from omnimodel.protocol.process import Publish

INSIDE = str(Path(__file__).parents[1] / "isolation")
SUBJECT = "OmniModel default/smollm2"


class Children:
    """Makes processes and asks them to run code."""

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner
        self._numbers = itertools.count(1)

    def request(self, *, uid: int = -1, instance: str = "", **changes: object) -> ProcessRequest:
        number = next(self._numbers)
        of_plan = {name: changes.pop(name) for name in list(changes) if name in SandboxPlan.__dataclass_fields__}
        plan = SandboxPlan(
            instance or f"smollm2-{number}",
            uid=22000 + number if uid < 0 else uid,
            **{"memory_bytes": 256 << 20, "processes": 64, "tmp_bytes": 8 << 20, **of_plan},
        )
        log_path = self.spawner.state_dir / "logs" / "default.smollm2.log"
        return ProcessRequest(SUBJECT, 1, plan, log_path, **{"target": "inside:run", **changes})

    async def make(self, **changes: object) -> ModelProcess:
        return await self.spawner.spawn(self.request(**changes))

    def spares(self) -> set[int]:
        """The process that waits to become the next one, if there is one."""
        return Group(self.spawner.ahead.name, self.spawner.groups.hierarchies).pids()

    def left(self) -> dict[str, list[str]]:
        """Everything on this machine that belongs to a process of this state directory, but for the next one."""
        groups = [
            str(folder)
            for hierarchy in self.spawner.groups.hierarchies
            if hierarchy.parent.exists()
            for folder in hierarchy.parent.iterdir()
            if folder.is_dir() and folder.name != self.spawner.ahead.name
        ]
        run = sorted(os.listdir(self.spawner.state_dir / "run"))
        journal = [name for name in os.listdir(self.spawner.state_dir / "journal") if not name.startswith("zygote-")]
        return {"groups": groups, "run": run, "journal": journal}


NOTHING = {"groups": [], "run": [], "journal": []}


def zygotes(state_dir: Path, **changes: object) -> Zygotes:
    return Zygotes(state_dir, **{"preload": ("inside",), "import_path": (INSIDE,), **changes})


@contextlib.asynccontextmanager
async def children(state_dir: Path, **changes: object) -> AsyncIterator[Children]:
    spawner = await Spawner.open(state_dir, zygotes(state_dir, **changes))
    try:
        yield Children(spawner)
    finally:
        await spawner.close()


def code(text: str) -> Publish:
    """A command that runs code inside."""
    return Publish({"code": text}, "", "", "", 1)


async def run(process: ModelProcess, text: str, timeout_seconds: float = 30.0, descriptors=()) -> dict:
    return (await process.command(code(text), descriptors, timeout_seconds)).values


async def ended(process: ModelProcess, seconds: float = 20.0) -> ProcessExit:
    """Wait for its end."""
    async with asyncio.timeout(seconds):
        return await asyncio.shield(process.exited)


@contextlib.asynccontextmanager
async def busy(process: ModelProcess, text: str) -> AsyncIterator[None]:
    """The process is in the middle of running `text` inside this block; it must end by the end of the block."""
    begun = asyncio.Event()
    command = process.command(code(f"progress('begun', 0, 0)\n{text}"), (), 600, lambda _: begun.set())
    task = asyncio.create_task(command)
    try:
        async with asyncio.timeout(60):
            await begun.wait()
        yield
    finally:
        if not process.exited.done():
            process.kill()
        ended = (await asyncio.gather(task, return_exceptions=True))[0]
    assert isinstance(ended, ProcessExit)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the kernel
            await asyncio.sleep(0.01)
