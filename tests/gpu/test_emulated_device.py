"""The device protocol on the cuda backend, on a driver of host memory that runs streams in the worst order allowed."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.emulated import EmulatedDriver, install
from gpu.weights import Tensor, weights
from memory.codec_values import normal_fp8
from memory.conformance import *  # noqa: F403
from memory.conformance import Backend, copy_of, image, pattern
from omnimodel.errors import ImageError, LedgerError, OmniError
from omnimodel.memory.codec_file import pack
from omnimodel.memory.devices import cuda, cuda_driver, open_device, open_window
from omnimodel.memory.devices.cuda import CudaDevice
from omnimodel.memory.devices.cuda_window import CudaWindow
from omnimodel.memory.index import PACKED_FILE

FRAME = 2 << 20
ARENA = 64 << 20


class HostBoundWindow(CudaWindow):
    """Torch cannot ask this driver whose an address is."""

    def _bind(self):
        if not self.size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_ubyte * self.size_bytes).from_address(self._base), dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch):
    emulated = EmulatedDriver(capacity_bytes=64 * FRAME)
    install(monkeypatch, emulated)
    return emulated


@pytest.fixture
def backend(driver):
    before = len(os.listdir("/proc/self/fd"))
    device = CudaDevice("cuda:0", FRAME, arena_bytes=ARENA)
    assert device.arena.wait(30)
    yield Backend(
        device,
        window=lambda frames: HostBoundWindow("cuda:0", frames, FRAME),
        read=lambda frame: ctypes.string_at(frame.handle.address, FRAME),
        fill=lambda frame, value: ctypes.memset(frame.handle.address, value, FRAME),
        too_many=65,
    )
    device.close()
    assert driver.left() == {}
    assert len(os.listdir("/proc/self/fd")) == before


def packed_image(folder, size_bytes, seed=1):
    """An image of bf16, a part that is not worth coding, and fp8; its packed form, and its bytes."""
    third = size_bytes // 3 // 4096 * 4096
    body = weights(third, seed) + pattern(third, seed) + normal_fp8(size_bytes - 2 * third, seed).tobytes()
    raw = folder / f"raw-{seed}"
    raw.write_bytes(body)
    tensors = [Tensor("bfloat16", 0, third), Tensor("float8_e4m3fn", 2 * third, size_bytes - 2 * third)]
    (folder / str(seed)).mkdir()
    path = folder / str(seed) / PACKED_FILE
    index = pack(str(raw), tensors, FRAME, str(path), threads=2)
    assert 0.6 < index.ratio < 0.9
    return path, body


def test_a_packed_image_arrives_as_it_was_and_takes_less_of_the_arena(backend, tmp_path):
    size = 5 * FRAME + 8192
    path, body = packed_image(tmp_path, size)
    held = backend.device.create(6)
    for frame in held:
        backend.fill(frame, 0xEE)
    staged = backend.device.stage(str(path), size)
    assert staged.stored_bytes < 0.9 * size
    backend.device.copy(staged, held).wait(30)
    found = b"".join(backend.read(frame) for frame in held)
    assert found[:size] == body
    assert found[size:] == bytes(len(found) - size)
    backend.device.unstage(staged)


def test_what_cannot_be_decoded_is_not_packed_for(driver, monkeypatch):
    for frame_bytes, decoder, decodes in (
        (FRAME, cuda.TritonDecoder, True),
        (FRAME, no_compiler, False),
        (3 * FRAME, cuda.TritonDecoder, False),  # frames that nothing is packed for
    ):
        monkeypatch.setattr(cuda, "TritonDecoder", decoder)
        device = CudaDevice("cuda:0", frame_bytes, arena_bytes=0)
        assert [device.decodes(), device.decodes()] == [decodes, decodes]
        device.close()
        assert driver.left() == {}


def no_compiler(_context):
    raise RuntimeError("Failed to find C compiler")


def test_a_packed_image_for_other_frames_is_refused(backend, tmp_path):
    path, _ = packed_image(tmp_path, 3 * FRAME)
    with pytest.raises(ImageError, match="pack it again"):
        backend.device.stage(str(path), 3 * FRAME + 4096)


@pytest.mark.parametrize("packed", [False, True], ids=["raw", "packed"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), valid=st.lists(st.booleans(), min_size=5, max_size=5))
def test_the_fence_never_runs_ahead_of_the_bytes(tmp_path_factory, packed, seed, valid):
    driver = EmulatedDriver(capacity_bytes=16 * FRAME, seed=seed)
    patch = pytest.MonkeyPatch()
    patch.setattr(cuda_driver, "_loaded", [driver])
    patch.setattr(cuda, "TritonDecoder", lambda _context: driver.decode)
    folder = tmp_path_factory.mktemp("images")
    size = 4 * FRAME + 4096
    try:
        device = CudaDevice("cuda:0", FRAME, arena_bytes=16 << 20)
        if packed:
            path, body = packed_image(folder, size)
        else:
            path = image(folder, size)
            body = path.read_bytes()
        staged = device.stage(str(path), size)
        held = device.create(5)
        body += bytes(5 * FRAME - size)
        for number, frame in enumerate(held):  # frames that hold their part already
            whole = body[number * FRAME : (number + 1) * FRAME]
            ctypes.memmove(frame.handle.address, whole if valid[number] else b"\xee" * FRAME, FRAME)
        fence = device.fence()
        for _turn in range(2):
            seen_values: list[int] = []
            copy = device.copy(staged, held, valid=valid, fence=fence)

            def look(name, copy=copy, seen_values=seen_values):
                if name != "write":
                    return
                arrived = (fence.page.value() - copy.fence_base) % (1 << 32)
                if arrived in seen_values or arrived > 5:
                    return
                seen_values.append(arrived)
                for number in range(arrived):
                    found = ctypes.string_at(held[number].handle.address, FRAME)
                    assert found == body[number * FRAME : (number + 1) * FRAME]

            driver.after = look
            copy.wait(30)
            assert seen_values[-1] == 5
            for number in range(5):
                if not valid[number]:
                    ctypes.memset(held[number].handle.address, 0xDD, FRAME)
        driver.after = lambda _: None
        device.unstage(staged)
        fence.close()
        device.close()
        assert driver.left() == {}
    finally:
        patch.undo()


def test_a_process_waits_behind_the_copy_and_not_a_frame_longer(backend, driver, tmp_path):
    size = 3 * FRAME
    staged = backend.device.stage(str(image(tmp_path, size)), size)
    held = backend.device.create(3)
    fence = backend.device.fence()
    window = backend.window(3)
    window.follow(os.dup(fence.descriptor))
    stream = cuda_driver.call("cuStreamCreate", 1)
    overlapped = False
    for _turn in range(5):  # the fence's values go on from wake to wake
        copy = backend.device.copy(staged, held, fence=fence)
        window.map(copy_of(held), fence_base=copy.fence_base)
        for frame in held:
            backend.fill(frame, 0xEE)
        layers: list[tuple[bytes, int]] = []
        for frame in range(3):
            window.wait((frame + 1) * FRAME - 4096, stream)
            view = window.tensor(frame * FRAME, FRAME)
            driver._enqueue(
                stream,
                "layer",
                lambda view=view, copy=copy, layers=layers: layers.append((view.numpy().tobytes(), copy.done_bytes())),
            )
        copy.wait(30)
        before = len(driver.streams[stream])
        window.wait(size, stream)
        assert len(driver.streams[stream]) == before  # the image is there: nothing to wait for
        window.unmap()
        assert [found for found, _ in layers] == [pattern(size, 1)[f * FRAME : (f + 1) * FRAME] for f in range(3)]
        overlapped |= layers[0][1] < size
    assert overlapped  # in some turn the first layer ran before the last frame was there
    backend.device.unstage(staged)
    window.close()
    fence.close()


def test_a_thread_that_has_not_computed_yet_can_wait_behind_a_copy(backend, driver):
    fence = backend.device.fence()
    window = backend.window(1)
    window.follow(os.dup(fence.descriptor))
    window.map(copy_of(backend.device.create(1)), fence_base=fence.base)
    with ThreadPoolExecutor(1) as lane:
        lane.submit(window.wait, FRAME, 0).result()
    assert driver.streams[0]
    window.abandon()
    window.unmap()
    window.close()
    fence.close()


def test_a_wake_changes_access_once_for_all_its_frames(backend, driver, monkeypatch):
    changes, set_access = [], driver.do_cuMemSetAccess
    held, window = backend.device.create(3), backend.window(3)
    monkeypatch.setattr(
        driver, "do_cuMemSetAccess", lambda *given: changes.append(given[1]) or set_access(*given), raising=False
    )
    for _turn in range(2):
        window.map(copy_of(held))
        window.unmap()
    assert changes == [3 * FRAME, 3 * FRAME]
    window.close()


def test_a_process_is_let_go_when_its_copy_never_comes(backend, driver):
    fence = backend.device.fence()
    window = backend.window(1)
    window.follow(os.dup(fence.descriptor))
    window.map(copy_of(backend.device.create(1)), fence_base=fence.base)
    stream = cuda_driver.call("cuStreamCreate", 1)
    window.wait(FRAME, stream)
    assert not driver.step()
    window.abandon()
    window.unmap()
    window.close()
    fence.close()


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_it_is_opened_by_its_name(driver, name):
    device = open_device(name, FRAME, arena_bytes=0)
    assert device.name == "cuda:0"
    assert device.frame_bytes == FRAME
    assert device.pinning == ""
    window = open_window(device.name, 2, FRAME)
    window.close()
    device.close()
    assert driver.left() == {}


@pytest.mark.parametrize("name", ["cuda:1", "cuda:x", "cuda:", "cuda:-1"])
def test_a_device_that_is_not_there_is_named(driver, name):
    with pytest.raises(OmniError, match=name):
        open_device(name, FRAME, arena_bytes=0)


def test_two_copies_at_once_keep_their_own_progress(backend, driver, tmp_path):
    size = 2 * FRAME
    first = backend.device.stage(str(image(tmp_path, size, 1)), size)
    second = backend.device.stage(str(image(tmp_path, size, 2)), size)
    copies = [
        backend.device.copy(first, backend.device.create(2)),
        backend.device.copy(second, backend.device.create(2)),
    ]
    copies[1].wait(30)
    assert [copy.done_bytes() for copy in copies] == [size, size]
    copies[0].wait(30)
    for staged in (first, second):
        backend.device.unstage(staged)


def test_a_copy_that_the_device_cannot_do_names_the_image(backend, driver, tmp_path):
    staged = backend.device.stage(str(image(tmp_path, 4096)), 4096)
    copy = backend.device.copy(staged, backend.device.create(1))
    driver.fail["cuEventQuery"] = 0
    with pytest.raises(ImageError, match="image-1"):
        copy.wait(10)
    driver.fail.clear()
    backend.device.unstage(staged)


def test_a_copy_that_takes_too_long_says_so(backend, driver, tmp_path):
    staged = backend.device.stage(str(image(tmp_path, 4096)), 4096)
    copy = backend.device.copy(staged, backend.device.create(1))
    driver.random.randrange = lambda _: 0  # nothing proceeds
    with pytest.raises(TimeoutError):
        copy.wait(0.01)
    del driver.random.randrange
    copy.wait(10)
    backend.device.unstage(staged)


def test_an_image_larger_than_the_arena_is_refused_and_what_is_there_stays(backend, tmp_path):
    size = ARENA + 4096
    path = tmp_path / "image"
    with path.open("wb") as stream:
        stream.truncate(size)
    small = backend.device.stage(str(image(tmp_path, 4096)), 4096)
    with pytest.raises(LedgerError, match="hostMemory"):
        backend.device.stage(str(path), size)
    backend.device.unstage(small)
    assert backend.device.arena.free_bytes == ARENA


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemImportFromShareableHandle", "cuMemSetAccess"])
def test_a_map_that_the_driver_refuses_leaves_nothing_mapped(backend, driver, call):
    held = backend.device.create(3)
    window = backend.window(3)
    driver.fail[call] = 0 if call == "cuMemSetAccess" else 1
    with pytest.raises(OmniError, match=call):
        window.map(copy_of(held))
    driver.fail.clear()
    window.map(copy_of(held))
    window.unmap()
    window.close()


def test_a_driver_that_unmaps_one_allocation_at_a_time(backend, driver):
    driver.unmaps_many = False
    held = backend.device.create(3)
    window = backend.window(3)
    for _turn in range(2):
        window.map(copy_of(held))
        window.unmap()
    window.close()


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"], ids=lambda call: call[5:]
)
def test_frames_that_cannot_be_made_are_undone(backend, driver, call):
    before = len(os.listdir("/proc/self/fd"))
    driver.fail[call] = 2
    with pytest.raises(OmniError):
        backend.device.create(4)
    driver.fail.clear()
    assert driver.used_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(backend.device.create(4)) == 4
