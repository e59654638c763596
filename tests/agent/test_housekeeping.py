"""What goes when the disk is short, or when a person says so: never what a model here needs."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agent.fetching import SmallDisk
from agent.world import command
from omnimodel.agent import housekeeping as keeping
from omnimodel.agent.environments import Environments
from omnimodel.agent.forms import Forms, image_key
from omnimodel.agent.housekeeping import Housekeeping
from omnimodel.agent.needed import needs_of
from omnimodel.agent.sources import Sources
from omnimodel.memory.image import ImageWriter
from omnimodel.memory.store import Store
from omnimodel.protocol.dispatch import InferenceRequest

MIB = 1 << 20


class Disk:
    """Stores in a folder, with things in them."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root / "store")
        self.sources = Sources(root / "sources")
        self.environments = Environments(root / "environments")
        self.needed: list[dict] = []
        self.in_use: list[object] = []
        self.told: list[list] = []
        self.housekeeping = Housekeeping(
            root, self.store, self.sources, self.environments, self._needs, self.told.append
        )

    def _needs(self):
        return needs_of([], self.needed, [SimpleNamespace(spec=spec(0), prepared=SimpleNamespace(image=image))
                                          for image in self.in_use], Forms())  # fmt: skip

    def put(self, of: dict, *, content: int = 0, size_bytes: int = 4096, used: float = 0.0):
        """Everything that a model had published, fetched and built for it."""
        staging = self.store.staging()
        with ImageWriter(staging.path, MIB, dtype="float32") as writer:
            writer.add("weight", "uint8", (size_bytes,), bytes([content]) * size_bytes)
        key = image_key(of, "float32")
        ref = self.store.commit(staging, key)
        markers = [self.store.root / "keys" / f"{key}.json"]
        if "path" not in of["source"]:
            name = self.sources.key(of["source"])
            markers.append(self.sources.root / "fetched" / name / "fetched.json")
        for name in self.environments.keys([of["environment"]["requirements"]]):
            markers.append(self.environments.root / name / "environment.json")
        for marker in markers[1:]:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(json.dumps({"what": "w", "requirements": ["r"]}))
        for marker in markers:
            os.utime(marker, (used, used))
        return ref

    def present(self) -> tuple[set, set, set]:
        return (
            {key for image in self.store.stored() for key in image.keys},
            {item.name for item in self.sources.stored()},
            {item.name for item in self.environments.stored()},
        )

    def of(self, specs: list[dict]) -> tuple[set, set, set]:
        return (
            {image_key(spec, "float32") for spec in specs},
            {self.sources.key(spec["source"]) for spec in specs},
            self.environments.keys(spec["environment"]["requirements"] for spec in specs),
        )


def spec(number: int, *, source: int = 0, environment: int = 0) -> dict:
    """A process spec; equal numbers share a source or an environment, 0 has none."""
    return {
        "publishHash": f"{number:040x}{number:024x}",
        "dtype": "float32",
        "source": {"package": {"name": "weights", "version": str(source)}} if source else {"path": "/srv"} ,
        "environment": {"requirements": [f"package=={environment}"] if environment else []},
    }  # fmt: skip


