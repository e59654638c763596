"""Bounds and wishes of a manifest that the agent keeps: answers, preload, sizes; and pools, where it cannot."""

import pytest

from agent.world import HANDLER, MIB
from omnimodel.agent.supply import Machine, supply
from omnimodel.errors import DispatchError, OmniError, Reason

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

TALKS = HANDLER.replace(
    "        return {",
    """        if word == "talk":
            return {"sum": float(value), "text": "x" * int(value)}
        return {""",
).replace("-> dict[str, float]", "-> dict")


async def test_an_answer_longer_than_the_model_may_give_is_refused(world):
    await world.apply(world.manifest("m1", seed=1, handler=TALKS, limits={"responseBytes": "1Mi"}))
    assert await world.ask("m1", "talk:1000") == 1000
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1", f"talk:{2 * MIB}")
    assert (caught.value.status, caught.value.reason) == (502, Reason.TOO_LARGE)
    assert "1048576 bytes, its limits.responseBytes" in caught.value.problem
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_a_preloaded_model_is_resident_before_anybody_asks(world):
    unknown = HANDLER + "\n# not measured before\n"
    manifests = [world.manifest(f"m{seed}", seed=seed, handler=unknown) for seed in (1, 2)]
    for manifest in manifests:
        del manifest["spec"]["resources"]  # its process is made anew once its size is known
    manifests[0]["spec"]["residency"] = {"preload": True}
    await world.apply(*manifests)  # ready, both: whichever was measured last had the device for that
    await world.until(lambda: world.report("m1").tier == "resident", "it is there")
    assert world.report("m1").swaps["preload"] >= 1
    assert world.report("m2").tier != "resident"
    manifests[1]["spec"]["residency"] = {"preload": True}
    await world.apply(*manifests)
    await world.until(lambda: world.report("m2").tier == "resident", "an edit counts, too")


async def test_a_model_is_as_large_as_its_manifest_says_after_an_edit_of_its_size(world):
    await world.apply(world.manifest("m1", seed=1))
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    with pytest.raises(DispatchError):
        await world.ask("m1", "hoard:64")
    await world.apply(world.manifest("m1", seed=1, working_mib=120))
    await world.until(lambda: world.report("m1").working_bytes == 120 * MIB, "it was granted more")
    assert await world.ask("m1", "hoard:64") == pytest.approx(world.answer(8, 1))


async def test_a_refused_model_is_served_again_when_the_pool_is_large_enough(world):
    await world.apply(world.manifest("m1", seed=1))
    body, plain = world.pool.to_dict(), world.pool
    body["spec"]["device"]["memory"] = 32 * MIB
    world.pool = world.pool.model_validate(body)
    try:
        await world.apply(*world.manifests.values(), wait=False)
        await world.until(lambda: world.ledger.device.capacity_bytes == 32 * MIB, "the pool is small")
        with pytest.raises(DispatchError) as caught:
            await world.ask("m1")
        assert caught.value.reason is Reason.TOO_LARGE
        assert not world.report("m1").ready
    finally:
        world.pool = plain
        await world.apply(*world.manifests.values(), wait=False)
    await world.until(lambda: world.report("m1").ready, "nobody has to ask for it first")
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        pytest.param({"frameSize": 2 * MIB}, "device.frameSize 2.00 MiB takes effect when", id="the size of frames"),
        pytest.param({"count": 2}, "device.count 2 has no effect", id="several devices"),
    ],
)
async def test_what_of_an_edited_pool_has_no_effect_is_said(world, device, said):
    await world.apply()
    body, plain = world.pool.to_dict(), world.pool
    assert world.agent.report().pool.message == ""
    body["spec"]["device"] |= device
    world.pool = world.pool.model_validate(body)
    try:
        await world.apply()
        pool = world.agent.report().pool
        assert pool.ready
        assert said in pool.message
        assert world.ledger.device.frame_bytes == 4 * MIB
        told = [event async for event in world.agent.events.follow(follow=False) if event.kind == "OmniPool"]
        assert (told[-1].reason, told[-1].message) == ("WithoutEffect", pool.message)
    finally:
        world.pool = plain
        await world.apply()
    assert world.agent.report().pool.message == ""


async def test_memory_that_is_left_to_the_machine_is_measured_before_the_pool_takes_any(world):
    pool = world.pool.model_validate({"metadata": {"name": "default"}, "spec": {"device": {"type": "cpu"}}})
    before = Machine(total_bytes=8 << 30, available_bytes=6 << 30)
    found = supply(pool, before)
    assert found.budget_bytes == 3 << 30
    assert found.host_bytes == 3 << 30
    edited = pool.model_validate({**pool.to_dict(), "spec": {"device": {"type": "cpu"}, "hostMemory": "50%"}})
    assert supply(edited, before).budget_bytes == found.budget_bytes
    assert supply(edited, before).host_bytes == 4 << 30


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"device": {"memory": "9000Gi"}}, "spec.device.memory: 9000Gi is asked for, and there are 8.00 GiB"),
        ({"hostMemory": "9Gi"}, "spec.hostMemory: 9Gi is asked for, and there are 8.00 GiB"),
    ],
)
async def test_more_memory_than_the_machine_has_is_refused_with_both_numbers(world, spec, problem):
    pool = world.pool.model_validate({"metadata": {"name": "default"}, "spec": spec})
    with pytest.raises(OmniError) as caught:
        supply(pool, Machine(total_bytes=8 << 30, available_bytes=6 << 30))
    assert (caught.value.subject, caught.value.problem) == ("OmniPool default/default", problem)
