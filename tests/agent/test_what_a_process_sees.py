"""From manifest to sandbox: what the process of a model finds, as the model itself tells it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent.world import MIB, World, pool
from omnimodel.agent.limits import Groups
from omnimodel.isolation import Level

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

# Evaluates what it is asked, so that a test can look at anything a process sees.
TELLS = """
import contextlib
import json
import os
import resource
import shutil
import socket
import time

import torch
from omnimodel.runtime.sdk import Model


def read(path):
    with open(path) as file:
        return file.read()


def attempt(function, *arguments):
    try:
        function(*arguments)
        return "done"
    except OSError as error:
        return type(error).__name__


def write(path, count=1):
    with open(path, "wb") as file:
        file.write(bytes(count))


def connect(kind, address):
    with socket.socket(kind) as connection:
        connection.settimeout(10)
        connection.connect(tuple(address) if isinstance(address, list) else address)


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Handler(Model):
    def build(self):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.empty(self.options["mib"] * 262144))
        return module

    def predict(self, command: str) -> dict[str, str]:
        return {"seen": json.dumps(eval(command, globals()))}
"""

CPU_MILLIS = 200


async def see(world: World, name: str, expression: str) -> Any:
    """What the model finds when it evaluates a Python expression."""
    async with world.request(name, expression) as response:
        body = b"".join([chunk async for chunk in response.body])
    assert response.status == 200, body
    return json.loads(json.loads(body)["outputs"][0]["data"][0])


def without_probe(manifest: dict) -> dict:
    del manifest["spec"]["probe"]
    return manifest


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def seen(running, tmp_path_factory):
    """A model with every field that its process can see, and a neighbour."""
    world, before = running, running.pool
    if world.agent._spawner.reached.level is not Level.NAMESPACES:
        pytest.skip("this machine gives no namespaces")
    volume = tmp_path_factory.mktemp("volume")
    for folder in ("voices", "kept"):
        (volume / folder).mkdir()
        (volume / folder).chmod(0o777)
        (volume / folder / "name.txt").write_text(folder)
        (volume / folder / "name.txt").chmod(0o666)
    world.pool = pool(
        176 * MIB,
        volumes=[{"name": "data", "path": str(volume), "readOnly": False}],
        isolation={"level": "namespaces"},
    )
    world.config = {
        "configmaps": {"settings": {"colour": b"blue", "raw": b"\xff\x00"}},
        "secrets": {"hub": {"token": b"s3cret"}},
    }
    manifest = world.manifest("tells", handler=TELLS)
    world.volume = volume
    manifest["spec"] |= {
        "mounts": [
            {"name": "weights", "source": True, "path": "/weights"},
            {"name": "voices", "source": {"volume": {"name": "data", "subPath": "voices"}}, "path": "/voices"},
            {
                "name": "kept",
                "source": {"volume": {"name": "data", "subPath": "kept"}},
                "path": "/kept",
                "readOnly": False,
            },
            {"name": "settings", "source": {"configMap": {"name": "settings"}}, "path": "/settings"},
            {"name": "hub", "source": {"secret": {"name": "hub"}}, "path": "/hub"},
            {"name": "room", "source": {"empty": {"size": "4Mi"}}, "path": "/room"},
            {"name": "labels", "source": {"files": {"labels.txt": "cat\ndog\n"}}, "path": "/labels"},
        ],
        "limits": {"tmp": "6Mi", "shm": "3Mi", "processes": 48, "deadline": "120s"},
        "resources": {**manifest["spec"]["resources"], "hostMemory": "320Mi", "cpu": f"{CPU_MILLIS}m"},
    }
    manifest["spec"]["runtime"] |= {
        "workingDir": "/voices",
        "env": {
            "PLAIN": "{{name}} as it is",
            "COLOUR": {"configMapKeyRef": {"name": "settings", "key": "colour"}},
            "TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
        },
    }
    world.tells = without_probe(manifest)
    world.talks = without_probe(world.manifest("talks", seed=2, handler=TELLS, runtime={"allowNetwork": True}))
    world.talks["spec"]["runtime"]["handler"] = manifest["spec"]["runtime"]["handler"]
    yield world
    world.pool, world.config = before, {"configmaps": {}, "secrets": {}}


@pytest_asyncio.fixture(loop_scope="session")
async def world(seen):
    """Both models are there, from the first test to the last."""
    if set(seen.manifests) != {"tells", "talks"}:
        await seen.apply(seen.tells, seen.talks)
        for name in ("tells", "talks"):
            assert seen.report(name).ready, seen.report(name)
    yield seen


async def test_its_mounts_have_what_the_manifest_says(world):
    assert await see(world, "tells", "os.listdir('/weights')") == ["model.safetensors"]
    assert await see(world, "tells", "[read('/voices/name.txt'), read('/kept/name.txt')]") == ["voices", "kept"]
    assert await see(world, "tells", "read('/settings/colour')") == "blue"
    assert await see(world, "tells", "list(open('/settings/raw', 'rb').read())") == [255, 0]
    assert await see(world, "tells", "read('/hub/token')") == "s3cret"
    assert await see(world, "tells", "read('/labels/labels.txt')") == "cat\ndog\n"
    assert await see(world, "tells", "os.listdir('/room')") == []


async def test_it_can_write_where_the_manifest_lets_it_and_nowhere_else(world):
    for path in ("/weights/model.safetensors", "/voices/name.txt", "/settings/colour", "/hub/token", "/labels/new"):
        assert await see(world, "tells", f"attempt(write, {path!r})") != "done", path
    assert await see(world, "tells", "attempt(write, '/kept/new')") == "done"
    assert (world.volume / "kept" / "new").stat().st_uid == await see(world, "tells", "os.getuid()")
    assert not (world.volume / "voices" / "new").exists()
    assert await see(world, "tells", "attempt(write, '/room/small', 1 << 20)") == "done"


@pytest.mark.parametrize(("folder", "mib"), [("/tmp", 6), ("/dev/shm", 3), ("/room", 4)])
async def test_its_own_space_has_the_size_of_the_manifest(world, folder, mib):
    assert await see(world, "tells", f"shutil.disk_usage({folder!r}).total") == mib * MIB
    assert await see(world, "tells", f"attempt(write, '{folder}/large', {(mib + 1) * MIB})") == "OSError"
    assert await see(world, "tells", f"os.unlink('{folder}/large')") is None


async def test_a_secret_is_readable_by_itself_alone(world):
    mode, owner = await see(world, "tells", "[os.stat('/hub/token').st_mode & 0o777, os.stat('/hub/token').st_uid]")
    assert (mode, owner) == (0o400, await see(world, "tells", "os.getuid()"))


async def test_who_it_is(world):
    uids = [await see(world, name, "os.getuid()") for name in ("tells", "talks")]
    assert uids[0] != uids[1]
    assert 0 not in uids
    assert await see(world, "tells", "socket.gethostname()") != await see(world, "talks", "socket.gethostname()")
    assert await see(world, "tells", "os.getcwd()") == "/voices"
    assert await see(world, "talks", "os.getcwd()") == "/tmp"


async def test_its_environment_has_the_values_and_none_of_the_agents(world, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the agent's own")
    found = await see(world, "tells", "dict(os.environ)")
    assert (found["PLAIN"], found["COLOUR"], found["TOKEN"]) == ("tells as it is", "blue", "s3cret")
    assert "HF_TOKEN" not in found
    assert "TOKEN" not in await see(world, "talks", "dict(os.environ)")


async def test_its_limits(world):
    lines = await see(world, "tells", "read('/proc/meminfo').splitlines()")
    assert lines[0].split() == ["MemTotal:", str(320 * 1024), "kB"]
    assert (await see(world, "tells", "resource.getrlimit(resource.RLIMIT_NPROC)"))[0] == 48


async def test_it_sees_its_own_processes_only(world):
    pids = await see(world, "tells", "[int(name) for name in os.listdir('/proc') if name.isdigit()]")
    assert pids == [await see(world, "tells", "os.getpid()")]


async def test_it_sees_nothing_of_its_neighbour(world):
    neighbour = world.instance("talks")
    image, run = str(neighbour.prepared.image.path), world.agent.layout.run
    socket = str(run / f"{neighbour.process.instance}.sock")
    assert {image, socket} <= {str(path) for path in (*world.agent.layout.store.glob("images/*"), *run.iterdir())}
    for path in (image, socket, str(world.agent.layout.root), str(world.folder)):
        assert not await see(world, "tells", f"os.path.exists({path!r})"), path
    assert await see(world, "tells", f"attempt(connect, socket.AF_UNIX, {socket!r})") == "FileNotFoundError"


async def test_it_has_the_network_only_when_the_manifest_allows_it(world):
    async def greet(_reader, writer):
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    address = list(server.sockets[0].getsockname())
    try:
        assert await see(world, "talks", f"attempt(connect, socket.AF_INET, {address})") == "done"
        assert await see(world, "tells", f"attempt(connect, socket.AF_INET, {address})") == "ConnectionRefusedError"
        assert await see(world, "tells", "attempt(connect, socket.AF_INET, ('192.0.2.1', 80))") != "done"
    finally:
        server.close()
        await server.wait_closed()


def _limits_cpu() -> bool:
    found = Groups.detect("/nowhere")
    found.close()
    return any("cpu" in hierarchy.controllers for hierarchy in found.hierarchies)


@pytest.mark.skipif(not _limits_cpu(), reason="no cpu controller that may be used here")
async def test_it_computes_with_no_more_than_its_cores(world):
    def throttled(name: str) -> int:
        folders = [Path(path) for path in world.instance(name).process.group.paths]
        stat = next(folder / "cpu.stat" for folder in folders if (folder / "cpu.stat").exists())
        return int(dict(line.split() for line in stat.read_text().splitlines())["nr_throttled"])

    before = throttled("tells")
    async with asyncio.timeout(120):
        while throttled("tells") == before:
            await see(world, "tells", "burn(0.1)")
    await see(world, "talks", "burn(0.5)")
    assert throttled("talks") == 0  # its manifest names no cores


async def test_code_of_a_handler_comes_from_a_mount(world):
    """The last of the module: it takes the two models away."""
    world.config["configmaps"]["code"] = {"told.py": TELLS.encode()}
    manifest = without_probe(world.manifest("mounted", handler=TELLS))
    manifest["spec"]["runtime"] |= {"handler": {"entry": "told:Handler"}, "environment": {"path": ["/code"]}}
    manifest["spec"]["mounts"] = [{"name": "code", "source": {"configMap": {"name": "code"}}, "path": "/code"}]
    await world.apply(manifest)
    assert world.report("mounted").ready, world.report("mounted")
    assert await see(world, "mounted", "__file__") == "/code/told.py"
    left = [path.name for path in world.agent.layout.run.glob("*.mounts")]
    assert left == [f"{world.instance('mounted').process.instance}.mounts"]  # none of those that published
    await world.apply()
    await world.until(lambda: not world.broker.instances, "all models are gone")
    await world.until(lambda: not list(world.agent.layout.run.glob("*.mounts")), "what was written for them is gone")
