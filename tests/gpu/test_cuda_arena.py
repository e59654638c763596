"""The arena's arithmetic and its reading, without a driver."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnimodel.errors import ImageError, LedgerError
from omnimodel.memory.codec import Layout
from omnimodel.memory.codec_file import Block, PackedIndex
from omnimodel.memory.devices import cuda_arena, cuda_driver
from omnimodel.memory.devices.cuda_arena import PAGE_BYTES, Arena, Extent, FreeList, pieces
from omnimodel.memory.devices.cuda_copy import Staged, plan
from omnimodel.memory.devices.cuda_fence import arrived

CHUNK = 8 * PAGE_BYTES


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    wishes=st.lists(st.tuples(st.integers(1, 20 * PAGE_BYTES), st.integers(0, 9)), max_size=40),
)
def test_pages_are_conserved_and_never_given_to_two(chunks, wishes):
    free = FreeList()
    ranges = []
    for number, pages in enumerate(chunks):  # some chunks touch each other, some do not
        address = (number * 16 + (4 if number % 2 else 0)) * PAGE_BYTES + PAGE_BYTES
        ranges.append((address, pages * PAGE_BYTES))
        free.add(address, pages * PAGE_BYTES)
    total = sum(chunks) * PAGE_BYTES
    held: list[list[Extent]] = []
    for size, turn in wishes:
        if turn < 4 and held:
            free.give(held.pop(turn % len(held)))
        else:
            room = free.free_bytes
            try:
                held.append(free.take(size))
            except LedgerError:
                assert -(-size // PAGE_BYTES) * PAGE_BYTES > room
                assert free.free_bytes == room
        extents = sorted((e for one in held for e in one), key=lambda e: e.address)
        assert sum(e.size_bytes for e in extents) + free.free_bytes == total
        assert all(a.address + a.size_bytes <= b.address for a, b in pairwise(extents))
        for extent in extents:  # a copy never crosses from one registration into another
            assert any(a <= extent.address and extent.address + extent.size_bytes <= a + s for a, s in ranges)
    for extents in held:
        free.give(extents)
    assert free.free_bytes == total
    assert len(free.take(max(size for _, size in ranges))) == 1  # what was split is whole again


def test_what_is_free_cannot_be_given_back():
    free = FreeList()
    free.add(PAGE_BYTES, CHUNK)
    held = free.take(PAGE_BYTES)
    free.give(held)
    with pytest.raises(LedgerError):
        free.give(held)
    with pytest.raises(LedgerError):
        free.give([Extent(100 * CHUNK, PAGE_BYTES)])
    assert free.free_bytes == CHUNK


def test_pieces_are_the_parts_of_extents_in_order():
    extents = [Extent(1000, 10), Extent(5000, 20), Extent(3000, 30)]
    assert [(p.address, p.size_bytes) for p in pieces(extents, 5, 40)] == [(1005, 5), (5000, 20), (3000, 15)]
    assert pieces(extents, 60, 5) == []


class Registrations:
    """What an arena registers, and a gate that holds the second chunk back."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.gate = threading.Event()
        self.fails = False

    def add(self, address: int, size: int) -> None:
        if self.held:
            assert self.gate.wait(30)
            if self.fails:
                raise LedgerError("driver", "no more")
        self.held[address] = size

    def remove(self, address: int) -> None:
        del self.held[address]


def test_an_image_can_be_staged_while_the_rest_is_still_being_pinned():
    registrations = Registrations()
    arena = Arena(3 * CHUNK, registrations.add, registrations.remove, chunk_bytes=CHUNK)
    early = arena.take(CHUNK)
    assert arena.free_bytes == 2 * CHUNK  # the rest counts, though it is not there yet
    assert arena.pinning == "30 % of 48Mi are pinned for images so far"
    later: list[list[Extent]] = []
    waiter = threading.Thread(target=lambda: later.append(arena.take(2 * CHUNK)))
    waiter.start()
    assert not later
    registrations.gate.set()
    waiter.join(30)
    assert arena.wait(30)
    assert sum(e.size_bytes for e in later[0]) == 2 * CHUNK
    assert arena.pinning == ""
    with pytest.raises(LedgerError, match="hostMemory"):
        arena.take(1)
    arena.give(early)
    assert arena.free_bytes == CHUNK
    arena.close()
    assert registrations.held == {}


