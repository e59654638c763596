"""The owner table of frames: real frames, real copies; who owns what, and what the free ones still hold."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading

import pytest

from omnimodel.errors import LedgerError
from omnimodel.memory.devices.host import HostDevice
from omnimodel.memory.frames import FramePool
from omnimodel.memory.ledger import DeviceAccount, Kind

FRAME = 2 << 20


@pytest.fixture
def device():
    device = HostDevice(FRAME, threads=1)
    yield device
    device.close()


@pytest.fixture
def account():
    return DeviceAccount(8 * FRAME, FRAME)


@pytest.fixture
def pool(device, account):
    return FramePool(device, account)


async def wake(pool, model, frames, digest=None, working_bytes=0, worth=lambda digest: 0.0):
    pool.account.promise(model, frames, working_bytes)
    try:
        await pool.make_room(worth)
        allocation = pool.take(model, digest or model, worth)
    except BaseException:
        pool.account.cancel(model)
        raise
    pool.arrived(allocation)
    return allocation


async def test_frames_are_made_when_they_are_first_promised_and_recycled_afterwards(pool, account):
    first = await wake(pool, "a", 3)
    assert account.frames == 3
    assert pool.release("a") == 3
    second = await wake(pool, "b", 3)
    assert account.frames == 3
    assert {frame.id for frame in first.frames} == {frame.id for frame in second.frames}
    assert not any(second.valid)
    assert pool.owners() == dict.fromkeys((frame.id for frame in second.frames), "b")


async def test_frames_of_an_evicted_model_stay_valid_until_they_are_taken(pool):
    await pool.create_ahead(8)
    await wake(pool, "a", 4)
    pool.release("a")
    assert pool.valid_frames("a") == 4
    await wake(pool, "b", 6)  # 4 are free beside those of a, so that 2 of a's are taken: its end
    pool.release("b")
    assert pool.valid_frames("a") == 2
    again = await wake(pool, "a", 4)
    assert again.valid == (True, True, False, False)
    assert again.missing == 2


async def test_an_image_that_wakes_again_has_nothing_to_copy(pool):
    first = await wake(pool, "a", 4)
    pool.release("a")
    again = await wake(pool, "a", 4)
    assert again.valid == (True,) * 4
    assert [frame.id for frame in again.frames] == [frame.id for frame in first.frames]


async def test_the_least_worth_goes_first(pool):
    await pool.create_ahead(8)
    for model in ("a", "b", "c"):
        await wake(pool, model, 2)
    for model in ("a", "b", "c"):
        pool.release(model)
    worth = {"a": 3.0, "b": 1.0, "c": 2.0}
    await wake(pool, "d", 5, worth=worth.__getitem__)  # two empty ones, then b, then one of c
    assert [pool.valid_frames(digest) for digest in "abc"] == [2, 0, 1]


async def test_an_image_is_asked_for_its_worth_once_however_many_frames_hold_it(pool, account):
    await pool.create_ahead(8)
    for model in ("a", "b"):
        await wake(pool, model, 4)
    for model in ("a", "b"):
        pool.release(model)
    asked = []
    await wake(pool, "c", 7, working_bytes=FRAME, worth=lambda digest: asked.append(digest) or 0.0)
    assert sorted(asked) == ["a", "a", "b", "b"]  # once for the frame that goes, once for those that are taken


async def test_a_wake_that_finds_empty_frames_asks_for_no_worth(pool):
    await pool.create_ahead(8)
    await wake(pool, "a", 4)
    pool.release("a")
    await wake(pool, "b", 4, worth=lambda digest: pytest.fail(f"asked for {digest}"))


async def test_doubles_go_before_the_only_copy(pool):
    await pool.create_ahead(8)
    await wake(pool, "a", 2, digest="image")
    await wake(pool, "b", 2, digest="image")  # two models of one image, at once
    pool.release("a")
    pool.release("b")
    assert pool.valid_frames("image") == 2
    await wake(pool, "c", 6)
    assert pool.valid_frames("image") == 2


async def test_a_copy_that_did_not_end_leaves_nothing_valid(pool, account):
    account.promise("a", 3)
    await pool.make_room()
    pool.take("a", "a")
    pool.release("a")
    assert pool.valid_frames("a") == 0


async def test_part_of_the_frames_valid_and_the_copy_of_the_rest_failed(pool, account):
    await pool.create_ahead(8)
    await wake(pool, "a", 3)
    pool.release("a")
    await wake(pool, "b", 7)
    pool.release("b")
    account.promise("a", 3)
    await pool.make_room()
    taken = pool.take("a", "a")
    assert taken.valid == (True, False, False)
    pool.release("a")
    assert pool.valid_frames("a") == 1


async def test_forgotten_contents_are_copied_again(pool):
    await wake(pool, "a", 3)
    pool.release("a")
    pool.forget("a")
    assert not any((await wake(pool, "a", 3)).valid)


async def test_forgotten_contents_of_somebody_s_frames_are_copied_again_once_they_are_free(pool):
    await wake(pool, "a", 3)
    pool.quarantine("a")
    pool.forget("a")
    pool.recover("a")
    assert pool.valid_frames("a") == 0
    assert not any((await wake(pool, "a", 3)).valid)


async def test_frames_go_for_working_memory_and_come_back(pool, account):
    await pool.create_ahead(8)
    assert account.frames == 8
    await wake(pool, "a", 2, working_bytes=FRAME + 1)
    assert account.frames == 6
    pool.release("a")
    account.set("a", Kind.WORKING, 0)
    await wake(pool, "b", 8)
    assert account.frames == 8


async def test_working_memory_destroys_the_frames_that_are_worth_least(pool, account):
    await wake(pool, "a", 4)
    await wake(pool, "b", 4)
    pool.release("a")
    pool.release("b")
    worth = {"a": 1.0, "b": 2.0}.__getitem__
    account.set("c", Kind.WORKING, 3 * FRAME)
    await pool.make_room(worth)
    assert (pool.valid_frames("a"), pool.valid_frames("b")) == (1, 4)


async def test_who_holds_working_memory_does_not_make_the_frames_promised_to_another(
    pool, account, device, monkeypatch
):
    await wake(pool, "a", 6)
    pool.release("a")
    account.promise("b", 8)
    monkeypatch.setattr(device, "create", lambda count: pytest.fail(f"{count} frames of another's wake are made"))
    account.hold("c", Kind.CONTEXT, account.free_bytes)
    await pool.give_way()
    assert (account.surplus_frames(), account.frames, account.missing_frames()) == (0, 6, 2)


async def test_quarantined_frames_are_nobodys_until_the_process_is_gone(pool, account):
    await wake(pool, "a", 6)
    assert pool.quarantine("a") == 6
    assert pool.frames_of("a") == []
    assert pool.quarantined() == {"a": 6}
    with pytest.raises(LedgerError, match=f"{2 * FRAME} of {8 * FRAME} are free"):
        account.promise("b", 3)
    await wake(pool, "a", 2)  # its successor
    assert pool.recover("a") == 6
    assert len(pool.frames_of("a")) == 2
    assert account.held_bytes("a", Kind.FRAMES) == 2 * FRAME
    assert account.free_bytes == 6 * FRAME


async def test_frames_are_not_taken_before_they_are_made(pool, account):
    account.promise("a", 2)
    with pytest.raises(LedgerError, match="0 have been made"):
        pool.take("a", "a")
    assert account.promised("a") is not None


async def test_a_device_without_memory_leaves_the_account_as_it_was(pool, account, device, monkeypatch):
    def full(count):
        raise LedgerError("device host", "no room")

    monkeypatch.setattr(device, "create", full)
    account.promise("a", 2)
    with pytest.raises(LedgerError, match="no room"):
        await pool.make_room()
    assert account.frames == 0
    account.cancel("a")
    assert account.free_bytes == 8 * FRAME


async def test_a_cancelled_wake_leaves_its_frames_to_the_next(pool, account, device, monkeypatch):
    go, began, create = threading.Event(), threading.Event(), device.create

    def slow(count):
        began.set()
        assert go.wait(30)
        return create(count)

    monkeypatch.setattr(device, "create", slow)
    first = asyncio.ensure_future(wake(pool, "a", 5))
    assert await asyncio.to_thread(began.wait, 30)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.ensure_future(wake(pool, "b", 7))
    await asyncio.sleep(0)
    go.set()
    assert len((await second).frames) == 7
    assert account.frames == 7
    assert account.held_bytes() == 7 * FRAME


async def test_two_wakes_at_once_and_frames_made_ahead(pool, account):
    ahead = asyncio.ensure_future(pool.create_ahead(8))
    a, b = await asyncio.gather(wake(pool, "a", 4), wake(pool, "b", 4))
    await ahead
    assert {frame.id for frame in a.frames}.isdisjoint({frame.id for frame in b.frames})
    assert account.frames == 8


def staged_image(device, folder, frames):
    path = folder / "image"
    path.write_bytes(b"".join(bytes([65 + number]) * FRAME for number in range(frames)))
    return device.stage(str(path), frames * FRAME)


async def test_filling_copies_only_what_is_missing(pool, account, device, tmp_path):
    await pool.create_ahead(8)
    staged = staged_image(device, tmp_path, 3)
    account.promise("a", 3)
    await pool.make_room()
    first = pool.take("a", "a")
    assert await pool.fill(first, staged, 30) >= 0
    pool.release("a")
    for frame in first.frames:
        ctypes.memset(frame.handle.address, 0, 1)  # shows which frames are copied again
    await wake(pool, "b", 6)
    pool.release("b")
    account.promise("a", 3)
    await pool.make_room()
    again = pool.take("a", "a")
    await pool.fill(again, staged, 30)
    assert again.valid == (True, True, False)
    assert [ctypes.string_at(frame.handle.address, 2) for frame in again.frames] == [b"\0A", b"\0B", b"CC"]
    assert pool.frames_of("a") == list(again.frames)
    device.unstage(staged)


class SlowCopy:
    """A copy that ends when it is told to."""

    def __init__(self):
        self.began, self.go = threading.Event(), threading.Event()

    def wait(self, timeout_seconds=None):
        self.began.set()
        assert self.go.wait(30)
        return 1.0


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_frames_are_not_left_while_something_writes_into_them(pool, account, device, monkeypatch, how):
    copy = SlowCopy()
    monkeypatch.setattr(device, "copy", lambda *_arguments, **_options: copy)
    account.promise("a", 2)
    await pool.make_room()
    allocation = pool.take("a", "a")
    fill = asyncio.ensure_future(pool.fill(allocation, None, 0.01 if how == "late" else 30))
    assert await asyncio.to_thread(copy.began.wait, 30)
    if how == "cancelled":
        fill.cancel()
    done, _ = await asyncio.wait([fill], timeout=0.2)
    assert not done
    copy.go.set()
    with pytest.raises(TimeoutError if how == "late" else asyncio.CancelledError):
        await fill
    pool.release("a")
    assert pool.valid_frames("a") == 0


async def test_frames_released_while_they_are_filled_come_free_at_the_end(pool, account, device, monkeypatch):
    """A process that dies in the middle of its wake."""
    copy = SlowCopy()
    monkeypatch.setattr(device, "copy", lambda *_arguments, **_options: copy)
    account.promise("a", 5)
    await pool.make_room()
    fill = asyncio.ensure_future(pool.fill(pool.take("a", "a"), None, 30))
    assert await asyncio.to_thread(copy.began.wait, 30)
    pool.recover("a")
    assert pool.release("a") == 0
    assert pool.recover("a") == 0
    with pytest.raises(LedgerError):
        account.promise("b", 4)
    assert account.held_bytes("a", Kind.QUARANTINE) == 5 * FRAME
    copy.go.set()
    await fill
    assert account.free_bytes == 8 * FRAME
    assert pool.valid_frames("a") == 5  # the copy was whole
    assert len((await wake(pool, "b", 8)).frames) == 8


async def test_close_keeps_what_a_process_may_still_read(pool, account, device):
    allocation = await wake(pool, "a", 2)
    await pool.create_ahead(5)
    await pool.close()
    assert account.frames == 2
    assert os.fstat(allocation.frames[0].descriptor).st_size == FRAME


async def test_frames_of_an_agent_that_is_gone_are_taken_over_with_what_they_hold(pool, device):
    first = await wake(pool, "a", 2)
    ctypes.memset(first.frames[1].handle.address, 7, FRAME)
    kept = {frame.id: os.dup(frame.descriptor) for frame in first.frames}
    other = HostDevice(FRAME, threads=1)
    try:
        account = DeviceAccount(8 * FRAME, FRAME)
        after = FramePool(other, account)
        frames = after.adopt("b", "a", kept, 3 << 20)
        assert [frame.id for frame in frames] == [frame.id for frame in first.frames]
        assert ctypes.string_at(frames[1].handle.address, FRAME) == b"\7" * FRAME
        assert account.snapshot().held == {"b": {Kind.FRAMES: 2 * FRAME, Kind.WORKING: 3 << 20}}
        ctypes.memset(frames[1].handle.address, 8, FRAME)
        assert ctypes.string_at(first.frames[1].handle.address, 1) == b"\10"  # the same memory
        assert after.release("b") == 2
        assert after.valid_frames("a") == 2
        new = await wake(after, "c", 6)
        assert len({frame.id for frame in new.frames}) == account.frames == 6  # no number twice
    finally:
        other.close()


async def test_what_is_no_frame_is_not_taken_over(device, account):
    small, good = os.memfd_create("small"), os.memfd_create("good")
    os.ftruncate(good, FRAME)
    pool = FramePool(device, account)
    with pytest.raises(LedgerError, match="another size"):
        pool.adopt("a", "a", {3: good, 4: small}, 1 << 20)
    assert account.snapshot().held == {}
    assert (account.frames, pool.owners()) == (0, {})
    for descriptor in (small, good):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


async def test_more_than_the_budget_is_not_taken_over(device, account):
    good = [os.memfd_create("good") for _ in range(2)]
    for descriptor in good:
        os.ftruncate(descriptor, FRAME)
    pool = FramePool(device, account)
    with pytest.raises(LedgerError, match="are free"):
        pool.adopt("a", "a", dict(enumerate(good)), 7 * FRAME)
    assert account.snapshot().held == {}
    assert account.frames == 0
    for descriptor in good:
        os.close(descriptor)
