"""What a model prints: kept, bounded, and no burden to others."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from agent.children import children, code, run, until
from omnimodel.agent import output
from omnimodel.agent.logs import follow_log
from omnimodel.agent.output import OutputPump
from omnimodel.protocol.process import Ping


async def test_lines_are_written_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    pump = OutputPump()
    kept = pump.add(tmp_path / "model.log")
    for number in range(100):
        os.write(kept.write_descriptor, f"line {number}\n".encode())
    kept.close_writer()
    async with asyncio.timeout(10):
        await kept.ended
    assert kept.tail(2) == "line 98\nline 99"
    assert (tmp_path / "model.log").read_text().splitlines() == [f"line {number}" for number in range(100)]
    pump.close()


def test_a_thread_that_ends_before_it_is_woken_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    others, write = set(threading.enumerate()), os.write
    pump = OutputPump()
    (reading,) = set(threading.enumerate()) - others

    def late(descriptor: int, data: bytes) -> int:
        write(descriptor, data)
        reading.join(10)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", late)
    pump.close()
    assert not reading.is_alive()


async def test_a_file_is_turned_over_at_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "FILE_BYTES", 1000)
    pump = OutputPump()
    kept = pump.add(tmp_path / "model.log")
    for number in range(30):
        os.write(kept.write_descriptor, b"%099d\n" % number)
        await until(lambda number=number: kept.tail(1).endswith(f"{number:099d}"))
    kept.close_writer()
    await kept.ended
    pump.close()
    assert sorted(os.listdir(tmp_path)) == ["model.log", "model.log.1"]
    assert (tmp_path / "model.log").read_text().endswith("29\n")
    assert all((tmp_path / name).stat().st_size <= 1000 for name in os.listdir(tmp_path))


async def test_a_full_disk_does_not_stop_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "full.log"
    path.symlink_to("/dev/full")
    pump = OutputPump()
    kept = pump.add(path)
    for _ in range(64):
        await asyncio.to_thread(os.write, kept.write_descriptor, bytes(65536))
    os.write(kept.write_descriptor, b"\nstill read\n")
    await until(lambda: kept.tail(1) == "still read")
    kept.close_writer()
    await kept.ended
    pump.close()


async def test_a_log_that_could_not_be_turned_over_is_written_again_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(output, "FILE_BYTES", 1000)
    in_the_way = tmp_path / "model.log.1"
    in_the_way.mkdir()
    pump = OutputPump()
    kept = pump.add(tmp_path / "model.log")

    async def say(number: int) -> None:
        os.write(kept.write_descriptor, b"%099d\n" % number)
        await until(lambda: kept.tail(1).endswith(f"{number:099d}"))

    for number in range(20):
        await say(number)
    in_the_way.rmdir()
    await say(20)
    kept.close_writer()
    await kept.ended
    pump.close()
    # What was said last is told before it is written: the 19th line may have come to be written with the way free.
    assert (tmp_path / "model.log").read_text() in {f"{20:099d}\n", f"{19:099d}\n{20:099d}\n"}
    assert in_the_way.read_text().startswith(f"{0:099d}\n")
    assert len(caplog.records) == 1, "one warning, not one for each line"


async def test_following_loses_nothing_to_a_rotation_or_to_a_fast_writer(tmp_path: Path) -> None:
    path = tmp_path / "model.log"
    path.write_bytes(b"before\n")
    following = follow_log(path, tail=1, follow=True)
    assert await anext(following) == b"before\n"
    wanted = b"".join(b"%099d\n" % number for number in range(20_000))
    with path.open("ab") as file:
        file.write(wanted[:1_500_000])
    path.rename(tmp_path / "model.log.1")
    path.write_bytes(wanted[1_500_000:])
    found = b""
    async with asyncio.timeout(60):
        while len(found) < len(wanted):
            found += await anext(following)
    await following.aclose()
    assert found == wanted


async def test_a_log_that_begins_later_is_followed_from_its_beginning(tmp_path: Path) -> None:
    following = follow_log(tmp_path / "model.log", tail=10, follow=True)
    first = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    (tmp_path / "model.log").write_bytes(b"first\n")
    async with asyncio.timeout(60):
        assert await first == b"first\n"
    await following.aclose()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces and users")
async def test_printing_a_gigabyte_hurts_nobody(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        loud, neighbour = await many.make(), await many.make()
        text = "line = b'x' * 65535 + b'\\n'\nfor _ in range(16384): os.write(1, line)\nos.write(1, b'the end\\n')"
        printing = asyncio.create_task(loud.command(code(text), (), 120))
        while not printing.done():
            assert (await neighbour.command(Ping(), (), 10)).ok
            await asyncio.sleep(0.05)
        await printing
        await run(loud, "print('afterwards', flush=True)")
        await until(lambda: loud.output.tail(1) == "afterwards")
        await loud.stop(1.0)
        await loud.released
        logs = list((tmp_path / "logs").glob("default.smollm2.log*"))
        assert sum(path.stat().st_size for path in logs) <= 2 * output.FILE_BYTES + 4096
        assert b"bytes of output dropped" in b"".join(path.read_bytes() for path in logs)
