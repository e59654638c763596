"""Where things are fetched from: a package index, logins, authorities and a proxy that the pool names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save

from agent.fetching import SUBJECT, sha256, wheel
from agent.package_index import PackageIndex, make_certificates
from agent.world import HANDLER, MIB, pool
from omnimodel.agent.environments import Environments
from omnimodel.agent.origins import CERTIFICATES, HUB_TOKEN, NETRC, Origins, write_files
from omnimodel.agent.sources import Sources
from omnimodel.api import PoolSources
from omnimodel.errors import SourceError

PASSWORD = "opens-everything"
WEIGHTS = b"w" * 4096


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Wheels and a file, and a user who is set to no index at all."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("PIP_RETRIES", "0")  # that an index does not answer is known at once
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "shelf"
    wheel(folder, entries={"tiny_weights/model/a.bin": WEIGHTS})
    wheel(folder, name="told_words", entries={"told_words.py": b"WORDS = 3\n"})
    (folder / "weights.bin").write_bytes(WEIGHTS)
    return folder


def origins(folder: Path, files: dict[str, bytes] | None = None, **said) -> Origins:
    write_files(folder / "origins", files or {})
    found = Origins(folder / "origins")
    found.follow(PoolSources.model_validate(said))
    return found


async def fetch_everything(tmp_path: Path, where: Origins, url: str) -> None:
    """A package, a file and a requirement."""
    sources = Sources(tmp_path / "sources", where)
    package = {"package": {"name": "tiny-weights", "version": "1.0", "path": "tiny_weights/model"}}
    found = await sources.fetch(SUBJECT, package)
    assert (found / "a.bin").read_bytes() == WEIGHTS
    file = {"url": {"url": f"{url}/files/weights.bin", "sha256": sha256(WEIGHTS)}}
    assert (await sources.fetch(SUBJECT, file)).read_bytes() == WEIGHTS
    environment = await Environments(tmp_path / "environments", where).build(SUBJECT, ["told-words==1.0"])
    assert (environment / "told_words.py").read_text() == "WORDS = 3\n"


async def test_the_index_of_the_pool_counts_and_not_that_of_the_environment(tmp_path, shelf):
    with PackageIndex(shelf) as index:
        await fetch_everything(tmp_path, origins(tmp_path, package_index=f"{index.url}/simple"), index.url)
        assert {"/simple/tiny-weights/", "/simple/told-words/", "/files/weights.bin"} <= set(index.asked)


async def test_a_further_index_has_what_the_first_has_not(tmp_path, shelf):
    own = tmp_path / "own"
    own.mkdir()
    shutil.move(next(shelf.glob("tiny_weights-*")), own)
    shutil.copy(shelf / "weights.bin", own)
    with PackageIndex(shelf) as first, PackageIndex(own) as second:
        where = origins(tmp_path, package_index=f"{first.url}/simple", extra_package_indexes=[f"{second.url}/simple"])
        await fetch_everything(tmp_path, where, second.url)


async def test_logins_come_from_the_file_and_are_shown_nowhere(tmp_path, shelf, caplog):
    caplog.set_level("DEBUG")
    with PackageIndex(shelf, login=("me", PASSWORD)) as index:
        without = origins(tmp_path / "without", package_index=f"{index.url}/simple")
        with pytest.raises(SourceError):
            await fetch_everything(tmp_path / "without", without, index.url)
        logins = f"machine 127.0.0.1 login me password {PASSWORD}\n".encode()
        where = origins(tmp_path, {NETRC: logins}, package_index=f"{index.url}/simple")
        await fetch_everything(tmp_path, where, index.url)
    assert PASSWORD not in caplog.text
    texts = [path for path in tmp_path.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert texts == [tmp_path / "origins" / NETRC]
    assert texts[0].stat().st_mode & 0o777 == 0o600


async def test_a_login_of_the_environment_is_not_told_when_it_fails(tmp_path, shelf, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:{PASSWORD}@127.0.0.1:9/simple")
    said: list[str] = []
    with pytest.raises(SourceError) as caught:
        await Sources(tmp_path / "sources").fetch(SUBJECT, {"package": {"name": "tiny-weights", "version": "1.0"}})
    with pytest.raises(Exception, match="told-words") as second:
        await Environments(tmp_path / "environments").build(SUBJECT, ["told-words==1.0"], said.append)
    for text in (str(caught.value), str(second.value), caplog.text, *said):
        assert PASSWORD not in text


async def test_authorities_of_the_pool_are_trusted(tmp_path, shelf):
    authority, certificate = make_certificates(tmp_path)
    with PackageIndex(shelf, certificate=certificate) as index:
        without = origins(tmp_path / "without", package_index=f"{index.url}/simple")
        with pytest.raises(SourceError):
            await fetch_everything(tmp_path / "without", without, index.url)
        where = origins(tmp_path, {CERTIFICATES: authority.read_bytes()}, package_index=f"{index.url}/simple")
        await fetch_everything(tmp_path, where, index.url)


async def test_the_way_out_is_the_proxy(tmp_path, shelf):
    """No name server knows these hosts: only the proxy can have answered."""
    with PackageIndex(shelf) as proxy:
        where = origins(tmp_path, package_index="http://packages.invalid/simple", proxy={"http": proxy.url})
        await fetch_everything(tmp_path, where, "http://files.invalid")
        assert "http://packages.invalid/simple/tiny-weights/" in proxy.asked
        assert "http://files.invalid/files/weights.bin" in proxy.asked


@pytest.mark.parametrize(
    ("url", "proxied"),
    [
        ("http://files.example.org/x", True),
        ("https://files.example.org/x", False),
        ("http://files.inside.example.org/x", False),
        ("http://127.0.0.1:8080/x", False),
    ],
)
def test_who_is_reached_without_the_proxy(tmp_path, url, proxied):
    where = origins(tmp_path, proxy={"http": "http://proxy:3128", "no_proxy": [".inside.example.org", "127.0.0.1"]})
    assert where.proxy(url) == ("http://proxy:3128" if proxied else None)
    assert where.variables()["no_proxy"] == where.variables()["NO_PROXY"] == ".inside.example.org,127.0.0.1"


def test_what_the_hub_is_told(tmp_path):
    where = origins(tmp_path, {HUB_TOKEN: b"hf_token\n"}, hub_endpoint="https://hub.example.org")
    variables = where.variables()
    assert (variables["HF_ENDPOINT"], variables["HF_TOKEN"]) == ("https://hub.example.org", "hf_token")
    write_files(tmp_path / "origins", {})
    assert "HF_TOKEN" not in where.variables()  # a file that is gone counts no more


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="session")
async def test_a_model_its_code_and_its_weights_come_from_the_index_of_its_pool(world, shelf, tmp_path):
    import numpy as np

    values = np.arange(8 * 262144, dtype=np.float32) % 7
    wheel(shelf, name="sum_weights", entries={"sum_weights/model.safetensors": save({"weight": values})})
    wheel(shelf, name="sum_handler", entries={"sum_handler.py": HANDLER.encode()})
    plain = world.pool
    with PackageIndex(shelf, login=("me", PASSWORD)) as index:
        world.pool = pool(176 * MIB, sources={"packageIndex": f"{index.url}/simple"})
        await world.agent.attach({NETRC: f"machine 127.0.0.1 login me password {PASSWORD}\n".encode()})
        manifest = world.manifest("summed")
        manifest["spec"]["source"] = {"package": {"name": "sum-weights", "version": "1.0", "path": "sum_weights"}}
        manifest["spec"]["runtime"] |= {
            "handler": {"entry": "sum_handler:Handler"},
            "environment": {"requirements": ["sum-handler==1.0"]},
        }
        manifest["spec"]["probe"]["expect"][0]["near"] = float(values.astype(np.float64).sum())
        try:
            await world.apply(manifest)
            assert world.report("summed").ready, world.report("summed")
        finally:
            world.pool = plain
            await world.agent.attach({})
    assert {"/simple/sum-weights/", "/simple/sum-handler/"} <= set(index.asked)
    shown = str([event for _, event in world.agent.events._events]) + str(world.agent.report())
    assert PASSWORD not in shown
