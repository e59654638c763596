"""Two GPUs of one agent at the level of the device protocol: one pinned arena, and everything else apart."""

from __future__ import annotations

import ctypes
import os

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from gpu.emulated import EmulatedDriver
from gpu.weights import Tensor, weights
from memory.conformance import image
from omnimodel.errors import LedgerError, OmniError
from omnimodel.memory.codec_file import pack
from omnimodel.memory.devices import cuda, cuda_driver, open_devices
from omnimodel.memory.index import PACKED_FILE

FRAME = 2 << 20
ARENA = 32 << 20


@pytest.fixture
def driver(monkeypatch):
    emulated = EmulatedDriver(capacity_bytes=16 * FRAME, devices=2)
    monkeypatch.setattr(cuda_driver, "_loaded", [emulated])
    monkeypatch.setattr(cuda, "TritonDecoder", lambda _context: emulated.decode)
    return emulated


@pytest.fixture
def devices(driver):
    before = len(os.listdir("/proc/self/fd"))
    opened = open_devices(["cuda:0", "cuda:1"], FRAME, arena_bytes=ARENA)
    assert opened[0].arena.wait(30)
    yield opened
    for device in reversed(opened):
        device.close()
    assert driver.left() == {}
    assert len(os.listdir("/proc/self/fd")) == before


def read(frames, size: int) -> bytes:
    return b"".join(ctypes.string_at(frame.handle.address, FRAME) for frame in frames)[:size]


def test_an_image_is_pinned_once_and_copied_to_both(devices, driver, tmp_path):
    size = 3 * FRAME + 4096
    path = image(tmp_path, size)
    first = devices[0]
    assert [device.pinned_bytes for device in devices] == [ARENA, 0]
    staged = first.stage(str(path), size)
    held = [device.create(4) for device in devices]
    assert driver.used == [4 * FRAME, 4 * FRAME]
    copies = [device.copy(staged, frames) for device, frames in zip(devices, held, strict=True)]
    for copy in copies:
        copy.wait(30)
    assert [read(frames, size) for frames in held] == [path.read_bytes()] * 2
    first.unstage(staged)


def test_a_packed_image_that_the_first_has_staged_is_decoded_on_the_second(devices, tmp_path):
    size = 2 * FRAME
    body = weights(size, 1)
    raw = tmp_path / "raw"
    raw.write_bytes(body)
    path = tmp_path / PACKED_FILE
    pack(str(raw), [Tensor("bfloat16", 0, size)], FRAME, str(path), threads=1)
    first, second = devices
    staged = first.stage(str(path), size)
    frames = second.create(2)
    second.copy(staged, frames).wait(30)
    assert read(frames, size) == body
    first.unstage(staged)


def test_parts_of_an_image_that_are_read_for_one_device_are_not_overwritten_for_the_other(devices, driver, tmp_path):
    size = 4 * FRAME
    path = image(tmp_path, size)
    first, second = devices
    staged = first.stage(str(path), size, whole=False)
    held = [device.create(4) for device in devices]
    copy = first.copy(staged, held[0])
    try:
        with pytest.raises(LedgerError, match="is being copied already"):
            second.copy(staged, held[1])
    finally:
        copy.wait(30)
    second.copy(staged, held[1]).wait(30)
    assert [read(frames, size) for frames in held] == [path.read_bytes()] * 2
    first.unstage(staged)


def test_one_device_that_is_full_takes_nothing_of_the_other(devices):
    first, second = devices
    first.create(16)
    assert (first.free_bytes(), second.free_bytes()) == (0, 16 * FRAME)
    with pytest.raises(LedgerError, match="it has 0 free"):
        first.create(1)
    second.create(16)


def test_when_the_second_is_not_here_the_first_is_given_back(driver):
    with pytest.raises(OmniError, match="the driver shows 2 devices"):
        open_devices(["cuda:0", "cuda:2"], FRAME, arena_bytes=ARENA)
    assert driver.left() == {}
