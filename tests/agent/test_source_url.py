"""Sources of the web: real HTTP; a download goes on where it was and is never taken for more than it is."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from agent.children import until
from agent.fetching import CONTENT, SUBJECT, SmallDisk, left, sha256
from omnimodel.agent.sources import Sources
from omnimodel.errors import OmniError, Reason, SourceError


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
        self.kept_bytes: int | None = None  # when it is told them, it breaks off only after all it sent was kept

    def keep(self, done: int, total: int) -> None:
        self.kept_bytes = done

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
            if self.kept_bytes is not None:
                await until(lambda: self.kept_bytes == end)
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
    server.break_at, server.kept_bytes = [300_000, 100_000], 0
    found = await sources.fetch(SUBJECT, url(server), server.keep)
    assert found.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=300000-", "bytes=400000-"]


async def test_it_goes_on_after_a_restart_of_the_agent(sources, server):
    server.break_at, server.kept_bytes = [300_000] + [0] * 20, 0
    with pytest.raises(SourceError, match="cannot be downloaded"):
        await sources.fetch(SUBJECT, url(server), server.keep)
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
