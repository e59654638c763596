"""What is learned from wakes: how fast images are copied, and what a wake takes beyond its copy."""

from __future__ import annotations

from statistics import median

import pytest

from agent.world import World
from omnimodel.agent.wake_costs import WakeCosts
from omnimodel.placement.state import Constants

ASSUMED = Constants().wake_fixed_seconds


@pytest.mark.parametrize(
    ("wakes", "seconds"),
    [
        ([], ASSUMED),
        ([0.5, 0.5], ASSUMED),
        ([0.020, 0.024, 0.022], 0.022),
        ([0.020, 9.0, 0.024, 0.022, 0.021], 0.022),
        ([-0.001, -0.001, -0.001], 0.0),
        ([0.001] * 9 + [0.030] * 9, 0.030),
    ],
    ids=[
        "before the first wake it is as was assumed",
        "two may both have been held up",
        "three agree",
        "one that was held up says nothing",
        "a copy may end a moment after its wake",
        "what has changed is learned",
    ],
)
def test_what_a_wake_takes_beyond_its_copy_is_learned(wakes: list[float], seconds: float) -> None:
    costs = WakeCosts()
    for took in wakes:
        costs.note_beyond(took)
    assert costs.learned(Constants()) == Constants(wake_fixed_seconds=pytest.approx(seconds))


def test_the_rate_follows_copies_that_are_large_enough_to_say_something() -> None:
    costs = WakeCosts()
    costs.note_copy(1 << 20, 1.0)
    assert costs.learned(Constants()) == Constants()
    for seconds in (0.1, 0.2):
        costs.note_copy(1 << 30, seconds)
    assert costs.learned(Constants()).copy_bytes_per_second == pytest.approx((1 << 30) * (10 - 0.2 * 5))


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="session")
async def test_real_wakes_teach_the_policy_what_they_take_beyond_their_copy(world: World) -> None:
    await world.apply(world.manifest("m1", seed=1))
    took = []
    for _ in range(9):  # what earlier wakes of this agent took is forgotten
        await world.agent.evict("default", "m1", 30)
        assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
        took.append(world.instance("m1").history.last_wake_seconds)
    world.broker.kick()
    await world.until(lambda: world.broker.constants.wake_fixed_seconds != ASSUMED, "it is learned")
    assert 0 < world.broker.constants.wake_fixed_seconds <= median(took)
