"""The life of one model's process, with real forks, groups, sockets and ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from agent.children import NOTHING, SUBJECT, alive, busy, children, children_of, code, run, until
from omnimodel.agent.process import ModelProcess, ProcessExit
from omnimodel.errors import ProcessError, Reason
from omnimodel.isolation import Mount
from omnimodel.protocol.process import Evict, Ping, Start, Wake

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make control groups and users"),
]


async def ended(process: ModelProcess, seconds: float = 20.0) -> ProcessExit:
    async with asyncio.timeout(seconds):
        return await asyncio.shield(process.exited)


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
        assert (end.expected, end.status) == (True, 0)
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
        process.instance = "its-predecessor"
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
        assert not caught.value.expected
        with pytest.raises(ProcessExit):
            await process.command(Ping())
        await process.released
        assert many.left() == NOTHING


async def test_a_kill_from_outside_is_told_apart(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        os.kill(process.pid, signal.SIGKILL)
        end = await ended(process)
        assert (end.status, end.expected) == (-signal.SIGKILL, False)
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
            assert (await ended(process)).status == -signal.SIGKILL


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("channel.sock.send(b'\\0not json')", id="what is no JSON"),
        pytest.param("channel.sock.send(b'\\0[1]')", id="what is no object"),
        pytest.param("channel.send({'kind': 'reply', 'id': [], 'ok': True})", id="a reply to no number"),
        pytest.param("channel.send({'kind': 'reply', 'surprise': 1})", id="fields that nobody knows"),
        pytest.param("while True: channel.sock.send(b'\\1more')", id="a message without an end"),
        pytest.param("while True: progress('on', 0, 0)", id="a flood"),
        pytest.param("channel.send({}, [0, 1])", id="descriptors that nobody asked for"),
    ],
)
async def test_what_is_no_message_ends_its_sender_alone(tmp_path: Path, text: str) -> None:
    async with children(tmp_path) as many:
        neighbour, hostile = await many.make(), await many.make()
        with pytest.raises(ProcessExit, match="no message") as caught:
            await run(hostile, text)
        assert not caught.value.expected
        assert (await neighbour.command(Ping())).ok


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
        assert (await ended(process)).expected
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
        await until(lambda: not children_of(zygote))


# Limits


async def test_out_of_memory_ends_only_the_one_who_asked_for_too_much(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        neighbour = await many.make()
        greedy = await many.make(memory_bytes=64 << 20)
        with pytest.raises(ProcessExit, match="more than its 64 MiB") as caught:
            await run(greedy, "held = bytearray(b'x') * (200 << 20)", 60)
        assert caught.value.reason is Reason.OUT_OF_MEMORY
        assert "hostMemory" in caught.value.cure
        assert (await neighbour.command(Ping())).ok
        assert not neighbour.exited.done()


async def test_its_tmp_counts_as_its_memory_and_no_more_than_its_size(tmp_path: Path) -> None:
    fill = "written = 0\ntry:\n while True: written += os.write(f, bytes(65536))\nexcept OSError as error:\n"
    fill = "f = os.open('/tmp/x', os.O_CREAT | os.O_WRONLY)\n" + fill + " answer.update(w=written, e=error.strerror)"
    async with children(tmp_path) as many:
        process = await many.make(tmp_bytes=8 << 20)
        before = process.private_bytes()
        assert await run(process, fill) == {"received": 0, "w": 8 << 20, "e": "No space left on device"}
        assert process.private_bytes() - before >= 8 << 20


async def test_without_a_memory_controller_the_agent_watches_the_limit(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        groups = many.spawner.groups
        groups.close()
        groups.hierarchies = tuple(found for found in groups.hierarchies if "memory" not in found.controllers)
        greedy = await many.make(memory_bytes=64 << 20)
        assert greedy.private_bytes() < 64 << 20
        with pytest.raises(ProcessExit) as caught:
            await run(greedy, "held = bytearray(b'x') * (200 << 20)\nimport time; time.sleep(600)", 600)
        assert caught.value.reason is Reason.OUT_OF_MEMORY


@pytest.mark.parametrize("uid", [0, -1], ids=["by its control group alone", "by its user's limit as well"])
async def test_a_fork_bomb_stops_at_its_limit(tmp_path: Path, uid: int) -> None:
    bomb = """
import signal
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError as error:
    answer.update(made=made, error=error.strerror)