MODELS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(MODELS, st.booleans())
def test_nothing_that_is_needed_ever_goes_and_everything_else_does(models, by_hand):
    """Images are shared by content, sources and environments by what they are; some images are in use without a spec."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        specs, busy = [], set()
        for number, (content, source, environment, needed, in_use) in enumerate(models, start=1):
            of = spec(number, source=source, environment=environment)
            ref = disk.put(of, content=content)
            specs.append(of)
            if needed:
                disk.needed.append(of)
            if in_use:
                disk.in_use.append(ref)
                busy.add(ref.digest)
        before = disk.present()
        would = asyncio.run(disk.housekeeping.prune(dry_run=True))
        assert disk.present() == before
        if by_hand:
            gone = asyncio.run(disk.housekeeping.prune(dry_run=False))
        else:
            gone = asyncio.run(disk.housekeeping.make_room(1 << 62))
            assert disk.told == ([gone] if gone else [])
        assert gone == would
        images, sources, environments = disk.present()
        wanted = disk.of(disk.needed)
        assert wanted[0] <= images
        assert {image.digest for image in disk.store.stored() if not image.keys & wanted[0]} <= busy
        assert busy <= {image.digest for image in disk.store.stored()}
        assert sources == wanted[1] & before[1]
        assert environments == wanted[2]


def test_without_knowing_what_is_needed_nothing_goes(tmp_path):
    disk = Disk(tmp_path)
    disk.put(spec(1, source=1, environment=1))
    disk.housekeeping.needs = lambda: None
    before = disk.present()
    assert asyncio.run(disk.housekeeping.prune(dry_run=False)) == []
    assert asyncio.run(disk.housekeeping.make_room(1 << 62)) == []
    assert disk.present() == before


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
async def test_the_least_recently_used_goes_first_and_no_more_than_must(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "FREE_SHARE", 0.0)
    small = SmallDisk(tmp_path / "small", 16)
    try:
        disk = Disk(small.path)
        specs = [spec(number) for number in range(1, 5)]
        for number, used in enumerate((400, 100, 300, 200), start=1):
            disk.put(spec(number), content=number, size_bytes=3 * MIB, used=used)
        disk.needed = [specs[1]]  # the oldest of all
        assert await disk.housekeeping.make_room(2 * MIB) == []  # there is room
        gone = await disk.housekeeping.make_room(8 * MIB)
        assert [item.used_seconds for item in gone] == [200, 300]
        assert disk.present()[0] == disk.of([specs[0], specs[1]])[0]
        assert disk.told == [gone]
        assert [item.used_seconds for item in await disk.housekeeping.make_room(100 * MIB)] == [400]
        assert disk.present()[0] == disk.of([specs[1]])[0]
    finally:
        small.close()


# On a real agent


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="session")
async def test_a_deleted_models_image_goes_when_its_last_request_has_ended(world):
    await world.agent.prune(dry_run=False)
    await world.apply(world.manifest("stays", seed=11), world.manifest("goes", seed=12))
    body = json.dumps(command("sleep:2")).encode()
    headers = {"Content-Type": "application/json"}
    request = InferenceRequest("goes", "POST", "/v2/models/goes/infer", headers, body, None)
    async with world.agent.open(request) as response:
        await world.apply(world.manifest("stays", seed=11))
        assert (await world.agent.prune(dry_run=False))["removed"] == []
        assert response.status == 200
        assert b"sum" in b"".join([chunk async for chunk in response.body])
    await world.until(lambda: len(world.broker.instances) == 1, "the deleted model is gone")
    would = await world.agent.prune(dry_run=True)
    assert [(item["kind"], item["what"]) for item in would["removed"]] == [("image", "default/goes (float32)")]
    assert would["bytes"] >= 8 * MIB
    assert await world.agent.prune(dry_run=False) == would
    assert (await world.agent.prune(dry_run=False))["removed"] == []
    await world.agent.evict("default", "stays", 60)
    assert await world.ask("stays") == pytest.approx(world.answer(8, 11))


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="session")
async def test_a_deleted_model_keeps_its_image_and_says_so(world):
    """What was deleted by mistake is back at once. Source: kubeai#406."""
    await world.apply(world.manifest("back", seed=13))
    await world.apply()
    await world.until(lambda: not world.broker.instances, "the deleted model is gone")
    await world.apply(world.manifest("back", seed=13))
    told = [event async for event in world.agent.events.follow(follow=False) if event.name == "back"]
    assert [event.reason for event in told].count("Publishing") == 1
    removed = next(event.message for event in told if event.reason == "Removed")
    assert removed.startswith(
        "it was removed from the models that are served here; its image is kept until `omni prune`"
    )
    assert await world.ask("back") == pytest.approx(world.answer(8, 13))


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="session")
async def test_models_come_up_while_everything_is_pruned_again_and_again(world):
    async def prune() -> None:
        while True:
            await world.agent.prune(dry_run=False)

    pruning = asyncio.create_task(prune())
    try:
        await world.apply(*[world.manifest(f"new{seed}", seed=seed) for seed in (21, 22, 23)])
        for seed in (21, 22, 23):
            assert world.report(f"new{seed}").ready, world.report(f"new{seed}")
            assert await world.ask(f"new{seed}") == pytest.approx(world.answer(8, seed))
    finally:
        pruning.cancel()
        await asyncio.wait([pruning])
