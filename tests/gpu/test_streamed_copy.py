"""Images larger than the arena, which are read while they are copied: on a driver that runs streams in the worst order."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.emulated import EmulatedDriver, install
from gpu.test_emulated_device import FRAME, packed_image
from memory.conformance import image
from omnimodel.errors import ImageError, LedgerError
from omnimodel.memory.devices.cuda import CudaDevice
from omnimodel.memory.devices.cuda_copy import slot_bytes

ARENA = 3 * slot_bytes(FRAME)
FRAMES = 9
SIZE = (FRAMES - 1) * FRAME + 8192


@pytest.fixture
def driver(monkeypatch):
    emulated = EmulatedDriver(capacity_bytes=64 * FRAME)
    install(monkeypatch, emulated)
    return emulated


@pytest.fixture
def device(driver):
    before = len(os.listdir("/proc/self/fd"))
    device = CudaDevice("cuda:0", FRAME, arena_bytes=ARENA)
    assert device.arena.wait(30)
    yield device
    device.close()
    assert driver.left() == {}
    assert driver.events.keys() <= {device._copied}
    assert len(os.listdir("/proc/self/fd")) == before


def made(folder, size, *, packed):
    """A file of an image, and what frames hold that it fills."""
    if packed:
        path, body = packed_image(folder, size)
    else:
        path = image(folder, size)
        body = path.read_bytes()
    return str(path), body + bytes(-size % FRAME)


def filled(frames) -> bytes:
    return b"".join(ctypes.string_at(frame.handle.address, FRAME) for frame in frames)


@pytest.mark.parametrize("packed", [False, True], ids=["raw", "packed"])
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.integers(1, 4),
    valid=st.lists(st.booleans(), min_size=FRAMES, max_size=FRAMES),
)
def test_it_arrives_as_it_was_and_the_fence_never_runs_ahead(tmp_path_factory, packed, seed, slots, valid):
    driver = EmulatedDriver(capacity_bytes=16 * FRAME, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, driver)
        path, body = made(tmp_path_factory.mktemp("images"), SIZE, packed=packed)
        device = CudaDevice("cuda:0", FRAME, arena_bytes=slots * slot_bytes(FRAME))
        assert device.stream_bytes == device.arena.capacity_bytes < SIZE
        assert device.arena.wait(30)
        held = device.create(FRAMES)
        for number, frame in enumerate(held):  # frames that hold their part already
            whole = body[number * FRAME : (number + 1) * FRAME]
            ctypes.memmove(frame.handle.address, whole if valid[number] else b"\xee" * FRAME, FRAME)
        fence = device.fence()
        staged = device.stage(path, SIZE, whole=False)
        assert device.arena.free_bytes == 0
        wrong: list[int] = []

        def look(name):
            arrived = (fence.page.value() - staged_base) % (1 << 32)
            if name == "write" and filled(held[:arrived]) != body[: arrived * FRAME]:
                wrong.append(arrived)

        staged_base = fence.base
        driver.after = look
        copy = device.copy(staged, held, valid=valid, fence=fence)
        assert copy.fence_base == staged_base
        copy.wait(60)
        driver.after = lambda _: None
        assert not wrong
        assert fence.page.value() == FRAMES
        assert filled(held) == body
        assert copy.done_bytes() == SIZE
        device.unstage(staged)
        assert device.arena.free_bytes == device.arena.capacity_bytes
        fence.close()
        device.close()
        assert driver.left() == {}


def test_an_image_in_the_arena_is_copied_meanwhile(device, tmp_path):
    path, body = made(tmp_path, SIZE, packed=False)
    (tmp_path / "small").mkdir()
    other, small = made(tmp_path / "small", 4096, packed=False)
    device.arena.give(device.arena.take(FRAME))
    device.stream_bytes = slot_bytes(FRAME)  # so that there is room for the other beside it
    device._slot_bytes = slot_bytes(FRAME)
    staged, beside = device.stage(path, SIZE, whole=False), device.stage(other, 4096)
    frames, one = device.create(FRAMES), device.create(1)
    copies = [device.copy(staged, frames), device.copy(beside, one)]
    copies[1].wait(60)
    copies[0].wait(60)
    assert (filled(frames), filled(one)) == (body, small)
    for each in (staged, beside):
        device.unstage(each)


def test_done_bytes_grow_and_never_run_ahead(device, driver, tmp_path):
    path, body = made(tmp_path, SIZE, packed=True)
    staged, frames = device.stage(path, SIZE, whole=False), device.create(FRAMES)
    seen: list[int] = []

    def look(_name):
        done = copy_of[0].done_bytes() if copy_of else 0
        if not seen or done != seen[-1]:
            seen.append(done)
            assert filled(frames)[:done] == body[:done]

    copy_of: list = []
    driver.after = look
    copy_of.append(device.copy(staged, frames))
    copy_of[0].wait(60)
    driver.after = lambda _: None
    assert seen == sorted(seen)
    assert len(seen) > 3
    device.unstage(staged)


def test_one_image_is_read_for_one_copy_at_a_time(device, driver, tmp_path):
    path, _ = made(tmp_path, SIZE, packed=False)
    staged, frames = device.stage(path, SIZE, whole=False), device.create(FRAMES)
    copy = device.copy(staged, frames)
    with pytest.raises(LedgerError, match="being copied already"):
        device.copy(staged, frames)
    copy.wait(60)
    device.copy(staged, frames).wait(60)
    device.unstage(staged)


@pytest.mark.parametrize("packed", [False, True], ids=["raw", "packed"])
def test_a_file_that_is_cut_short_fails_the_copy_and_gives_everything_back(device, tmp_path, packed):
    path, _ = made(tmp_path, SIZE, packed=packed)
    staged, frames, fence = device.stage(path, SIZE, whole=False), device.create(FRAMES), device.fence()
    os.truncate(path, 3 * FRAME)
    copy = device.copy(staged, frames, fence=fence)
    for _ in range(2):
        with pytest.raises(ImageError, match="shorter than its index says"):
            copy.wait(60)
    assert fence.page.value() < FRAMES
    assert copy.done_bytes() < SIZE
    device.unstage(staged)
    fence.close()
    assert device.arena.free_bytes == ARENA


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # its traceback, for the log
def test_a_reader_that_dies_fails_the_copy(device, monkeypatch, tmp_path):
    def read(*_):
        raise RuntimeError("can't start new thread")

    path, _ = made(tmp_path, SIZE, packed=False)
    staged, frames, fence = device.stage(path, SIZE, whole=False), device.create(FRAMES), device.fence()
    monkeypatch.setattr(device.arena, "read", read)
    copy = device.copy(staged, frames, fence=fence)
    with pytest.raises(ImageError, match="was not read to its end"):
        copy.wait(60)
    assert copy.done_bytes() < SIZE
    device.unstage(staged)
    fence.close()


def test_one_that_nobody_waits_for_is_broken_off(device, driver, tmp_path):
    path, _ = made(tmp_path, SIZE, packed=False)
    staged, frames = device.stage(path, SIZE, whole=False), device.create(FRAMES)
    driver.random.randrange = lambda _: 0  # nothing proceeds
    copy = device.copy(staged, frames)
    with pytest.raises(TimeoutError):
        copy.wait(0.01)
    leaving = threading.Thread(target=device.unstage, args=(staged,))
    leaving.start()
    with pytest.raises(ImageError, match="not copied to its end"):
        copy.wait(60)
    leaving.join(60)
    del driver.random.randrange
    assert device.arena.free_bytes == ARENA


def test_a_device_that_is_lost_fails_the_copy(device, driver, tmp_path):
    path, _ = made(tmp_path, SIZE, packed=False)
    staged, frames = device.stage(path, SIZE, whole=False), device.create(FRAMES)
    driver.fail["cuEventQuery"] = 6
    with pytest.raises(ImageError, match="image-1"):
        device.copy(staged, frames).wait(60)
    driver.fail.clear()
    device.unstage(staged)
    driver.events = {device._copied: (0, 0)}  # nobody destroys events of a device that is lost


def test_an_arena_smaller_than_a_frame_streams_nothing(driver):
    device = CudaDevice("cuda:0", FRAME, arena_bytes=FRAME)
    assert device.stream_bytes == 0
    device.close()
