"""An agent with a pool of type cuda, on an emulated driver: images that are packed, larger than the arena, quantized."""

from __future__ import annotations

import pytest
import pytest_asyncio

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

import torch
from safetensors.torch import load_file

from agent.test_quantized import LAYERS, WIDE, layers, manifest  # noqa: F401
from agent.world import MIB, World
from gpu.machine import CONTEXT_BYTES, pool
from gpu.serving import emptied, serving
from gpu.test_agent import gpu  # noqa: F401
from omnimodel.agent import supply
from omnimodel.memory.devices.cuda_copy import slot_bytes
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

FRAME, PAGE = 4 * MIB, 2 * MIB
HOST_BYTES = 2048 * MIB
ARENA_BYTES = 32 * MIB
WORKING_MIB = 16


def whole(size_bytes: int, unit_bytes: int) -> int:
    """So many bytes in whole pages or frames."""
    return -(-size_bytes // unit_bytes) * unit_bytes


def weights(world: World, name: str, *, seed: int, dtype: str = "bfloat16", mib: int = 24) -> tuple[dict, float]:
    """A model whose checkpoint has so many MiB in float32, and what it answers."""
    path, _ = world.weights(mib, seed)
    values = load_file(path / "model.safetensors")["weight"].to(getattr(torch, dtype))
    answer = float(values.sum(dtype=torch.float64))
    resources = {"deviceMemory": values.nbytes + WORKING_MIB * MIB}
    found = world.manifest(name, mib=mib, seed=seed, runtime={"dtype": dtype}, resources=resources)
    found["spec"]["probe"]["expect"] = [{"at": "/outputs/0/data/0", "near": answer, "within": 0.5}]
    return found, answer


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def running(gpu, tmp_path_factory):  # noqa: F811
    """An agent with an arena of 32 MiB."""
    world = World(tmp_path_factory.mktemp("images"))
    world.pool = pool(memory=72 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supply, "ARENA_SHARE", ARENA_BYTES / HOST_BYTES)
        async with serving(world, gpu):
            yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(running):
    yield running
    await emptied(running)
    check(running)


def check(world: World) -> None:
    """Both accounts say what is there, to the byte."""
    world.check_ledger()
    memory = world.broker.memory
    assert world.ledger.host.held_bytes(kind=Kind.ARENA) == memory.device.pinned_bytes == ARENA_BYTES
    assert memory.arena.held_bytes == ARENA_BYTES - memory.device.arena.free_bytes


async def test_models_are_packed_and_answer_the_same_before_and_after_every_swap(world):
    models = dict(zip("abc", (weights(world, name, seed=seed) for seed, name in enumerate("abc", 1)), strict=True))
    await world.apply(*(manifest for manifest, _ in models.values()))  # the device has room for two of them
    images = {name: world.instance(name).prepared.image for name in models}
    for image in images.values():
        assert image.index.packed.frame_bytes == FRAME
        assert image.bytes == 12 * MIB
        assert image.stored_bytes < 0.75 * image.bytes
        assert sorted(path.name for path in image.path.iterdir()) == ["assets", "image.packed", "index.json"]
    for _ in range(3):
        for name, (_, answer) in models.items():
            assert await world.ask(name) == answer  # to the bit: a weight off by one in its last place shows
            assert world.report(name).device_bytes == (12 + WORKING_MIB) * MIB + CONTEXT_BYTES
            check(world)
    assert sum(world.instance(name).history.evictions for name in models) >= 6
    arena = world.broker.memory.arena
    held = [image for image in images.values() if arena.holds(image.digest)]
    assert len(held) == 3  # unpacked, only two would have room
    assert (
        arena.held_bytes
        == sum(whole(image.stored_bytes, PAGE) for image in held)
        == world.agent.report().pool.arena_bytes
    )
    stored = {image.digest: image.size_bytes for image in world.agent._opened.preparation.store.stored()}
    assert all(stored[image.digest] < 0.8 * image.bytes for image in images.values())


async def test_what_is_packed_stays_while_it_is_needed_and_goes_when_it_is_not(world):
    found, answer = weights(world, "a", seed=1)
    await world.apply(found)
    digest = world.instance("a").prepared.image.digest
    gone = (await world.agent.prune(dry_run=False))["removed"]
    assert digest not in {item["name"] for item in gone}
    assert await world.ask("a") == answer
    await world.apply()
    await world.until(lambda: not world.broker.instances, "it is gone")
    assert digest in {item["name"] for item in (await world.agent.prune(dry_run=False))["removed"]}


async def test_an_image_larger_than_the_arena_is_read_on_the_way_again_and_again(world, gpu):  # noqa: F811
    (large, answer), (small, said) = (
        weights(world, "large", seed=4, dtype="float32", mib=40),
        weights(world, "a", seed=1),
    )
    await world.apply(large, small)
    image = world.instance("large").prepared.image
    assert image.index.packed is None  # float32 is not coded
    assert image.bytes > ARENA_BYTES
    arena = world.broker.memory.arena
    most = []
    for turn in range(3):
        for name in ("large", "a"):
            await world.agent.evict("default", name, 60)
        world.broker.memory.frames.forget(image.digest)  # all of it is missing
        gpu.after = lambda _: most.append(arena.held_bytes)
        assert await world.ask("large") == answer, turn
        gpu.after = lambda _: None
        assert await world.ask("a") == said
        assert not arena.holds(image.digest)
        assert arena.held_bytes == whole(world.instance("a").prepared.image.stored_bytes, PAGE)
        check(world)
    assert (
        max(most) == 4 * slot_bytes(FRAME) + whole(world.instance("a").prepared.image.stored_bytes, PAGE) <= ARENA_BYTES
    )
    assert world.instance("large").history.wakes >= 3


def quantized(world: World, name: str, source, form: str) -> dict:
    found = manifest(world, name, source, form)
    found["spec"]["resources"]["deviceMemory"] = 40 * MIB
    return found


async def test_packed_weights_of_fp8_answer_as_plain_ones(world, layers, monkeypatch):  # noqa: F811
    await world.apply(quantized(world, "packed", layers, "fp8"))
    packed = world.instance("packed").prepared.image
    assert packed.index.packed.frame_bytes == FRAME
    assert packed.stored_bytes < 0.9 * packed.bytes
    assert world.report("packed").ready
    said = []
    for _ in range(3):
        said.append(await world.ask("packed"))
        await world.agent.evict("default", "packed", 60)
        world.broker.memory.frames.forget(packed.digest)  # all of it is decoded again
        check(world)
    monkeypatch.setattr(world.broker.memory.device, "decodes", lambda: False)
    await world.apply(quantized(world, "plain", layers, "fp8"))
    plain = world.instance("plain").prepared.image
    assert plain.index.packed is None
    assert plain.stored_bytes == plain.bytes == packed.bytes
    assert said == 3 * [await world.ask("plain")]


@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("fp8", 8), ("int4", 5.25)])  # with what groups have
async def test_a_quantized_image_is_stored_woken_and_accounted_for(world, layers, form, bits):  # noqa: F811
    found = quantized(world, "small", layers, form)
    await world.apply(found)
    report = world.report("small")
    values = LAYERS * WIDE * WIDE * bits / 8
    assert report.ready, report
    assert values <= report.weights_bytes < 1.02 * values
    said = await world.ask("small")
    for _ in range(2):
        await world.agent.evict("default", "small", 60)
        world.broker.memory.frames.forget(world.instance("small").prepared.image.digest)
        assert await world.ask("small") == said
        assert world.ledger.device.held_bytes("default/small", Kind.FRAMES) == whole(report.weights_bytes, FRAME)
        check(world)
