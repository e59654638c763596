"""Sources of the hub, by its HTTP interface, as far as huggingface_hub asks for it."""

from __future__ import annotations

import pytest
from aiohttp import web

from agent.fetching import CONTENT, SUBJECT, sha256
from omnimodel.agent.sources import Sources
from omnimodel.errors import OmniError, Reason, SourceError


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
