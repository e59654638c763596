"""The arena: a byte budget, and the least worth leaves first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from omnimodel.errors import ImageError, LedgerError
from omnimodel.memory.arena import Arena
from omnimodel.memory.devices.host import HostDevice
from omnimodel.memory.image import ImageWriter
from omnimodel.memory.ledger import Account, Kind
from omnimodel.memory.store import Store

FRAME = 2 << 20
PAGE = 4096


@pytest.fixture
def device():
    device = HostDevice(FRAME, threads=1)
    yield device
    device.close()


@pytest.fixture
def account():
    return Account("host", 10 * PAGE)


@pytest.fixture
def images(tmp_path):
    store = Store(tmp_path)
    made = {}
    for number, name in enumerate("abcd", 1):
        staging = store.staging()
        with ImageWriter(staging.path, FRAME) as writer:
            writer.add(name, "uint8", (number * PAGE,), bytes([number]) * (number * PAGE))
        made[name] = store.commit(staging, name)
    return made


def worth_of(images, **worth):
    table = {images[name].digest: value for name, value in worth.items()}
    return lambda digest: table.get(digest, 0.0)


async def test_images_stay_until_their_bytes_are_wanted_for_something_worth_more(device, account, images):
    arena = Arena(device, account, 6 * PAGE)
    worth = worth_of(images, a=3, b=1, c=2)
    for name in "abc":
        await arena.stage(images[name], worth)
    assert arena.held_bytes == 6 * PAGE
    await arena.stage(images["d"], worth)  # b and c must go for it
    assert {name for name in "abcd" if arena.holds(images[name].digest)} == {"a", "d"}
    assert arena.held_bytes == account.held_bytes(kind=Kind.ARENA) == 5 * PAGE
    await arena.close()
    assert account.free_bytes == 10 * PAGE


async def test_what_is_being_copied_is_never_the_one_to_go(device, account, images):
    arena = Arena(device, account, 4 * PAGE)
    async with arena.staged(images["b"], worth_of(images)) as staged:
        with pytest.raises(LedgerError, match=f"{3 * PAGE} bytes of the arena, {2 * PAGE} could be free"):
            await arena.stage(images["c"], worth_of(images, c=9))
        device.copy(staged, device.create(1)).wait(10)
    await arena.stage(images["c"], worth_of(images))
    assert not arena.holds(images["b"].digest)
    await arena.close()


async def test_the_host_account_bounds_the_arena_too(device, account, images):
    account.hold("zygote", Kind.ZYGOTE, 8 * PAGE)
    arena = Arena(device, account)
    await arena.stage(images["b"], worth_of(images))
    with pytest.raises(LedgerError):
        await arena.stage(images["c"], worth_of(images))
    assert arena.give_up(PAGE, worth_of(images)) == 2 * PAGE
    assert account.free_bytes == 2 * PAGE
    await arena.close()


async def test_an_image_is_read_once_for_all_who_want_it(device, account, images, monkeypatch):
    calls, stage = [], device.stage
    monkeypatch.setattr(device, "stage", lambda *asked, **how: calls.append(1) or stage(*asked, **how))
    arena = Arena(device, account)
    await asyncio.gather(*(arena.stage(images["a"], worth_of(images)) for _ in range(10)))
    assert len(calls) == 1
    await arena.close()


async def test_a_cancelled_reader_leaves_the_account_exact(device, account, images, monkeypatch):
    go, began, stage = threading.Event(), threading.Event(), device.stage

    def slow(*asked, **how):
        began.set()
        assert go.wait(30)
        return stage(*asked, **how)

    monkeypatch.setattr(device, "stage", slow)
    arena = Arena(device, account)
    reader = asyncio.ensure_future(arena.stage(images["c"], worth_of(images)))
    assert await asyncio.to_thread(began.wait, 30)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    arena.drop(images["c"].digest)
    assert account.held_bytes() == 3 * PAGE  # its bytes come free when they are free
    go.set()
    await arena.close()
    assert account.held_bytes() == 0


async def test_an_image_that_cannot_be_read_holds_nothing(device, account, images):
    arena = Arena(device, account)
    images["a"].image.unlink()
    with pytest.raises(ImageError):
        await arena.stage(images["a"], worth_of(images))
    assert account.held_bytes() == 0
    assert not arena.holds(images["a"].digest)


async def test_an_image_in_use_is_dropped_at_the_end_of_its_use(device, account, images):
    arena = Arena(device, account)
    async with arena.staged(images["a"], worth_of(images)):
        arena.drop(images["a"].digest)
        assert arena.holds(images["a"].digest)
    assert not arena.holds(images["a"].digest)
    assert account.held_bytes() == 0
