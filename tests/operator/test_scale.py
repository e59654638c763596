"""A thousand models in twenty pools: what it costs, and what it costs when nothing happens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from kube.agents import Agents
from kube.world import World, is_ready, model, pool, until
from omnimodel.kube import MODELS, PROCESSES

MODELS_IN_ALL = int(os.environ.get("OMNI_TEST_MODELS", "120"))
QUIET_SECONDS = 10.0
CALLS_PER_MODEL = 6
EDIT_SECONDS = 1.0  # until an edit is applied, at the median
OPERATOR_MIB = 100 + MODELS_IN_ALL / 10  # the interpreter with its libraries, and what is kept of each model
POOLS_IN_ALL = max(2, MODELS_IN_ALL // 50)


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def record(figures: dict[str, Any]) -> None:
    """Keep the figures where OMNI_TEST_FIGURES says; with OMNI_TEST_MODELS=1000 they are those of the notes."""
    if os.environ.get("OMNI_TEST_FIGURES"):
        Path(os.environ["OMNI_TEST_FIGURES"]).write_text(json.dumps(figures, indent=1))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_models_converge_with_few_calls_and_then_it_is_quiet(
    world: World, agents: Agents, start_process, tmp_path: Path
) -> None:
    agents.size_bytes = 16 << 20
    operator = await start_process("one", None, "--lease", "20")
    await operator.ask("/readyz")
    pools = [pool(f"p{number}", world.namespace) for number in range(POOLS_IN_ALL)]
    names = [f"m{number}" for number in range(MODELS_IN_ALL)]
    models = [model(name, world.namespace, pool=f"p{n % POOLS_IN_ALL}") for n, name in enumerate(names)]
    began = time.perf_counter()
    await world.apply(*pools)
    gate = asyncio.Semaphore(16)

    async def apply(item: dict[str, Any]) -> None:
        async with gate:
            await world.apply(item)

    await asyncio.gather(*(apply(item) for item in models))
    applied = time.perf_counter()
    await until(lambda: len(world.all(PROCESSES)) == MODELS_IN_ALL, "all have a process", 600)
    assigned = time.perf_counter()
    await world.ready(*names, seconds=600)
    ready = time.perf_counter()

    async def calls() -> float:
        lists = [
            await operator.metric("omni_operator_api_calls_total", verb=verb)
            for verb in ("apply", "apply-status", "create", "patch", "delete", "get")
        ]
        leases = [
            await operator.metric("omni_operator_api_calls_total", verb=verb, kind="leases")
            for verb in ("apply", "create", "get")
        ]
        return sum(lists) - sum(leases)

    async def by_kind() -> dict[str, int]:
        _, text = await operator.ask("/metrics")
        rows = re.findall(r"^omni_operator_api_calls_total\{(.*)\} (\S+)$", text, re.MULTILINE)
        return {labels: round(float(value)) for labels, value in rows}

    async def settled() -> bool:
        return await operator.metric("omni_operator_queue_depth") == 0

    await until(settled, "the queue is empty")
    spent, calls_by_kind = await calls(), await by_kind()
    seconds = []
    for name in names[:9]:
        start = time.perf_counter()
        await world.apply(model(name, world.namespace, pool=f"p{names.index(name) % POOLS_IN_ALL}", flavour="edited"))
        await until(lambda name=name: world.see(PROCESSES, name)["spec"]["generation"] == 2, "the edit is applied")
        seconds.append(time.perf_counter() - start)
    await world.ready(*names[:9])
    await until(settled, "the queue is empty")
    quiet = await calls()
    marker = world.see(MODELS, names[-1])["metadata"]["resourceVersion"]
    await asyncio.sleep(QUIET_SECONDS)  # what is measured is that nothing happens
    steady = await calls() - quiet
    figures = {
        "models": MODELS_IN_ALL,
        "pools": POOLS_IN_ALL,
        "applied_seconds": round(applied - began, 2),
        "assigned_seconds_after_apply": round(assigned - applied, 2),
        "ready_seconds_after_apply": round(ready - applied, 2),
        "calls_per_model": round(spent / MODELS_IN_ALL, 2),
        "calls": calls_by_kind,
        "edit_seconds_median": round(statistics.median(seconds), 3),
        "steady_calls_per_minute": steady * 60 / QUIET_SECONDS,
        "operator_mib": round(resident_bytes(operator.pid) / (1 << 20)),
        "rounds_per_model": round(
            await operator.metric("omni_operator_reconcile_seconds_count", kind="model") / MODELS_IN_ALL, 2
        ),
        "reconcile_seconds_in_all": round(await operator.metric("omni_operator_reconcile_seconds_sum"), 1),
    }
    record(figures)
    assert spent / MODELS_IN_ALL < CALLS_PER_MODEL
    assert figures["operator_mib"] < OPERATOR_MIB
    assert figures["edit_seconds_median"] < EDIT_SECONDS
    assert figures["rounds_per_model"] >= 1
    assert steady <= 2
    assert world.see(MODELS, names[-1])["metadata"]["resourceVersion"] == marker
    assert all(is_ready(world.see(MODELS, name)) for name in names)
