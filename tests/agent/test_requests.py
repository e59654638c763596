"""What a request meets on its way: how long it was held, handlers that never return, storms, and short deadlines."""


import pytest

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


async def test_the_time_of_the_computation_is_no_waiting(world):
    await world.apply(world.manifest("m1", seed=1))
    await world.ask("m1")
    async with world.request("m1", "sleep:0.3") as response:
        hold = response.hold
    assert (hold.reason, hold.wake_seconds) == ("none", 0.0)
    await world.agent.evict("default", "m1", 10)
    async with world.request("m1", "sleep:0.3") as response:
        hold = response.hold
    assert hold.reason == "wake"
    assert 0 < hold.wake_seconds <= hold.waited_seconds
