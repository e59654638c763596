"""Packages without a wheel: built in a sandbox, and looked through before they are used."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import socket
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent.children import alive, until
from agent.world import HANDLER, pool
from omnimodel.agent import confinement
from omnimodel.agent.building import Builder, take_over
from omnimodel.agent.environments import Environments
from omnimodel.agent.layout import Layout
from omnimodel.agent.origins import HUB_TOKEN, Origins, write_files
from omnimodel.agent.spawner import Spawner
from omnimodel.agent.zygotes import Zygotes
from omnimodel.api import OmniModel
from omnimodel.errors import OmniError, Reason
from omnimodel.isolation import Level, SandboxPlan
from omnimodel.render import render_process

SUBJECT = "OmniModel default/tiny"
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make sandboxes with users of their own")

BACKEND = """
import json, os, zipfile

def build_wheel(directory, settings=None, metadata=None):
    found = {"uid": os.getuid(), "names": sorted(os.environ), "saw": [], "wrote": []}
    for path in PATHS:
        for kind, mode in (("saw", "r"), ("wrote", "a")):
            try:
                open(path, mode).close()
                found[kind].append(path)
            except OSError:
                pass
    WORK
    info = "told-1.0.dist-info/"
    with zipfile.ZipFile(directory + "/told-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("told.json", json.dumps(found))
        wheel.writestr("told.py", "")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: told\\nVersion: 1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "told-1.0-py3-none-any.whl"
"""
PROJECT = """
[project]
name = "told"
version = "1.0"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


def sdist(folder: Path, paths: list[str], work: str) -> None:
    """A source distribution that tells what its setup code could see and do."""
    place = folder / "simple" / "told"
    place.mkdir(parents=True)
    backend = BACKEND.replace("PATHS", repr(paths)).replace("WORK", work)
    metadata = "Metadata-Version: 2.1\nName: told\nVersion: 1.0\n"
    with tarfile.open(place / "told-1.0.tar.gz", "w:gz") as archive:
        for name, text in {"pyproject.toml": PROJECT, "backend.py": backend, "PKG-INFO": metadata}.items():
            entry = tarfile.TarInfo(f"told-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served as the only package index."""
    folder = tmp_path / "index"
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache-of-the-agent"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-agent")
    yield folder
    server.shutdown()
    server.server_close()


@asynccontextmanager
async def building(tmp_path: Path) -> AsyncIterator[tuple[Environments, object, Spawner]]:
    """Environments of an agent that has a token, and what builds for them."""
    layout = Layout(tmp_path / "state")
    layout.make()
    write_files(layout.origins, {HUB_TOKEN: b"of-the-pool"})
    manifest = {
        "metadata": {"name": "tiny"},
        "spec": {
            "source": {"path": str(tmp_path)},
            "runtime": {"engine": "python", "task": "infer", "handler": {"entry": "h:H", "files": {"h.py": ""}}},
        },
    }
    model = OmniModel.model_validate(manifest).with_metadata(
        uid="1", generation=1, creation_timestamp="2026-01-01T00:00:00Z"
    )
    spec = render_process(model, pool(1 << 30)).spec.to_dict()
    spawner = await Spawner.open(layout.root, Zygotes(layout.root, preload=()))
    builder = Builder(layout, spawner)
    try:
        environments = Environments(layout.environments, Origins(layout.origins))
        yield environments, lambda *how: builder.uv(SUBJECT, spec, *how), spawner
    finally:
        await spawner.close()


@pytest.mark.root
@root
@pytest.mark.parametrize("level", [Level.NAMESPACES, Level.LANDLOCK])
async def test_setup_code_runs_in_a_sandbox_without_the_agents_files_and_secrets(
    tmp_path: Path, index: Path, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "SandboxPlan", functools.partial(SandboxPlan, wanted=level))
    secret, outside = tmp_path / "state/origins" / HUB_TOKEN, tmp_path / "outside"
    outside.write_text("")
    outside.chmod(0o666)
    sdist(index, [str(secret), str(outside), "/etc/shadow"], "")
    said: list[str] = []
    async with building(tmp_path) as (environments, build, _):
        folder = await environments.build(SUBJECT, ["told==1.0"], said.append, build)
    found = json.loads((folder / "told.json").read_text())
    if level is Level.NAMESPACES:  # below it, a user of its own could not reach this folder of root's
        assert found["uid"] not in {0, os.getuid()}
    assert (found["saw"], found["wrote"]) == ([], [])
    assert not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "NETRC"} & set(found["names"])
    assert sorted(path.name for path in folder.parent.iterdir()) == ["environment.json", "packages"]
    assert {path.stat().st_uid for path in folder.rglob("*")} == {0}, "the model's user cannot change it"
    assert any("told==1.0" in line for line in said)


