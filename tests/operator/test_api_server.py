"""An API server that is killed and started again while models are applied, and the operators that it leaves alone."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import pytest

from cluster.cluster import Cluster
from cluster.fixtures import GIVEN, install_crds, missing
from kube.agents import Agents
from kube.world import Item, World, is_ready, model, pool, until
from omnimodel.kube import EVENTS, MODELS, PODS, POOLS, PROCESSES, STATEFUL_SETS, KubeError

pytestmark = [pytest.mark.cluster_api, pytest.mark.slow]
EDITED = 4  # models that are edited again and again
PAUSE_SECONDS = 0.1


@pytest.fixture(scope="module")
def api_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose API server these tests may kill."""
    why_not = missing("api") or ("these tests kill API servers; unset " + GIVEN if os.environ.get(GIVEN) else "")
    if why_not:
        pytest.skip(why_not)
    with Cluster(tmp_path_factory.mktemp("own") / "cluster", "api", orphans=False) as cluster:
        install_crds(cluster)
        yield cluster


class Person:
    """Applies a new model and an edit of an old one, on and on; what was not taken is tried again, as tools do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.applied: dict[str, Item] = {}
        self.refused = 0
        self._done = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._done = True  # not cancelled: a write whose answer nobody reads may have been taken
        await self._task

    async def _run(self) -> None:
        namespace = self._world.namespace
        for number in itertools.takewhile(lambda _: not self._done, itertools.count()):
            await self._apply(model(f"new-{number}", namespace))
            await self._apply(model(f"edited-{number % EDITED}", namespace, flavour=f"f{number}"))
            await asyncio.sleep(PAUSE_SECONDS)

    async def _apply(self, item: Item) -> None:
        name = item["metadata"]["name"]
        while self.applied.get(name) != item:
            try:
                await self._world.apply(item)
                self.applied[name] = item
            except KubeError:
                self.refused += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def more(self, count: int) -> None:
        """Wait for so many further models."""
        wanted = len(self.applied) + count
        await until(lambda: len(self.applied) >= wanted, f"{count} more models")


class Seen:
    """What was said, version by version, of models that nobody edits and of their pool: it has to stay."""

    def __init__(self, world: World, *models: str) -> None:
        self.lost: list[Any] = []
        self._models = models
        world.mirrors[MODELS]._on_change = self._model
        world.mirrors[POOLS]._on_change = self._pool

    def _model(self, key: tuple[str, str], _: Item | None, item: Item | None) -> None:
        pods = [entry["pod"] for entry in (item or {}).get("status", {}).get("residency", ())]
        if key[1] in self._models and not (is_ready(item) and pods == ["gpu-0"]):
            self.lost.append(item)

    def _pool(self, _: tuple[str, str], __: Item | None, item: Item | None) -> None:
        pods = [entry["pod"] for entry in (item or {}).get("status", {}).get("pods", ())]
        if not (is_ready(item) and pods == ["gpu-0"]):
            self.lost.append(item)


@pytest.fixture
async def agents(world: World) -> AsyncIterator[Agents]:
    """Agents of pods that have room for whatever is applied."""
    async with Agents(world, size_bytes=1 << 20) as found:
        yield found


@pytest.mark.parametrize(
    "lease", [pytest.param("60", id="the operators outlive it"), pytest.param("2", id="the operators end meanwhile")]
)
async def test_killed_and_restarted_under_load_it_costs_nothing_but_time(
    world: World, agents: Agents, start_process, api_cluster: Cluster, lease: str
) -> None:
    operators = [await start_process(name, None, "--lease", lease) for name in ("one", "two")]
    stays = ("stays-0", "stays-1")
    await world.apply(pool("gpu", world.namespace), *(model(name, world.namespace) for name in stays))
    await world.ready(*stays)
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")
    kinds = (MODELS, POOLS, STATEFUL_SETS, PODS, PROCESSES)
    before = {kind: {name: item["metadata"]["uid"] for name, item in world.all(kind).items()} for kind in kinds}
    seen = Seen(world, *stays)
    starts = [operator.starts for operator in operators]

    async def led() -> bool:
        return sum([await operator.metric("omni_operator_leader") for operator in operators]) == 1

    async with Person(world) as person:
        for _ in range(2):
            await until(led, "one of them leads")
            await person.more(5)
            refused, ends = person.refused, sum(operator.starts for operator in operators)
            api_cluster.kill_api_server()
            try:
                await until(lambda refused=refused: person.refused > refused, "nothing is taken any more")
                if lease == "2":
                    await until(lambda ends=ends: sum(o.starts for o in operators) > ends, "the leader has ended")
            finally:
                api_cluster.start_api_server()
                await asyncio.to_thread(api_cluster.wait_for_api_server)
        await person.more(5)
    if lease == "60":
        assert [operator.starts for operator in operators] == starts

    await world.ready(*person.applied, *stays)
    for name, item in person.applied.items():
        process = world.see(PROCESSES, name)
        assert process["spec"]["options"] == item["spec"]["runtime"]["options"], name
        # It was written for a generation of its model at most once.
        assert process["metadata"]["generation"] <= world.see(MODELS, name)["metadata"]["generation"], name
    for kind, known in before.items():
        there = {name: world.see(kind, name)["metadata"] for name in known}
        assert {name: metadata["uid"] for name, metadata in there.items()} == known, kind.name
    for kind, name in ((STATEFUL_SETS, "gpu"), *((PROCESSES, name) for name in stays)):
        assert world.see(kind, name)["metadata"]["generation"] == 1, name
    events = (await world.kube.list(EVENTS, world.namespace)).items
    told = [event for event in events if event["reason"] == "Assigned"]
    assert len(told) == len({event["involvedObject"]["name"] for event in told})
    assert {event["count"] for event in told} == {1}
    assert seen.lost == []
