"""How long wakes take on a simulated line, with the rates that an H200 has: what waits for what, not how fast it is."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from gpu.emulated import install
from gpu.test_emulated_device import HostBoundWindow
from gpu.timed import TimedDriver
from gpu.weights import Tensor, weights
from memory.conformance import copy_of, image
from omnimodel.memory.codec_file import pack
from omnimodel.memory.devices import cuda_driver, cuda_unpack
from omnimodel.memory.devices.cuda import CudaDevice
from omnimodel.memory.index import PACKED_FILE

FRAME = 2 << 20
FRAMES = 16
SIZE = FRAMES * FRAME
LINE, DECODER = 55.3e9, 1235e9  # Source: docs/gpu.md, measured on an H200


@pytest.fixture
def driver(monkeypatch):
    emulated = TimedDriver(64 * FRAME, LINE, DECODER)
    install(monkeypatch, emulated)
    return emulated


@pytest.fixture
def device(driver):
    device = CudaDevice("cuda:0", FRAME, arena_bytes=2 * SIZE)
    assert device.arena.wait(30)
    yield device
    device.close()
    assert driver.left() == {}


def packed(folder):
    """An image of weights in its packed form, and by how much it is smaller."""
    raw = folder / "raw"
    raw.write_bytes(weights(SIZE, 1))
    path = folder / PACKED_FILE
    return str(path), pack(str(raw), [Tensor("bfloat16", 0, SIZE)], FRAME, str(path), threads=2).ratio


def effective(device, path: str, **options) -> float:
    """Bytes of an image that arrive in a second."""
    staged = device.stage(path, SIZE)
    seconds = device.copy(staged, device.create(FRAMES), **options).wait(30)
    device.unstage(staged)
    return SIZE / seconds


def test_a_wake_keeps_the_line_busy_from_its_begin_to_its_end(device, tmp_path):
    assert effective(device, str(image(tmp_path, SIZE))) == pytest.approx(LINE)


def test_a_wake_takes_as_long_as_what_is_missing(device, tmp_path):
    valid = [number % 4 != 0 for number in range(FRAMES)]
    assert effective(device, str(image(tmp_path, SIZE)), valid=valid) == pytest.approx(4 * LINE)


def test_a_packed_image_comes_faster_than_the_line_and_is_decoded_meanwhile(device, tmp_path):
    path, ratio = packed(tmp_path)
    found = effective(device, path)
    assert found > 1.30 * LINE
    last = FRAME / DECODER  # only the last frame is decoded when nothing is copied any more
    assert SIZE / found == pytest.approx(ratio * SIZE / LINE + last, rel=0.01)


@pytest.mark.parametrize("ring", [1, cuda_unpack.RING])
def test_a_decoder_that_is_slower_than_the_line_sets_the_pace_and_the_line_does_not_wait_beside(
    device, driver, tmp_path, monkeypatch, ring
):
    monkeypatch.setattr(cuda_unpack, "RING", ring)
    path, ratio = packed(tmp_path)
    driver.decoder = LINE
    copied, decoded = ratio * SIZE / LINE, SIZE / LINE
    first = copied / FRAMES  # before it nothing can be decoded
    expected = copied + decoded if ring == 1 else first + decoded
    assert SIZE / effective(device, path) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("share", [0.5, 2.0], ids=["less than the copy takes", "more than the copy takes"])
def test_the_first_token_takes_little_more_than_the_longer_of_copy_and_prefill(device, driver, tmp_path, share):
    staged = device.stage(str(image(tmp_path, SIZE)), SIZE)
    held, fence, window = device.create(FRAMES), device.fence(), HostBoundWindow("cuda:0", FRAMES, FRAME)
    window.follow(os.dup(fence.descriptor))
    stream = cuda_driver.call("cuStreamCreate", 1)
    copy_seconds = SIZE / LINE
    prefill_seconds = share * copy_seconds
    copy = device.copy(staged, held, fence=fence)
    window.map(copy_of(held), fence_base=copy.fence_base)
    for layer in range(FRAMES):
        window.wait((layer + 1) * FRAME, stream)
        driver.compute(stream, prefill_seconds / FRAMES)
    copy.wait(30)
    window.unmap()
    assert driver.clocks[stream] <= 1.1 * max(copy_seconds, prefill_seconds)
    assert driver.clocks[stream] >= max(copy_seconds, prefill_seconds)
    device.unstage(staged)
    window.close()
    fence.close()
