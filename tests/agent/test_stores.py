"""Stores that outlive an agent, and those that others filled: what is there is fetched and published by nobody again."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from agent.fetching import SmallDisk, wheel
from agent.package_index import PackageIndex
from agent.world import HANDLER, World, pool
from memory.test_published import tree
from memory.test_store import flip
from omnimodel.agent.agent import Agent
from omnimodel.agent.kept import FOLDER_VARIABLE
from omnimodel.errors import OmniError, Reason

MIB = 1 << 20
# The handler of other tests, with a package of the index.
CODE = HANDLER.replace("import torch\n", "import torch\nfrom tiny_code import factor\n").replace(
    "float(self", "factor * float(self"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of everything here."""
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def index(folder: Path) -> Iterator[PackageIndex]:
    """An index with weights, and with code that a handler needs."""
    weights, _ = World(folder).weights(1, 1)
    shelf = folder / "shelf"
    wheel(shelf, entries={"tiny_weights/model.safetensors": (weights / "model.safetensors").read_bytes()})
    wheel(shelf, "tiny_code", entries={"tiny_code/__init__.py": b"factor = 1.0"})
    with PackageIndex(shelf) as found:
        yield found


@asynccontextmanager
async def agent(folder: Path, name: str, index: PackageIndex, **store: object) -> AsyncIterator[World]:
    """An agent with a state directory of its own."""
    world = World(folder)
    world.agent = Agent(folder / name)
    world.pool = pool(176 * MIB, sources={"packageIndex": f"{index.url}/simple"}, store=store)
    await world.agent.start()
    try:
        yield world
    finally:
        await world.agent.stop(5.0)


def model(world: World) -> dict:
    """A model that comes from the index, with code that does."""
    manifest = world.manifest("tiny", mib=1, handler=CODE)
    manifest["spec"]["source"] = {"package": {"name": "tiny-weights", "version": "1.0", "path": "tiny_weights"}}
    manifest["spec"]["runtime"]["environment"] = {"requirements": ["tiny-code==1.0"]}
    return manifest


async def serve(world: World) -> None:
    await world.apply(model(world))
    assert await world.ask("tiny") == world.answer(1, 1), world.report("tiny")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def filled(folder: Path, index: PackageIndex) -> Path:
    """A store that an agent filled, which is gone."""
    store = folder / "filled"
    async with agent(folder, "first", index, path=str(store)) as world:
        await serve(world)
        said = world.agent.report().pool
        assert said.store_path == str(store)
        assert 0 < said.store_free_bytes <= said.store_bytes
    assert any(path.endswith(".whl") for path in index.asked)
    assert not (folder / "first" / "store").exists()
    return store


async def test_another_agent_on_the_same_store_fetches_nothing(tmp_path, index, filled):
    asked = list(index.asked)
    async with agent(tmp_path, "second", index, path=str(filled)) as world:
        await serve(world)
        assert world.report("tiny").store == ""
        assert world.agent.report().pool.message == ""
    assert index.asked == asked


async def test_what_others_published_is_served_from_there_and_nothing_is_written(tmp_path, index, filled):
    asked, before = list(index.asked), tree(filled)
    published = [{"name": "none", "path": str(tmp_path / "none")}, {"name": "catalogue", "path": str(filled)}]
    async with agent(tmp_path, "second", index, published=published) as world:
        await serve(world)
        assert world.report("tiny").store == "catalogue"
        assert "there is no none" in world.agent.report().pool.message
        assert (await world.agent.prune(dry_run=False))["removed"] == []
        await world.apply()
        assert (await world.agent.prune(dry_run=False))["removed"] == []
    assert index.asked == asked
    assert tree(filled) == before


async def test_a_damaged_store_is_told_of_and_its_models_are_published_anew(tmp_path, index, filled):
    damaged = shutil.copytree(filled, tmp_path / "damaged")
    image = next(damaged.glob("store/images/*/image"))
    code = next(damaged.glob("environments/*/packages/tiny_code/__init__.py"))
    flip(image, 100)
    code.write_text("factor = 2.0")
    asked, before = len(index.asked), tree(damaged)
    async with agent(tmp_path, "second", index, published=[{"name": "catalogue", "path": str(damaged)}]) as world:
        await serve(world)
        assert world.report("tiny").store == ""
        told = [event.message async for event in world.agent.events.follow(follow=False) if event.type == "Warning"]
        assert any("store catalogue" in text and str(image) in text for text in told)
        assert any(str(code.parents[2]) in text for text in told)
    assert len(index.asked) > asked
    assert tree(damaged) == before


async def test_the_volume_of_a_pod_goes_before_what_its_pool_says(tmp_path, index, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "mounted"))
    async with agent(tmp_path, "first", index, path="/srv/of-the-node") as world:
        await world.apply()
        assert world.agent.layout.store == tmp_path / "mounted" / "store"
        assert world.agent.report().pool.message == ""


async def test_two_agents_never_write_one_store(tmp_path, index):
    store = {"path": str(tmp_path / "store")}
    async with agent(tmp_path, "first", index, **store) as first, agent(tmp_path, "second", index, **store) as second:
        await first.apply()
        with pytest.raises(OmniError) as caught:
            await second.apply()
        assert caught.value.reason is Reason.STORE_IN_USE
        assert "spec.store.published" in caught.value.cure
        said = second.agent.report().pool
        assert (said.ready, said.reason, said.pool) == (False, "StoreInUse", "default")
        await first.agent.stop(0.0)
        await second.apply()
        assert second.agent.report().pool.ready


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
async def test_a_volume_that_cannot_be_written_is_told_and_tried_again(tmp_path, index):
    small = SmallDisk(tmp_path / "small", 64)
    try:
        async with agent(tmp_path, "first", index, path=str(small.path)) as world:
            small.mount("ro")
            with pytest.raises(OmniError) as caught:
                await world.apply()
            assert caught.value.reason is Reason.STORE_UNAVAILABLE
            assert str(small.path) in str(caught.value)
            assert world.agent.report().pool.reason == "StoreUnavailable"
            small.mount("rw")
            await world.apply()
            assert world.agent.report().pool.ready
    finally:
        small.close()


async def test_an_edit_of_the_store_is_told_to_need_a_new_start(tmp_path, index):
    async with agent(tmp_path, "first", index, path=str(tmp_path / "store")) as world:
        await world.apply()
        world.pool = pool(176 * MIB, store={"path": str(tmp_path / "other")})
        await world.apply()
        assert "started again" in world.agent.report().pool.message
        world.pool = pool(176 * MIB, store={"volumeClaimTemplate": {"size": "1Gi"}})
        await world.apply()
        assert "started again" in world.agent.report().pool.message
    async with agent(tmp_path, "second", index, volumeClaimTemplate={"size": "1Gi"}) as world:
        await world.apply()
        assert "no effect on one machine" in world.agent.report().pool.message
        world.pool = pool(176 * MIB, volumes=[{"name": "voices", "image": {"reference": "example/voices:1"}}])
        await world.apply()
        assert "there is no voices (/volumes/voices)" in world.agent.report().pool.message
