"""Frames over memfd: what a wake puts into them, who may write them, and what comes back."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from omnimodel.errors import ImageError, LedgerError, OmniError
from omnimodel.memory.devices import open_device, open_window, pages
from omnimodel.memory.devices.host import COPY_CHUNK_BYTES, HostDevice
from omnimodel.memory.devices.host_window import HostWindow

MIB = 1 << 20
FRAME = 4 * MIB


@pytest.fixture
def device():
    device = HostDevice(FRAME, threads=2)
    yield device
    device.close()


def image_file(folder: Path, size_bytes: int, seed: int = 1) -> Path:
    path = folder / f"image-{seed}"
    path.write_bytes(pattern(size_bytes, seed))
    return path


def pattern(size_bytes: int, seed: int) -> bytes:
    block = bytes((seed + 7 * number) % 251 for number in range(4096))
    return (block * (size_bytes // 4096 + 1))[:size_bytes]


def content(frame, size_bytes: int = FRAME) -> bytes:
    return ctypes.string_at(frame.handle.address, size_bytes)


def descriptors_of(frames) -> list[int]:
    return [os.dup(frame.descriptor) for frame in frames]


def wake(device, path, frames, **options):
    staged = device.stage(str(path), path.stat().st_size)
    device.copy(staged, frames, **options).wait(30)
    device.unstage(staged)


@pytest.mark.parametrize(
    "size_bytes",
    [
        pytest.param(4096, id="one page"),
        pytest.param(FRAME, id="exactly one frame"),
        pytest.param(FRAME + 4096, id="one page into the second frame"),
        pytest.param(3 * FRAME - 4096, id="all but a page of three frames"),
    ],
)
def test_copy_brings_the_image_and_zeroes_the_rest(device, tmp_path, size_bytes):
    frames = device.create(-(-size_bytes // FRAME))
    for frame in frames:
        ctypes.memset(frame.handle.address, 0xAB, FRAME)
    wake(device, image_file(tmp_path, size_bytes), frames)
    found = b"".join(content(frame) for frame in frames)
    assert found[:size_bytes] == pattern(size_bytes, 1)
    assert found[size_bytes:] == bytes(len(found) - size_bytes)


def test_valid_frames_are_not_touched(device, tmp_path):
    frames = device.create(3)
    ctypes.memset(frames[1].handle.address, 0xCD, FRAME)
    wake(device, image_file(tmp_path, 3 * FRAME), frames, valid=[False, True, False])
    assert content(frames[1]) == b"\xcd" * FRAME
    assert content(frames[0]) == pattern(3 * FRAME, 1)[:FRAME]
    assert content(frames[2]) == pattern(3 * FRAME, 1)[2 * FRAME :]


def test_done_bytes_is_the_whole_image_at_the_end_also_when_nothing_was_to_do(device, tmp_path):
    frames = device.create(2)
    path = image_file(tmp_path, FRAME + 4096)
    staged = device.stage(str(path), FRAME + 4096)
    copy = device.copy(staged, frames)
    assert copy.wait(30) >= 0
    assert copy.done_bytes() == FRAME + 4096
    assert device.copy(staged, frames, valid=[True, True]).done_bytes() == FRAME + 4096


def test_an_image_without_weights_needs_no_frames(device, tmp_path):
    path = image_file(tmp_path, 0)
    staged = device.stage(str(path), 0)
    assert device.copy(staged, []).wait(1) >= 0
    device.unstage(staged)


def test_image_cut_short_after_staging_is_an_error_and_not_a_dead_agent(device, tmp_path):
    size_bytes = 4 * COPY_CHUNK_BYTES
    path = image_file(tmp_path, size_bytes)
    staged = device.stage(str(path), size_bytes)
    os.truncate(path, COPY_CHUNK_BYTES)
    with pytest.raises(ImageError, match="image-1"):
        device.copy(staged, device.create(size_bytes // FRAME)).wait(30)


@pytest.mark.parametrize("change", [-4096, 4096])
def test_image_of_another_length_is_not_staged(device, tmp_path, change):
    path = image_file(tmp_path, FRAME)
    with pytest.raises(ImageError, match=str(FRAME)):
        device.stage(str(path), FRAME + change)


def test_missing_image_is_not_staged(device, tmp_path):
    with pytest.raises(ImageError, match="nothing-here"):
        device.stage(str(tmp_path / "nothing-here"), 4096)


def test_an_image_that_is_unstaged_while_it_is_copied_stays_mapped_until_the_end(device, tmp_path):
    size_bytes = 16 * FRAME
    path = image_file(tmp_path, size_bytes)
    frames = device.create(16)
    for _ in range(20):
        staged = device.stage(str(path), size_bytes)
        copy = device.copy(staged, frames)
        device.unstage(staged)
        copy.wait(30)
        assert staged.address == 0
        assert str(path) not in Path("/proc/self/maps").read_text()
    assert content(frames[15]) == pattern(size_bytes, 1)[15 * FRAME :]
    with pytest.raises(OmniError, match="not in the arena"):
        device.copy(staged, frames)


def test_wrong_number_of_frames_is_refused(device, tmp_path):
    path = image_file(tmp_path, FRAME)
    staged = device.stage(str(path), FRAME)
    with pytest.raises(OmniError, match="2 frames"):
        device.copy(staged, device.create(2))


def test_more_frames_than_the_machine_has_are_refused_with_both_numbers_and_none_is_made(device):
    before = len(os.listdir("/proc/self/fd"))
    count = device.free_bytes() // FRAME + 1000
    with pytest.raises(LedgerError, match=f"{count * FRAME} bytes"):
        device.create(count)
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_more_descriptors_undoes_the_frames_that_were_made():
    code = f"""
