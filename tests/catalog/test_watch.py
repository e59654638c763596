"""Watching a folder: every change comes, promptly, and a broken file harms nothing."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from catalog.files import model, write
from omnimodel.catalog import Catalog, Identity, Key, watch

DEADLINE_SECONDS = 20.0


@asynccontextmanager
async def watching(
    folder: Path, identities: Mapping[Key, Identity] | None = None
) -> AsyncIterator[Callable[[Callable[[Catalog], bool]], asyncio.Future[Catalog]]]:
    """A way to wait for a catalogue that fulfils something."""
    stream = watch(folder, identities=identities)

    async def until(wanted: Callable[[Catalog], bool]) -> Catalog:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                catalog = await anext(stream)
                if wanted(catalog):
                    return catalog

    try:
        yield lambda wanted: asyncio.ensure_future(until(wanted))
    finally:
        await stream.aclose()


def names(catalog: Catalog) -> list[str]:
    return [item.metadata.name for item in catalog.models]


async def test_the_first_catalogue_comes_at_once_even_of_an_empty_folder(tmp_path: Path) -> None:
    async with watching(tmp_path) as until:
        assert names(await until(lambda catalog: True)) == []


async def test_added_changed_and_deleted_files_come_as_they_happen(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"))
    async with watching(tmp_path) as until:
        assert names(await until(lambda catalog: True)) == ["one"]
        write(tmp_path, "b.yaml", model("two"))
        await until(lambda catalog: names(catalog) == ["one", "two"])
        write(tmp_path, "a.yaml", model("one", "text-generation"))
        changed = await until(lambda catalog: catalog.models[0].spec.runtime.task == "text-generation")
        assert changed.models[0].metadata.generation == 2
        (tmp_path / "a.yaml").unlink()
        await until(lambda catalog: names(catalog) == ["two"])


async def test_a_broken_file_keeps_its_last_good_version_and_is_listed(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"))
    async with watching(tmp_path) as until:
        first = await until(lambda catalog: True)
        write(tmp_path, "a.yaml", "spec: [\n")
        broken = await until(lambda catalog: bool(catalog.errors))
        assert broken.objects == first.objects
        assert (broken.errors[0].file, broken.errors[0].line) == (str(tmp_path / "a.yaml"), 2)
        write(tmp_path, "a.yaml", model("one"))
        cured = await until(lambda catalog: not catalog.errors)
        assert cured.objects == first.objects


async def test_an_identity_of_an_earlier_run_is_for_who_was_there_then(tmp_path: Path) -> None:
    earlier = Identity("uid-1", "2020-01-01T00:00:00Z", 3, "of an earlier run")
    known = {("OmniModel", "default", name): earlier for name in ("one", "two")}
    write(tmp_path, "a.yaml", model("one"))
    write(tmp_path, "b.yaml", "spec: [\n")
    async with watching(tmp_path, known) as until:
        first = await until(lambda catalog: True)
        assert [item.metadata.uid for item in first.models] == ["uid-1"]
        (tmp_path / "a.yaml").unlink()
        await until(lambda catalog: not catalog.models)
        write(tmp_path, "a.yaml", model("one"))
        again = await until(lambda catalog: bool(catalog.models))
        assert again.models[0].metadata.uid != "uid-1"
        assert again.models[0].metadata.creation_timestamp > "2020-01-01T00:00:00Z"
        write(tmp_path, "b.yaml", model("two"))  # was only broken when this run began
        cured = await until(lambda catalog: len(catalog.models) == 2)
        assert cured.models[1].metadata.uid == "uid-1"


async def test_folders_that_come_later_are_watched_too(tmp_path: Path) -> None:
    async with watching(tmp_path) as until:
        await until(lambda catalog: True)
        (tmp_path / "team").mkdir()
        write(tmp_path / "team", "a.yaml", model("one"))
        await until(lambda catalog: names(catalog) == ["one"])
        write(tmp_path / "team", "a.yaml", model("two"))
        await until(lambda catalog: names(catalog) == ["two"])


async def test_a_folder_that_goes_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "catalog"
    async with watching(folder) as until:
        absent = await until(lambda catalog: True)
        assert str(absent.errors[0]) == f"{folder}: file: does not exist; give a file or a folder"
        folder.mkdir()
        write(folder, "a.yaml", model("one"))
        await until(lambda catalog: names(catalog) == ["one"])
        shutil.rmtree(folder)
        await until(lambda catalog: not catalog.models)
        folder.mkdir()
        write(folder, "a.yaml", model("two"))
        await until(lambda catalog: names(catalog) == ["two"])


async def test_a_config_map_of_a_cluster_changes_by_its_symbolic_link(tmp_path: Path) -> None:
    for version, name in (("..1", "one"), ("..2", "two")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(model(name), encoding="utf-8")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    async with watching(tmp_path) as until:
        assert names(await until(lambda catalog: True)) == ["one"]
        (tmp_path / "..new").symlink_to("..2")
        (tmp_path / "..new").replace(tmp_path / "..data")
        await until(lambda catalog: names(catalog) == ["two"])


async def test_what_is_no_manifest_rings_no_bell(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"))
    async with watching(tmp_path) as until:
        await until(lambda catalog: True)
        (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
        (tmp_path / ".a.yaml.swp").write_text("x", encoding="utf-8")
        write(tmp_path, "a.yaml", model("one"))
        write(tmp_path, "b.yaml", model("two"))
        following = await until(lambda catalog: True)
        assert names(following) == ["one", "two"]


async def test_leaving_the_stream_leaves_no_thread_or_descriptor_behind(tmp_path: Path) -> None:
    process = psutil.Process()
    async with watching(tmp_path) as until:
        await until(lambda catalog: True)
    gc.collect()
    before = process.num_fds()
    for _ in range(5):
        async with watching(tmp_path) as until:
            await until(lambda catalog: True)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while process.num_fds() > before:
            gc.collect()
            await asyncio.sleep(0.01)


async def test_cancelling_who_waits_is_a_normal_end(tmp_path: Path) -> None:
    async def follow() -> None:
        async for _ in watch(tmp_path):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(follow())
    async with asyncio.timeout(DEADLINE_SECONDS):
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