"""
    async with children(tmp_path) as many:
        neighbour = await many.make()
        process = await many.make(uid=uid, processes=32)
        answer = await run(process, bomb)
        assert answer["error"] == "Resource temporarily unavailable"
        assert answer["made"] < 32
        assert len(process.group.pids()) <= 32
        assert (await run(neighbour, "answer['pid'] = os.fork() or os._exit(0)"))["pid"] > 0
        process.kill()
        await ended(process)
        await process.released
        assert not process.group.pids()


async def test_its_own_memory_is_counted_and_frames_are_not(tmp_path: Path) -> None:
    size = 32 << 20
    frame = os.memfd_create("frame")
    os.truncate(frame, size)
    os.pwrite(frame, bytes(size), 0)
    shown = os.open(f"/proc/self/fd/{frame}", os.O_RDONLY)
    async with children(tmp_path) as many:
        process = await many.make()
        before = process.private_bytes()
        text = (
            "import mmap\nwindow = mmap.mmap(received[0], 0, prot=mmap.PROT_READ)\nanswer['sum'] = sum(window[::4096])"
        )
        await run(process, text, descriptors=[shown])
        mapped = process.private_bytes()
        await run(process, f"held = bytearray(b'x') * {size}")
        grown = process.private_bytes()
    os.close(frame)
    os.close(shown)
    assert mapped - before < 8 << 20
    assert size - (1 << 20) <= grown - mapped < size + (8 << 20)


async def test_it_cannot_reopen_a_frame_for_writing(tmp_path: Path) -> None:
    frame = os.memfd_create("frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(frame, 0o600)
    os.truncate(frame, 4096)
    shown = os.open(f"/proc/self/fd/{frame}", os.O_RDONLY | os.O_CLOEXEC)
    tries = """
import mmap
for name, step in {
    'reopen': lambda: os.open(f'/proc/self/fd/{received[0]}', os.O_RDWR),
    'write': lambda: os.write(received[0], b'x'),
    'map': lambda: mmap.mmap(received[0], 0),
    'truncate': lambda: os.ftruncate(received[0], 0),
}.items():
    try:
        step(); answer[name] = 'done'
    except OSError as error:
        answer[name] = error.strerror
"""
    async with children(tmp_path) as many:
        answer = await run(await many.make(), tries, descriptors=[shown])
    os.close(frame)
    os.close(shown)
    assert answer["reopen"] == "Permission denied"
    assert "done" not in answer.values()


# What it is given


async def test_secrets_reach_the_process_and_nobody_else(tmp_path: Path) -> None:
    secret = "secret-" + random.Random().randbytes(16).hex()
    async with children(tmp_path) as many:
        process = await many.make(env={"TOKEN": secret})
        other = await many.make()
        assert (await run(process, "answer['t'] = os.environ['TOKEN']"))["t"] == secret
        assert "t" not in await run(other, "if 'TOKEN' in os.environ: answer['t'] = 1")
        for pid in (many.spawner.zygotes.processes()[0][0], other.pid):
            assert secret.encode() not in _memory(pid)
        assert secret.encode() in _memory(process.pid)


def _memory(pid: int) -> bytes:
    """All of a process's own writable memory."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, *_ = line.split()
            if mode.startswith("rw"):
                first, last = (int(part, 16) for part in span.split("-"))
                try:
                    memory.seek(first)
                    found.append(memory.read(last - first))
                except OSError:
                    continue
    return b"".join(found)


async def test_it_inherits_only_the_descriptors_it_was_given(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        await many.make()
        process = await many.make()
        folder = "/proc/self/fd"
        links = (
            f"[os.readlink(f'{folder}/{{n}}') for n in os.listdir('{folder}') if os.path.lexists(f'{folder}/{{n}}')]"
        )
        answer = await run(process, f"answer['fds'] = {links}")
        kinds = sorted(link.split(":")[0] for link in answer["fds"])
        assert kinds == ["/dev/null", "pipe", "pipe", "socket"]


async def test_its_folders_are_given_to_its_user(tmp_path: Path) -> None:
    output = tmp_path / "staging"
    output.mkdir(mode=0o700)
    async with children(tmp_path) as many:
        process = await many.make(writable=(str(output),))
        await run(process, f"open({str(output)!r} + '/image', 'w').write('weights')")
    assert (output / "image").read_text() == "weights"


async def test_libraries_and_programs_inside_work_with_this_interpreter(tmp_path: Path) -> None:
    look = """
import psutil, subprocess, sys, ctypes, ssl, sqlite3, pwd, getpass, tempfile, locale
answer['memory'] = psutil.virtual_memory().total
answer['program'] = subprocess.run([sys.executable, '-c', 'import json; print(7)'], capture_output=True).stdout.decode()
answer['name'] = getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name
answer['folder'] = tempfile.gettempdir(), os.getcwd()
answer['cores'] = len(os.sched_getaffinity(0)) > 0 and os.cpu_count() > 0
answer['program_is_mine'] = os.access(sys.executable, os.X_OK)
"""
    async with children(tmp_path) as many:
        answer = await run(await many.make(memory_bytes=128 << 20), look)
    assert answer["memory"] == 128 << 20
    assert answer["program"] == "7\n"
    assert answer["name"] == ["model", "model"]
    assert answer["folder"] == ["/tmp", "/tmp"]
    assert answer["cores"]
    assert answer["program_is_mine"]


async def test_an_empty_mount_has_its_size(tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    fill = "f = open('/cache/x', 'wb', buffering=0)\nw = 0\ntry:\n while True: w += f.write(bytes(65536))\n"
    fill += "except OSError as error: answer.update(w=w, e=error.strerror)"
    async with children(tmp_path) as many:
        process = await many.make(mounts=(Mount(str(place), "/cache", read_only=False, size_bytes=1 << 20),))
        answer = await run(process, fill)
    assert (answer["w"], answer["e"]) == (1 << 20, "No space left on device")
