"""An agent that only remembers what it was asked and reports what a test says: the controller's input is its output.

The events are the real agent's. Everything else of a round is real: files, watch, catalogue, placement, render.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omnimodel.agent.events import EventLog
from omnimodel.api import OmniPool, OmniProcess
from omnimodel.protocol.report import AgentReport, ModelReport, PoolReport

DEADLINE_SECONDS = 20.0


class StandInAgent:
    """See the module.

    Args:
        budget_bytes: of the pool.
        footprints: model key -> (weights, working) bytes that it "measures".
    """

    def __init__(self, budget_bytes: int = 1 << 30, footprints: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.events = EventLog()
        self.applied: list[tuple[list[OmniProcess], OmniPool]] = []
        self.footprints = dict(footprints or {})
        self.reports: dict[str, ModelReport] = {}
        self.pruned = 0
        self.attached: list[Mapping[str, bytes]] = []
        self.fail_apply: Exception | None = None
        self._pool = PoolReport(
            "",
            "node-1",
            "host",
            budget_bytes,
            0,
            0,
            0,
            budget_bytes,
            1 << 32,
            0,
            0,
            0,
            "process",
            ("namespaces",),
            ready=True,
        )
        self._changed = asyncio.Event()

    async def attach(self, files: Mapping[str, bytes]) -> None:
        self.attached.append(files)

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        item = {"kind": "image", "name": "a" * 64, "what": "default/gone (float32)", "bytes": 3 << 20}
        self.pruned += not dry_run
        return {"bytes": 3 << 20, "removed": [{**item, "lastUsedSeconds": 1.0}]}

    async def apply(self, processes: Sequence[OmniProcess], pool: OmniPool) -> None:
        if self.fail_apply is not None:
            raise self.fail_apply
        self.applied.append((list(processes), pool))
        self._pool = replace(self._pool, pool=pool.metadata.name)
        self.reports = {process.key: self.reports.get(process.key) or self._serving(process) for process in processes}
        for process in processes:
            self.reports[process.key] = replace(self.reports[process.key], generation=process.spec.generation)
        self.ring()

    def _serving(self, process: OmniProcess) -> ModelReport:
        weights_bytes, working_bytes = self.footprints.get(process.key, (1 << 20, 1 << 20))
        return ModelReport(
            process.metadata.namespace, process.metadata.name, process.spec.generation, "warm", "idle", ready=True,
            weights_bytes=weights_bytes, working_bytes=working_bytes,
        )  # fmt: skip

    def say(self, key: str, **changes: Any) -> None:
        """Report something else of one model."""
        self.reports[key] = replace(self.reports[key], **changes)
        self.ring()

    def ring(self) -> None:
        self._changed.set()

    def report(self) -> AgentReport:
        return AgentReport(self._pool, tuple(self.reports.values()))

    async def wait_changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        return {"tier": "resident", "wakeSeconds": 0.02}

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        return {"tier": "warm", "evictSeconds": 0.001}

    async def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        yield b"hello\n"

    @property
    def names(self) -> list[str]:
        """Keys of the processes of the last apply."""
        return [process.key for process in self.applied[-1][0]] if self.applied else []


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition gives something true."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_SECONDS
    while not (found := condition()):
        assert asyncio.get_running_loop().time() < deadline, f"not within {DEADLINE_SECONDS} s: {what}"
        await asyncio.sleep(0.02)
    return found