@pytest.mark.root
@root
@pytest.mark.parametrize(
    ("work", "says"),
    [
        pytest.param("os.mkfifo(os.environ['HOME'] + '/../packages/told_pipe')", "told_pipe", id="a pipe"),
        pytest.param("os.symlink('/etc', os.environ['HOME'] + '/../packages')", "packages", id="a link for the folder"),
        pytest.param("raise SystemExit('no compiler here')", "no compiler here", id="a build that fails"),
    ],
)
async def test_what_a_build_leaves_is_looked_through(tmp_path: Path, index: Path, work: str, says: str) -> None:
    sdist(index, [], work.replace("os.mkfifo(", "os.makedirs(os.environ['HOME'] + '/../packages'); os.mkfifo("))
    async with building(tmp_path) as (environments, build, _):
        with pytest.raises(OmniError, match=says) as caught:
            await environments.build(SUBJECT, ["told==1.0"], build=build)
        assert [path.suffix for path in environments.root.iterdir()] == [".lock"]
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED


@pytest.mark.root
@pytest.mark.slow
@root
@pytest.mark.asyncio(loop_scope="session")
async def test_a_model_is_served_with_a_package_that_was_built_with_its_tools(world) -> None:
    """docopt has no wheel, and is built by setuptools, which the build fetches."""
    handler = HANDLER.replace("import torch\n", "import torch\nimport docopt\n", 1)
    manifest = world.manifest("built", handler=handler)
    manifest["spec"]["runtime"]["environment"] = {"requirements": ["docopt==0.6.2"]}
    await world.apply(manifest, wait=False)
    await world.until(lambda: world.report("built").phase in {"serving", "idle", "failed"}, "built", 450)
    assert world.report("built").ready, world.report("built")
    assert await world.ask("built") == pytest.approx(world.answer(8, 1))
    assert len(world.agent._spawner.zygotes.processes()) == 1, "nothing of the environment is imported outside"


@pytest.mark.root
@root
async def test_a_build_ends_with_its_agent(tmp_path: Path, index: Path) -> None:
    sdist(index, [], "__import__('time').sleep(600)")
    said: list[str] = []
    async with building(tmp_path) as (environments, build, spawner):
        making = asyncio.create_task(environments.build(SUBJECT, ["told==1.0"], said.append, build))
        await until(lambda: any("Building told" in line for line in said))
        (process,) = spawner._processes
        inside = process.group.pids()
        process._channel.sock.shutdown(socket.SHUT_RDWR)  # what the kernel does for an agent that was killed
        with pytest.raises(OmniError, match="exit status 1"):
            await making
        await until(lambda: not [pid for pid in inside if alive(pid)])


async def test_without_a_sandbox_nothing_is_built(tmp_path: Path, index: Path) -> None:
    ran = tmp_path / "ran"
    sdist(index, [], f"open({str(ran)!r}, 'w')")
    environments = Environments(tmp_path / "environments")
    with pytest.raises(OmniError, match="no usable wheels"):
        await environments.build(SUBJECT, ["told==1.0"])
    with pytest.raises(OmniError, match="by an address"):
        await environments.build(SUBJECT, [f"told @ file://{index}/simple/told/told-1.0.tar.gz"])
    assert not ran.exists()


def test_a_second_name_of_a_file_elsewhere_is_not_taken_over(tmp_path: Path) -> None:
    built = tmp_path / "built"
    built.mkdir()
    (tmp_path / "of-another").write_text("")
    os.link(tmp_path / "of-another", built / "taken")
    with pytest.raises(OmniError, match="'taken', which is no ordinary file"):
        take_over(SUBJECT, built, tmp_path / "packages")
