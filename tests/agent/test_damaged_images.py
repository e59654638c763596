"""Weights that are no longer what was published: nobody is answered from them."""

import time

import pytest

from agent.world import World

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]


def damage(world: World, digest: str) -> None:
    """Change a page in the middle of an image."""
    path = world.folder / "state" / "store" / "images" / digest / "image"
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x4b" * 4096)


async def test_an_image_that_was_damaged_between_two_runs_is_published_again(tmp_path):
    tmp_path.chmod(0o755)
    first = World(tmp_path)
    await first.agent.start()
    manifest = first.manifest("m1", seed=1)
    del manifest["spec"]["probe"]  # so that only the digests can tell
    await first.apply(manifest)
    assert await first.ask("m1") == pytest.approx(first.answer(8, 1))
    digest = first.instance("m1").prepared.image.digest
    await first.agent.stop(5.0)
    damage(first, digest)
    again = World(tmp_path)
    await again.agent.start()
    try:
        await again.apply(manifest)
        assert await again.ask("m1") == pytest.approx(again.answer(8, 1))
        assert "Publishing" in [event.reason async for event in again.agent.events.follow(follow=False)]
    finally:
        await again.agent.stop(5.0)


async def test_a_wrong_answer_after_a_wake_is_nobodys_answer_and_the_image_is_made_anew(world):
    manifest = world.manifest("m1", seed=1)
    manifest["spec"]["probe"]["afterWake"] = True
    await world.apply(manifest)
    await world.ask("m1")
    await world.agent.evict("default", "m1", 10)
    digest = world.instance("m1").prepared.image.digest
    world.broker.memory.frames.forget(digest)
    world.broker.memory.arena.drop(digest)
    damage(world, digest)
    began_seconds = time.time()
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    events = [event async for event in world.agent.events.follow(follow=False)]
    after = [event.reason for event in events if event.name == "m1" and event.time_seconds >= began_seconds]
    assert [reason for reason in after if reason in {"ProbeFailed", "Publishing", "Ready"}] == [
        "ProbeFailed",
        "Publishing",
        "Ready",
    ]
    assert world.report("m1").ready
    world.check_ledger()
    await world.agent.evict("default", "m1", 10)
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
