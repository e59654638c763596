"""The same life further down the ladder: an agent that is an ordinary user, or lives in a container.

The agent is a program of its own here, run by the system's Python, because it must have fewer privileges than the
tests, and every user can reach that interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.children import NOTHING
from isolation.attempt import CONTAINER_ROOT, CONTAINER_USER, OPERATOR, PYTHON, ROOT_WITHOUT_SYS_ADMIN, USER, Machine

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="kinds of hosts are made by giving up root's privileges"),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"needs {PYTHON}, which every user can reach"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux"),
]

AGENT = """
import asyncio, json, os, sys
from pathlib import Path
from agent.children import alive, busy, children, run, until
from omnimodel.errors import OmniError
from omnimodel.isolation import Level, seccomp

async def main():
    found = {}
    async with children(Path(sys.argv[1])) as many:
        found["level"] = many.spawner.reached.level
        found["missing"] = many.spawner.reached.missing
        one, two = await many.make(), await many.make()
        found["reached"] = one.reached.level
        found["lacking"] = one.reached.missing
        seen = await run(one, f'''
found = answer
def tried(name, step):
    try:
        found[name] = step() or 'done'
    except OSError as error:
        found[name] = error.strerror
tried('others folder', lambda: os.listdir({str(many.spawner.state_dir / "run" / two.instance)!r}))
tried('store', lambda: os.listdir({str(many.spawner.state_dir / "store")!r}))
tried('journal', lambda: os.listdir({str(many.spawner.state_dir / "journal")!r}))
tried('environ', lambda: open('/proc/{two.pid}/environ').read())
tried('kill', lambda: os.kill({two.pid}, 9) or 'done')
tried('temporary', lambda: __import__('tempfile').TemporaryFile().write(b'x'))
''')
        found["seen"] = seen
        seconds = str(1_000_000 + os.getpid())  # others on this machine sleep, too
        answer = await run(one, f'''
import subprocess
import sys
for detach in (False, True):
    subprocess.Popen(['sleep', {seconds!r}], start_new_session=detach)
answer['uid'] = os.getuid()
''')
        found["uids"] = [answer["uid"], os.getuid()]
        def sleepers():
            for name in os.listdir('/proc'):
                if name.isdigit() and alive(int(name)):
                    try:
                        text = Path(f'/proc/{name}/cmdline').read_bytes()
                    except OSError:
                        continue
                    if text == b'sleep\\0' + seconds.encode() + b'\\0':
                        yield int(name)
        await until(lambda: len(list(sleepers())) == 2)  # the kernel shows the arguments a moment after the start
        async with busy(one, "while True: pass"):
            one.kill()
            await one.exited
        await one.released
        await until(lambda: not list(sleepers()))
        try:
            strict = await many.make(minimum=Level.NAMESPACES)
            found["minimum"] = "started"
            await strict.stop(1.0)
            await strict.released
        except OmniError as error:
            found["minimum"] = str(error)
        greedy = await many.make(memory_bytes=48 << 20)
        try:
            await run(greedy, "held = bytearray(b'x') * (100 << 20); import time; time.sleep(600)")
        except OmniError as error:
            found["greedy"] = error.reason
        two.kill()
        await two.released
        await greedy.released
        found["left"] = many.left()
    print(json.dumps(found))

if sys.argv[2] == "filtered":
    seccomp.install(internet=True)
asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A state directory that every user can reach."""
    path = Path("/var/tmp") / f"omnimodel-levels-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o755)
    (path / "store").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("machine", "python", "level"),
    [
        pytest.param(ROOT_WITHOUT_SYS_ADMIN, PYTHON, "namespaces", id="root without CAP_SYS_ADMIN"),
        pytest.param(USER, PYTHON, "namespaces", id="an ordinary user"),
        pytest.param(CONTAINER_ROOT, PYTHON, "landlock", id="root in a container"),
        pytest.param(CONTAINER_ROOT, sys.executable, "landlock", id="root in a container, with this interpreter"),
        pytest.param(CONTAINER_USER, PYTHON, "landlock", id="a user in a container"),
    ],
)
def test_an_agent_with_fewer_privileges(folder: Path, machine: Machine, python: str, level: str) -> None:
    if "user" in machine.name:
        for path in (folder, folder / "store"):
            os.chown(path, 1000, 1000)
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [*machine.command, python, "-P", "-c", AGENT, str(folder), "filtered" if machine.filtered else "free"],
        env={"PATH": os.defpath, "PYTHONPATH": f"{OPERATOR}:{tests}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        cwd="/",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert (found["level"], found["reached"]) == (level, level)
    assert found["seen"]["others folder"] in {"Permission denied", "No such file or directory"}
    assert found["seen"]["store"] in {"Permission denied", "No such file or directory"}
    assert found["seen"]["journal"] in {"Permission denied", "No such file or directory"}
    assert found["seen"]["environ"] in {"Permission denied", "No such file or directory"}
    assert found["seen"]["kill"] in {"Operation not permitted", "No such process"}
    assert found["seen"]["temporary"] == 1
    assert found["greedy"] == "OutOfMemory"
    assert found["left"] == NOTHING
    model, agent = found["uids"]
    assert (model == agent) == any(sentence.startswith("a user of its own") for sentence in found["lacking"])
    assert python != PYTHON or (model == agent) == ("user" in machine.name)
    if level == "namespaces":
        assert found["minimum"] == "started"
    else:
        assert "level namespaces is asked for, but this machine gives landlock" in found["minimum"]
        assert any("a pid namespace" in sentence for sentence in found["missing"])