import os, resource
from omnimodel.errors import LedgerError
from omnimodel.memory.devices.host import HostDevice
device = HostDevice({FRAME}, threads=1)
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))
try:
    device.create(20)
except LedgerError as error:
    assert "open files" in str(error), error
    assert len(os.listdir("/proc/self/fd")) == used
    assert "memfd:frame" not in open("/proc/self/maps").read()
    print("refused")
"""
    assert run(code) == "refused"


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "operator")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_destroy_gives_pages_and_descriptors_back():
    device = HostDevice(FRAME, threads=1)
    before = len(os.listdir("/proc/self/fd"))
    frames = device.create(4)
    assert len(os.listdir("/proc/self/fd")) == before + 4
    device.destroy(frames[:2])
    device.destroy(frames[:2])  # twice is harmless
    assert len(os.listdir("/proc/self/fd")) == before + 2
    device.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_ids_are_never_given_twice(device):
    first = device.create(2)
    device.destroy(first)
    assert {frame.id for frame in device.create(2)}.isdisjoint({frame.id for frame in first})


def test_descriptor_allows_reading_and_nothing_else(device):
    (frame,) = device.create(1)
    with mmap.mmap(frame.descriptor, FRAME, prot=mmap.PROT_READ) as readable:
        assert readable[:4] == bytes(4)
    with pytest.raises(PermissionError):
        mmap.mmap(frame.descriptor, FRAME, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.write(frame.descriptor, b"x")
    with pytest.raises(OSError):
        os.ftruncate(frame.descriptor, 0)
    assert os.fstat(frame.descriptor).st_mode & 0o777 == 0o600


def test_size_of_a_frame_is_sealed(device):
    (frame,) = device.create(1)
    writable = os.open(f"/proc/self/fd/{frame.descriptor}", os.O_RDWR)
    for size_bytes in (0, FRAME * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(writable, size_bytes)
    os.close(writable)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="another uid is needed")
def test_another_uid_cannot_reopen_a_frame_for_writing(device):
    (frame,) = device.create(1)
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(23456, 23456, 23456)
            os.setresuid(23456, 23456, 23456)
            os.open(f"/proc/self/fd/{frame.descriptor}", os.O_RDWR)
        except PermissionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_window_shows_the_image_without_a_warning_from_torch(device, tmp_path):
    torch = pytest.importorskip("torch")
    size_bytes = FRAME + 4096
    frames = device.create(2)
    wake(device, image_file(tmp_path, size_bytes), frames)
    window = HostWindow(2, FRAME)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = window.tensor(64, size_bytes - 64)
        window.map(descriptors_of(frames))
        assert bytes(tensor.numpy()) == pattern(size_bytes, 1)[64:]
    assert tensor.dtype == torch.uint8
    assert window.tensor(0, 0).numel() == 0


def test_addresses_stay_over_a_wake_into_other_frames(device, tmp_path):
    pytest.importorskip("torch")
    frames = device.create(3)
    path = image_file(tmp_path, FRAME)
    window = HostWindow(1, FRAME)
    tensor = window.tensor(0, FRAME)
    for frame in frames:
        wake(device, path, [frame])
        window.map(descriptors_of([frame]))
        assert bytes(tensor.numpy()) == pattern(FRAME, 1)
        window.unmap()
        ctypes.memset(frame.handle.address, 0xEE, FRAME)
    assert tensor.data_ptr() == window.address


@pytest.mark.parametrize(
    "act",
    [
        pytest.param("tensor[0] = 1", id="a write into a mapped frame"),
        pytest.param("window.unmap(); int(tensor[0])", id="a read after the evict"),
    ],
)
def test_forbidden_access_kills_only_the_process_that_does_it(act):
    code = f"""
