"""The life of one model's process, with real forks, groups, sockets and ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from agent.children import NOTHING, SUBJECT, alive, busy, children, children_of, code, ended, run, until
from omnimodel.agent.process import ModelProcess, ProcessExit
from omnimodel.errors import ProcessError, Reason
from omnimodel.protocol.process import Evict, Ping, Start, Wake

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make control groups and users"),
]

# Commands


async def test_it_starts_answers_stops_and_leaves_nothing(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        before = len(os.listdir("/proc/self/fd"))
        process = await many.make()
        assert (await process.command(Ping())).ok
        assert alive(process.pid)
        assert many.left()["journal"] == [f"{process.instance}.json"]
        end = await process.stop(1.0)
        await process.released
        assert (end.problem, end.status) == ("it was stopped", 0)
        assert not alive(process.pid)
        assert many.left() == NOTHING
        base = await many.make()  # the zygote's own descriptors are in both counts from here on
        await base.stop(1.0)
        await base.released
        assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_commands_under_way_get_their_own_replies(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        answers = await asyncio.gather(*(run(process, f"answer['x'] = {number}") for number in range(20)))
        assert [answer["x"] for answer in answers] == list(range(20))


async def test_progress_reaches_the_one_who_waits(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        said: list[tuple[str, int, int]] = []
        await process.command(
            code("for n in range(3): progress('copying', n, 3)"),
            progress=lambda step: said.append((step.stage, step.done, step.total)),
        )
        assert said == [("copying", 0, 3), ("copying", 1, 3), ("copying", 2, 3)]


async def test_start_carries_the_listening_socket(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        serve = "import socket, threading\nserver = socket.socket(fileno=received[0])\nserver.setblocking(True)\n"
        serve += "threading.Thread(target=lambda: server.accept()[0].sendall(b'served'), daemon=True).start()"
        reply = await process.command(Start({"code": serve}, "", 0, 1 << 20, "host", 1))
        assert reply.values["received"] == 1
        reader, writer = await asyncio.open_unix_connection(str(process.socket_path))
        assert await reader.readexactly(6) == b"served"
        writer.close()


async def test_a_state_directory_may_lie_deep(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-rather-long-name"] * 8)
    deep.mkdir(parents=True)
    async with children(deep) as many:
        process = await many.make()
        _, writer = await asyncio.open_unix_connection(str(process.socket_path))
        writer.close()
        await process.stop(1.0)
        await process.released
        assert many.left() == NOTHING


async def test_a_refused_command_says_why(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        with pytest.raises(ProcessError, match="ValueError: no such weights") as caught:
            await run(process, "raise ValueError('no such weights')")
        assert caught.value.reason is Reason.HANDLER_FAILED
        assert caught.value.subject == SUBJECT
        assert any("Traceback" in note for note in caught.value.__notes__)
        assert (await process.command(Ping())).ok


async def test_a_command_for_another_process_is_refused(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        process._conversation._instance = "its-predecessor"
        with pytest.raises(ProcessError, match="meant for another"):
            await process.command(Ping())


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(Start({}, "", 0, 1, "host", 1), Reason.LOAD_TIMEOUT, id="a load"),
        pytest.param(Wake([]), Reason.LOAD_TIMEOUT, id="a wake"),
        pytest.param(Evict(), Reason.EVICT_TIMEOUT, id="an evict"),
    ],
)
async def test_no_command_waits_for_ever(tmp_path: Path, command: object, reason: Reason) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        async with busy(process, "import time; time.sleep(600)"):
            with pytest.raises(ProcessError, match="did not answer") as caught:
                await process.command(command, (), 0.2)
        assert caught.value.reason is reason


# Ends


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        pytest.param("print('bye'); os._exit(3)", 3, "exit status 3; it said 'bye'", id="exits"),
        pytest.param("raise SystemExit(4)", 4, "exit status 4", id="raises SystemExit"),
        pytest.param("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "SIGSEGV", id="touches a bad address"),
        pytest.param("os.abort()", -signal.SIGSEGV, "Aborted", id="aborts, as the first of its namespace"),
    ],
)
async def test_an_end_in_the_middle_of_a_command_is_explained(
    tmp_path: Path, text: str, status: int, says: str
) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        with pytest.raises(ProcessExit, match=says) as caught:
            await run(process, text)
        assert caught.value.status == status
        assert caught.value.reason is Reason.CRASHED
        with pytest.raises(ProcessExit):
            await process.command(Ping())
        await process.released
        assert many.left() == NOTHING


async def test_a_kill_from_outside_is_told_apart(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        os.kill(process.pid, signal.SIGKILL)
        end = await ended(process)
        assert end.status == -signal.SIGKILL
        assert "from outside" in end.problem


async def test_sigterm_ends_it_although_it_is_the_first_of_its_namespace(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        os.kill(process.pid, signal.SIGTERM)
        assert (await ended(process)).status == 128 + signal.SIGTERM


async def test_a_process_that_ignores_everything_is_killed_in_bounded_time(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        stubborn = (
            "import signal\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\n"
        )
        async with busy(process, stubborn + "while True: pass"), asyncio.timeout(60):
            end = await process.stop(0.2)
        assert end.status == -signal.SIGKILL
        await process.released
        assert many.left() == NOTHING


async def test_a_process_that_hangs_up_is_ended(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        async with busy(process, "import time; channel.close(); time.sleep(600)"):
            end = await ended(process)
        assert end.status == -signal.SIGKILL
        assert "closed its control channel" in end.problem


async def test_its_children_go_with_it(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        answer = await run(process, "import subprocess; answer['p'] = subprocess.Popen(['sleep', '600']).pid")
        assert answer["p"] > 1
        inside = process.group.pids()
        assert len(inside) == 2
        process.kill()
        await ended(process)
        await process.released
        assert not [pid for pid in inside if alive(pid)]


async def test_a_waiter_that_gives_up_does_not_spoil_the_end(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        for waited in ("exited", "released"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await getattr(process, waited)
        process.kill()
        assert (await ended(process)).problem == "it was killed by the agent"
        await process.released
        assert many.left() == NOTHING


async def test_sigkill_at_random_moments_leaves_nothing(tmp_path: Path) -> None:
    generator = random.Random(7)
    async with children(tmp_path) as many:
        await many.spawner.zygotes.start()
        for _ in range(20):
            process = await many.make()
            async with busy(process, "while True: bytearray(1 << 20)"):
                await asyncio.sleep(generator.random() * 0.02)
                os.kill(process.pid, signal.SIGKILL)
                await ended(process)
            await process.released
        assert many.left() == NOTHING


async def test_a_spawn_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    generator = random.Random(7)
    async with children(tmp_path) as many:
        await many.spawner.zygotes.start()
        for _ in range(20):
            spawning = asyncio.create_task(many.make())
            await asyncio.sleep(generator.random() * 0.03)
            spawning.cancel()
            made = (await asyncio.gather(spawning, return_exceptions=True))[0]
            if isinstance(made, ModelProcess):
                made.kill()
                await made.released
        assert many.left() == NOTHING
        zygote, _ = many.spawner.zygotes.processes()[0]
        await until(lambda: not set(children_of(zygote)) - many.spares())