def test_an_arena_that_cannot_be_pinned_whole_serves_what_it_has():
    registrations = Registrations()
    registrations.fails = True
    told: list[None] = []
    arena = Arena(3 * CHUNK, registrations.add, registrations.remove, chunk_bytes=CHUNK, told=lambda: told.append(None))
    registrations.gate.set()
    assert not arena.wait(30)
    assert arena.free_bytes == arena.capacity_bytes == CHUNK
    assert len(told) == 2  # of the first chunk, and of the end
    assert arena.pinning.startswith("only 16Mi of 48Mi could be pinned for images: driver: no more")
    arena.give(arena.take(CHUNK))
    with pytest.raises(LedgerError):
        arena.take(CHUNK + 1)
    arena.close()


def can_be_read_directly(path: Path) -> bool:
    """Whether the kernel reads a file past its page cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def test_reading_goes_past_the_page_cache_and_straight_into_pinned_memory(tmp_path, monkeypatch):
    path = tmp_path / "image"
    path.write_bytes(bytes(range(256)) * 64)
    if not can_be_read_directly(path):
        pytest.skip(f"{tmp_path} is on a file system without O_DIRECT")
    registrations, read = Registrations(), []
    arena = Arena(CHUNK, registrations.add, registrations.remove, chunk_bytes=CHUNK)
    extents = arena.take(1 << 14)
    preadv = os.preadv

    def into(descriptor, buffers, offset):
        (chunk, size), found = *registrations.held.items(), np.frombuffer(buffers[0], np.uint8).ctypes.data
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        read.append(bool(flags & os.O_DIRECT) and chunk <= found <= found + len(buffers[0]) <= chunk + size)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", into)
    assert arena.read(str(path), extents, 1 << 14)
    assert read
    assert all(read)
    arena.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_opens_a_file_so_and_does_not_read_it_is_read_as_others_are(tmp_path, monkeypatch, number):
    path, content = tmp_path / "image", bytes(range(250)) * 100
    path.write_bytes(content)
    arena = Arena(CHUNK, lambda *_: None, lambda _: None, chunk_bytes=CHUNK)
    extents, preadv = arena.take(len(content)), os.preadv

    def refuses(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuses)
    if number == errno.EINVAL:
        assert arena.read(str(path), extents, len(content)) is False
        assert bytes(arena.view(extents[0].address, len(content))) == content
    elif can_be_read_directly(path):
        with pytest.raises(ImageError, match="Input/output error"):
            arena.read(str(path), extents, len(content))
    arena.close()


def test_pages_are_touched_first_by_threads_near_the_gpu(monkeypatch):
    one = {min(os.sched_getaffinity(0))}
    seen: list[set[int]] = []
    monkeypatch.setattr(cuda_arena, "_touch", lambda _part: seen.append(os.sched_getaffinity(0)))
    arena = Arena(2 * CHUNK, lambda *_: None, lambda _: None, one, CHUNK)
    assert arena.wait(30)
    assert len(seen) == 8
    assert all(cpus == one for cpus in seen)
    assert os.sched_getaffinity(0) >= one
    arena.close()


@pytest.mark.parametrize(
    ("listed", "near"),
    [
        pytest.param("{0}", {0}, id="one"),
        pytest.param("{0}-{1},9000", {0, 1}, id="a range, and one that this process may not use"),
        pytest.param("9000-9001", {0, 1}, id="none that this process may use"),
        pytest.param("", {0, 1}, id="none, as on a machine without nodes"),
        pytest.param(None, {0, 1}, id="the machine does not say"),
    ],
)
def test_which_processors_are_near_a_gpu(monkeypatch, tmp_path, listed, near):
    allowed = [100, 101]  # whatever this machine has
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    monkeypatch.setattr(cuda_driver, "PCI_DEVICES", tmp_path)
    if listed is not None:
        (tmp_path / "0000:03:00.0").mkdir()
        (tmp_path / "0000:03:00.0" / "local_cpulist").write_text(listed.format(*allowed) + "\n")
    assert cuda_driver.near_cpus("0000:03:00.0") == {allowed[number] for number in near}


@pytest.mark.parametrize("size", [4096, PAGE_BYTES + 4096, 3 * CHUNK - 8192, 5000], ids=str)
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_a_file_is_read_into_scattered_extents(tmp_path, size, folder):
    registrations = Registrations()
    registrations.gate.set()
    arena = Arena(4 * CHUNK, registrations.add, registrations.remove, chunk_bytes=CHUNK)
    assert arena.wait(30)
    holes = [arena.take(PAGE_BYTES) for _ in range(32)]
    for hole in holes[::2] + holes[1:17:2]:
        arena.give(hole)
    content = bytes(range(251)) * (size // 251 + 1)
    path = (tmp_path if folder == "disk" else Path("/dev/shm")) / f"omnimodel-test-arena-{size}"
    try:
        path.write_bytes(content[:size])
        extents = arena.take(size)
        assert arena.read(str(path), extents, size) is can_be_read_directly(path)
        found = b"".join(bytes(arena.view(p.address, p.size_bytes)) for p in pieces(extents, 0, size))
        assert found == content[:size]
        os.truncate(path, size // 2)
        with pytest.raises(ImageError, match="shorter"):
            arena.read(str(path), extents, size)
    finally:
        path.unlink()
    arena.close()


def test_a_plan_skips_what_is_there_and_goes_in_the_images_order():
    staged = Staged("image", 3 * 4096 + 100, 4 * 4096, (Extent(1 << 20, 8192), Extent(4 << 20, 3 * 4096)))
    steps = plan(staged, 4096, 4, [False, True, False, False])
    assert [step.frame for step in steps] == [0, 1, 2, 3]
    assert [step.size_bytes for step in steps] == [4096, 0, 4096, 100]
    assert [step.zero_from for step in steps] == [4096, 4096, 4096, 100]
    assert [p.address for step in steps for p in step.pieces] == [1 << 20, 4 << 20, (4 << 20) + 4096]


@pytest.mark.parametrize(("frames", "valid"), [(3, ()), (5, ()), (4, (True,))])
def test_a_plan_for_other_frames_is_refused(frames, valid):
    staged = Staged("image", 4 * 4096, 4 * 4096, (Extent(1 << 20, 4 * 4096),))
    with pytest.raises(LedgerError):
        plan(staged, 4096, frames, valid)


def test_a_frame_of_kept_blocks_is_copied_past_the_staging_buffer():
    frame = 1 << 16
    coded = Layout(count=frame // 2, second=10, third=1)
    blocks = (
        Block(0, 100, 0, 256, None),
        Block(100, frame - 100, 256, frame, None),
        Block(frame, frame, frame + 256, coded.size_bytes, coded),
    )
    index = PackedIndex(2 * frame, frame, frame + 256 + coded.size_bytes, blocks)
    staged = Staged("image.packed", 2 * frame, index.body_bytes, (Extent(1 << 20, 4 * frame),), index)
    first, second = plan(staged, frame, 2)
    assert not first.blocks
    assert [(p.address - (1 << 20), p.size_bytes) for p in first.pieces] == [(0, 100), (256, frame - 100)]
    assert second.blocks == (blocks[2],)
    assert second.size_bytes == coded.size_bytes


@pytest.mark.parametrize(
    ("value", "base", "frames", "found"),
    [
        pytest.param(10, 10, 5, 0, id="nothing yet"),
        pytest.param(12, 10, 5, 2, id="on the way"),
        pytest.param(40, 10, 5, 5, id="a later copy is under way"),
        pytest.param(7, 10, 5, 0, id="an earlier copy is under way"),
        pytest.param(1, (1 << 32) - 2, 5, 3, id="the counter wraps"),
    ],
)
def test_how_many_frames_have_arrived(value, base, frames, found):
    assert arrived(value, base, frames) == found


def test_a_machine_without_a_driver_loads_nothing():
    code = """
import sys
from omnimodel.memory.devices.cuda_driver import available
import omnimodel.memory.devices.cuda, omnimodel.memory.devices.cuda_checkpoint, omnimodel.memory.devices.cuda_meter
import os
if not os.path.exists("/dev/nvidiactl"):
    assert not available()
    loaded = [name for name in sys.modules if name.split(".")[0] in {"torch", "triton", "cuda", "pynvml"}]
    assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": "operator"})
