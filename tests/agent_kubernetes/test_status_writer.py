"""What an agent writes when there is more to say than it may."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from agent_kubernetes.world import eventually
from omnimodel.controllers.agent_kubernetes_status import Pace, PodIdentity, StatusWriter, beat
from omnimodel.kube import LEASES, MODELS, POOLS, Kind, KubeError
from omnimodel.protocol.report import AgentReport, ModelReport, PoolReport

POD = PodIdentity("default-0", "team", "default", "team", "uid-1")
POOL = PoolReport("default", "n", "cpu", 100, 0, 0, 0, 100, 100, 0, 0, 0, "process", (), ready=True)
NAMES = "abcdefgh"


class Recorded:
    """An API server that takes everything, unless it is away, and remembers it in order."""

    def __init__(self) -> None:
        self.written: list[tuple[Kind, str]] = []
        self.away = False
        self.tries = 0  # to renew the lease

    async def patch_status(self, kind: Kind, name: str, *_: Any, **__: Any) -> dict[str, Any]:
        self.written.append((kind, name))
        return {}

    async def apply(self, kind: Kind, body: Any, **_: Any) -> dict[str, Any]:
        self.tries += 1
        if self.away:
            raise KubeError("Kubernetes", "is away", status=0)
        self.written.append((kind, body["metadata"]["name"]))
        return {}


def swapping(number: int) -> AgentReport:
    models = tuple(ModelReport("team", name, 1, "resident", "idle", ready=True, device_bytes=number) for name in NAMES)
    return AgentReport(models=models, pool=replace(POOL, resident_bytes=number))


async def test_models_that_swap_all_the_time_are_told_in_turn_and_the_pool_beside_them() -> None:
    now = [0.0]
    kube = Recorded()
    pace = Pace(1, 1.0, lambda: now[0])
    writer = StatusWriter(kube, POD, pace=pace, clock=lambda: now[0])  # type: ignore[arg-type]
    assigned = {f"team/{name}": "uid" for name in NAMES}
    for second in range(40):
        now[0] = float(second)
        writer.tell(swapping(second), assigned)
        await writer._write_all()
    told = [name for kind, name in kube.written if kind is MODELS]
    assert {told.count(name) for name in NAMES} == {len(told) // len(NAMES)}, "each as often as the others"
    assert kube.written.count((POOLS, "default")) == 4, "the pool's bytes once in ten seconds"


async def test_nothing_is_said_before_the_heartbeat_has_arrived() -> None:
    """The operator would take it for the words of a pod of that name before this one."""
    kube = Recorded()
    kube.away = True
    writer = StatusWriter(kube, POD)  # type: ignore[arg-type]
    writer.tell(swapping(0), {f"team/{name}": "uid" for name in NAMES})
    heard, missed = asyncio.Event(), []
    now = [0.0]
    beating = asyncio.create_task(
        beat(kube, POD, heard, lambda: missed.append(now[0]), seconds=0.01, clock=lambda: now[0])  # type: ignore[arg-type]
    )
    writing = asyncio.create_task(writer.run(heard))
    await eventually(lambda: kube.tries > 2, "heartbeats that do not arrive")
    assert kube.written == []
    kube.away = False
    await eventually(lambda: len(kube.written) > 2, "what there is to say")
    assert kube.written[0] == (LEASES, "default-0")
    assert missed == []
    now[0] = 100.0  # the next one comes after a long silence
    await eventually(lambda: missed, "that it was missed")
    beating.cancel()
    writing.cancel()
    await asyncio.gather(beating, writing, return_exceptions=True)