import os, signal
from omnimodel.memory.devices.host import HostDevice
from omnimodel.memory.devices.host_window import HostWindow
device = HostDevice({FRAME}, threads=1)
frames = device.create(1)
window = HostWindow(1, {FRAME})
import ctypes
import errno
tensor = (ctypes.c_ubyte * {FRAME}).from_address(window.address)
window.map([os.dup(frames[0].descriptor)])
assert int(tensor[0]) == 0
child = os.fork()
if child == 0:
    {act}
    os._exit(0)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
assert int(tensor[0]) == 0
print("alone")
"""
    assert run(code) == "alone"


@pytest.mark.parametrize("given", [pytest.param(1, id="too few"), pytest.param(3, id="too many")])
def test_a_window_refuses_another_number_of_frames_and_closes_them(device, given):
    window = HostWindow(2, FRAME)
    descriptors = descriptors_of(device.create(given))
    with pytest.raises(OmniError, match=f"{given} frames"):
        window.map(descriptors)
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)
    assert not window.mapped


def test_a_window_maps_nothing_when_one_descriptor_is_no_frame(device, tmp_path):
    window = HostWindow(2, FRAME)
    (tmp_path / "small").write_bytes(b"x")
    wrong = os.open(tmp_path / "small", os.O_RDONLY)
    with pytest.raises(OmniError, match="no frame"):
        window.map([*descriptors_of(device.create(1)), wrong])
    assert f"{window.address:x}" not in "".join(
        line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:frame" in line
    )


def test_a_window_does_not_give_tensors_outside_itself():
    window = HostWindow(1, FRAME)
    for offset, size in ((-1, 4), (FRAME - 1, 2), (0, FRAME + 1), (0, -1)):
        with pytest.raises(OmniError, match="outside"):
            window.tensor(offset, size)
    window.close()


def test_a_frame_without_addresses_leaves_nothing_open(device, monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(pages, "reserve", no_memory)
    with pytest.raises(LedgerError, match="Cannot allocate memory"):
        device.create(2)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_an_image_that_cannot_be_mapped_is_an_error_that_names_it(device, tmp_path, monkeypatch):
    path = image_file(tmp_path, FRAME)
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(pages, "map_shared", no_memory)
    with pytest.raises(ImageError, match="cannot be mapped: Cannot allocate memory"):
        device.stage(str(path), FRAME)
    assert set(os.listdir("/proc/self/fd")) <= before


def no_memory(*_arguments, **_options):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_frames_are_huge_pages_where_the_kernel_collapses(device):
    (frame,) = device.create(1)
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps[smaps.index(f"{frame.handle.address:x}-") :].split("VmFlags")[0]
    mapped_kib = next(int(line.split()[1]) for line in entry.splitlines() if line.startswith("ShmemPmdMapped"))
    assert frame.handle.huge == (mapped_kib << 10 == FRAME)
    resident_kib = next(int(line.split()[1]) for line in entry.splitlines() if line.startswith("Rss"))
    assert resident_kib << 10 == FRAME  # faulted in, so charged to the agent


@pytest.mark.parametrize("frame_bytes", [0, -1, 4096, FRAME + 4096])
def test_frames_must_be_whole_huge_pages(frame_bytes):
    with pytest.raises(OmniError, match="2Mi"):
        HostDevice(frame_bytes)


def test_a_device_is_opened_by_its_name():
    device = open_device("host", FRAME)
    assert isinstance(device, HostDevice)
    device.close()
    assert isinstance(open_window("host", 1, FRAME), HostWindow)
    with pytest.raises(OmniError, match="no such device"):
        open_device("toaster", FRAME)
    with pytest.raises(OmniError, match="no such device"):
        open_window("toaster", 1, FRAME)


def test_importing_the_room_does_not_import_torch():
    names = (
        "omnimodel.memory, omnimodel.memory.devices.host, omnimodel.memory.store, omnimodel.memory.devices.host_window"
    )
    assert run(f"import sys, {names}; print('torch' in sys.modules)") == "False"
