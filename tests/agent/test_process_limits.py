"""What one model's process may use: memory, processes, files; and how its memory is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.children import children, ended, run
from omnimodel.agent.process import ProcessExit
from omnimodel.errors import Reason
from omnimodel.isolation import Mount
from omnimodel.protocol.process import Ping

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make control groups and users"),
]


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


async def test_an_empty_mount_has_its_size(tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    fill = "f = open('/cache/x', 'wb', buffering=0)\nw = 0\ntry:\n while True: w += f.write(bytes(65536))\n"
    fill += "except OSError as error: answer.update(w=w, e=error.strerror)"
    async with children(tmp_path) as many:
        process = await many.make(mounts=(Mount(str(place), "/cache", read_only=False, size_bytes=1 << 20),))
        answer = await run(process, fill)
    assert (answer["w"], answer["e"]) == (1 << 20, "No space left on device")
