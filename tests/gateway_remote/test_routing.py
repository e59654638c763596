"""Several agents behind one gateway: who is asked."""

from __future__ import annotations

import asyncio

from gateway.world import until
from gateway_remote.world import Cluster, chat
from omnimodel.errors import DispatchError, Reason


async def test_the_agent_where_it_is_resident_is_asked(cluster: Cluster) -> None:
    cluster.pods[0].add("m", tier="warm")
    cluster.pods[1].add("m", tier="resident", concurrency=4)
    await cluster.known()
    for _ in range(3):
        assert (await cluster.post(json=chat())).status == 200
    assert cluster.asked() == [0, 3]


async def test_a_swap_is_followed(cluster: Cluster) -> None:
    cluster.pods[0].add("m", tier="warm")
    cluster.pods[1].add("m", tier="resident")
    await cluster.known()
    cluster.pods[0].change("m", tier="resident")
    cluster.pods[1].change("m", tier="warm")
    await cluster.tiers("resident", "warm")
    await cluster.post(json=chat())
    assert cluster.asked() == [1, 0]


async def test_the_same_zone_is_preferred_and_load_is_spread_beyond_it(cluster: Cluster) -> None:
    cluster.add(tier="resident")
    for pod in cluster.pods:
        pod.change("m", concurrency=3)
        pod.process.gate.clear()
    await cluster.known()
    await until(lambda: all(s.snapshot.cards["default/m"].concurrency == 3 for s in cluster.backend.seats.values()))
    asked = [asyncio.create_task(cluster.post(json=chat())) for _ in range(3)]
    await until(lambda: cluster.pods[0].process.running == 3)
    assert cluster.asked() == [3, 0], "the near one has places for all three"
    asked += [asyncio.create_task(cluster.post(json=chat())) for _ in range(3)]
    await until(lambda: cluster.pods[1].process.running == 3)
    assert cluster.asked() == [3, 3], "the near one is full, the far one has free places"
    for pod in cluster.pods:
        pod.process.gate.set()
    assert {response.status for response in await asyncio.gather(*asked)} == {200}


async def test_a_burst_for_a_cold_model_wakes_one_copy_of_it(cluster: Cluster) -> None:
    lines = cluster.add(awake=False, tier="cold")
    for pod in cluster.pods:
        pod.change("m", concurrency=8)
    await cluster.known()
    await until(lambda: all(s.snapshot.cards["default/m"].concurrency == 8 for s in cluster.backend.seats.values()))
    asked = [asyncio.create_task(cluster.post(json=chat())) for _ in range(6)]
    await until(lambda: sum(line.waiting for line in lines) == 6)
    assert sorted(line.waiting for line in lines) == [0, 6]
    for line in lines:
        line.awake.set()
    assert {response.status for response in await asyncio.gather(*asked)} == {200}


async def test_a_full_queue_spills_to_another_agent_and_then_says_so(cluster: Cluster) -> None:
    lines = cluster.add(queue=1, awake=False, tier="warm")
    await cluster.known()
    asked = [asyncio.create_task(cluster.post(json=chat())) for _ in range(2)]
    await until(lambda: [line.waiting for line in lines] == [1, 1])
    refused = await cluster.post(json=chat())
    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) >= 1
    for line in lines:
        line.awake.set()
    assert {response.status for response in await asyncio.gather(*asked)} == {200}


async def test_a_model_that_failed_on_one_agent_is_served_by_the_other(cluster: Cluster) -> None:
    """aibrix#2744: out of memory, and retried on the same pod."""
    failure = DispatchError("OmniModel default/m", "out of memory", reason=Reason.OUT_OF_MEMORY, status=503)
    cluster.pods[0].add("m", tier="resident", failure=failure)
    cluster.pods[1].add("m", tier="cold")
    await cluster.known()
    response = await cluster.post(json=chat())
    assert response.status == 200
    assert cluster.asked() == [1, 1]
    cluster.pods[1].agent.lines["m"].failure = failure
    response = await cluster.post(json=chat())
    assert response.status == 503
    assert (await response.json())["error"]["code"] == "out_of_memory"


async def test_cards_are_merged_and_sorted(cluster: Cluster) -> None:
    cluster.pods[0].add("b", tier="cold")
    cluster.pods[1].add("b", tier="resident")
    cluster.pods[1].add("a", tier="warm")
    await cluster.known("default/b")
    assert [(card.name, card.tier) for card in cluster.backend.models()] == [("a", "warm"), ("b", "resident")]
