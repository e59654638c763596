"""What every device backend must do, written once: run on the host backend, and unchanged on cuda where there is one.

A test module takes all of it with `from memory.conformance import *` and a fixture `backend`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnimodel.errors import ImageError, LedgerError, OmniError


@dataclass
class Backend:
    """A device under test.

    Args:
        device: the agent's side.
        window: makes a process's side of so many frames.
        read: the bytes of a frame as the agent sees them.
        fill: overwrites a frame with one byte.
        fill_device: more frames than fit.
    """

    device: Any
    window: Callable[[int], Any]
    read: Callable[[Any], bytes]
    fill: Callable[[Any, int], None]
    too_many: int


def pattern(size_bytes: int, seed: int) -> bytes:
    """Bytes that differ from place to place and from image to image."""
    block = bytes((seed + 7 * number) % 251 for number in range(4093))
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def image(folder: Path, size_bytes: int, seed: int = 1) -> Path:
    """An image file."""
    path = folder / f"image-{seed}"
    path.write_bytes(pattern(size_bytes, seed))
    return path


def copy_of(frames: Sequence[Any]) -> list[int]:
    """Descriptors as a process would receive them: the window closes them."""
    return [os.dup(frame.descriptor) for frame in frames]


def bring(backend: Backend, path: Path, frames: Sequence[Any], **options: Any) -> None:
    """Stage an image, copy it, and take it out of the arena."""
    staged = backend.device.stage(str(path), path.stat().st_size)
    backend.device.copy(staged, frames, **options).wait(60)
    backend.device.unstage(staged)


def seen(window: Any, size_bytes: int) -> bytes:
    """What a process sees in its window."""
    return window.tensor(0, size_bytes).cpu().numpy().tobytes()


@pytest.mark.parametrize("pages", [1, 2, -1, -2], ids=["one page", "two pages", "all but one", "all but two"])
@pytest.mark.parametrize("frames", [1, 3])
def test_a_copy_brings_the_image_and_zeroes_the_rest(backend, tmp_path, frames, pages):
    frame_bytes = backend.device.frame_bytes
    size_bytes = (frames - 1) * frame_bytes + pages % (frame_bytes // 4096) * 4096
    held = backend.device.create(frames)
    for frame in held:
        backend.fill(frame, 0xAB)
    bring(backend, image(tmp_path, size_bytes), held)
    found = b"".join(backend.read(frame) for frame in held)
    assert found[:size_bytes] == pattern(size_bytes, 1)
    assert found[size_bytes:] == bytes(len(found) - size_bytes)


def test_frames_that_hold_their_part_are_not_touched(backend, tmp_path):
    size = backend.device.frame_bytes
    held = backend.device.create(3)
    for frame in held:
        backend.fill(frame, 0xCD)
    bring(backend, image(tmp_path, 3 * size), held, valid=[False, True, False])
    assert backend.read(held[0]) == pattern(3 * size, 1)[:size]
    assert backend.read(held[1]) == b"\xcd" * size
    assert backend.read(held[2]) == pattern(3 * size, 1)[2 * size :]


def test_done_bytes_grow_to_the_image_and_not_beyond(backend, tmp_path):
    size = 2 * backend.device.frame_bytes + 4096
    path = image(tmp_path, size)
    staged = backend.device.stage(str(path), size)
    held = backend.device.create(3)
    copy = backend.device.copy(staged, held)
    found = [copy.done_bytes()]
    copy.wait(60)
    found.append(copy.done_bytes())
    assert 0 <= found[0] <= found[1] == size
    skipped = backend.device.copy(staged, held, valid=[True, True, True])
    skipped.wait(60)
    assert skipped.done_bytes() == size
    backend.device.unstage(staged)


def test_a_window_sees_the_image_and_later_another_at_the_same_addresses(backend, tmp_path):
    size = backend.device.frame_bytes + 4096
    first, second = backend.device.create(2), backend.device.create(2)
    window = backend.window(2)
    view = window.tensor(4096, 64)
    for seed, held in ((1, first), (2, second), (3, first)):
        bring(backend, image(tmp_path, size, seed), held)
        window.map(copy_of(held))
        assert seen(window, size) == pattern(size, seed)
        assert view.cpu().numpy().tobytes() == pattern(size, seed)[4096:4160]
        assert window.tensor(4096, 64).data_ptr() == view.data_ptr()
        window.unmap()
    window.close()


def test_two_windows_see_one_image(backend, tmp_path):
    held = backend.device.create(1)
    bring(backend, image(tmp_path, 4096), held)
    windows = [backend.window(1), backend.window(1)]
    for window in windows:
        window.map(copy_of(held))
    assert {seen(window, 4096) for window in windows} == {pattern(4096, 1)}
    for window in windows:
        window.unmap()
        window.close()


def test_a_window_closes_every_descriptor_it_is_given(backend):
    held = backend.device.create(2)
    window = backend.window(2)
    before = len(os.listdir("/proc/self/fd"))
    window.map(copy_of(held))
    window.unmap()
    with pytest.raises(OmniError):
        window.map(copy_of(held[:1]))
    assert len(os.listdir("/proc/self/fd")) == before
    window.map(copy_of(held))  # a refused map leaves the window as it was
    window.unmap()
    window.close()


def test_what_is_not_a_frame_is_not_mapped(backend):
    held = backend.device.create(1)
    window = backend.window(2)
    readable, writable = os.pipe()
    os.close(writable)
    with pytest.raises(OmniError):
        window.map([*copy_of(held), readable])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(readable)
    window.close()


def test_a_tensor_outside_of_the_window_is_refused(backend):
    window = backend.window(1)
    with pytest.raises(OmniError, match="outside"):
        window.tensor(backend.device.frame_bytes - 1, 2)
    window.close()


def test_a_window_without_frames(backend):
    window = backend.window(0)
    assert window.tensor(0, 0).numel() == 0
    window.map([])
    window.unmap()
    window.close()


def test_an_image_without_weights_needs_no_frames(backend, tmp_path):
    staged = backend.device.stage(str(image(tmp_path, 0)), 0)
    assert backend.device.copy(staged, []).wait(10) >= 0
    backend.device.unstage(staged)


@pytest.mark.parametrize("change", [-4096, 4096], ids=["shorter", "longer"])
def test_a_file_of_another_length_is_not_staged(backend, tmp_path, change):
    path = image(tmp_path, 8192)
    with pytest.raises(ImageError, match="8192"):
        backend.device.stage(str(path), 8192 + change)


def test_a_missing_file_is_not_staged(backend, tmp_path):
    with pytest.raises(ImageError, match="nothing-here"):
        backend.device.stage(str(tmp_path / "nothing-here"), 4096)


def test_a_wrong_number_of_frames_is_refused(backend, tmp_path):
    staged = backend.device.stage(str(image(tmp_path, 4096)), 4096)
    with pytest.raises(OmniError, match=r"2 frames|given 2"):
        backend.device.copy(staged, backend.device.create(2))
    backend.device.unstage(staged)


def test_more_frames_than_there_is_room_for_are_refused_and_none_is_made(backend):
    descriptors, free = len(os.listdir("/proc/self/fd")), backend.device.free_bytes()
    with pytest.raises(LedgerError, match=str(backend.too_many * backend.device.frame_bytes)):
        backend.device.create(backend.too_many)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert abs(backend.device.free_bytes() - free) < max(64 << 20, free // 4)


def test_ids_are_never_given_twice_and_destroying_twice_is_harmless(backend):
    first = backend.device.create(2)
    backend.device.destroy(first)
    backend.device.destroy(first)
    second = backend.device.create(2)
    assert {frame.id for frame in second}.isdisjoint({frame.id for frame in first})


def test_calls_from_many_threads(backend, tmp_path):
    size = backend.device.frame_bytes + 4096
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            held = backend.device.create(2)
            path = tmp_path / str(seed)
            path.mkdir()
            for turn in range(3):
                bring(backend, image(path, size, 10 * seed + turn), held)
                found = b"".join(backend.read(frame) for frame in held)
                assert found[:size] == pattern(size, 10 * seed + turn)
            backend.device.destroy(held)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
