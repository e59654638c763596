"""An agent that dies or drains behind a gateway: what goes to another one, and what is never sent twice."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from gateway.standin import chunk_event
from gateway.world import until
from gateway_remote.world import PATH, Cluster, chat
from omnimodel.errors import DispatchError, Reason


async def test_an_agent_that_dies_while_it_holds_requests_loses_none_of_them(cluster: Cluster) -> None:
    first, second = cluster.add(awake=False, tier="warm")
    await cluster.known()
    asked = [asyncio.create_task(cluster.post(json=chat())) for _ in range(10)]
    await until(lambda: first.waiting >= 5)
    await cluster.pods[0].kill()
    await until(lambda: second.waiting == 10)
    second.awake.set()
    assert {response.status for response in await asyncio.gather(*asked)} == {200}
    assert cluster.pods[0].process.bodies == [], "nothing that was held had been sent"


async def test_a_held_upload_goes_on_to_another_agent_whole(cluster: Cluster) -> None:
    lines = cluster.add("w", "automatic-speech-recognition", awake=False, tier="warm")
    await cluster.known("default/w")
    form = aiohttp.FormData()
    form.add_field("model", "w")
    form.add_field("file", b"RIFF" * (1 << 18), filename="a.wav")
    asked = asyncio.create_task(cluster.post("/v1/audio/transcriptions", data=form))
    await until(lambda: any(line.waiting for line in lines))
    held = next(index for index, line in enumerate(lines) if line.waiting)
    await cluster.pods[held].kill()
    await until(lambda: lines[1 - held].waiting)
    lines[1 - held].awake.set()
    assert (await asked).status == 200
    assert cluster.pods[1 - held].process.received_bytes == 4 << 18


async def test_what_a_model_has_taken_is_not_sent_again(cluster: Cluster) -> None:
    cluster.add(tier="resident")
    cluster.pods[0].process.gate.clear()
    await cluster.known()
    asked = asyncio.create_task(cluster.post(json=chat()))
    await until(lambda: cluster.pods[0].process.running)
    await cluster.pods[0].kill()
    response = await asked
    assert response.status == 502
    assert "pod-0" in (await response.json())["error"]["message"]
    assert cluster.asked() == [1, 0]


async def test_a_stream_that_loses_its_agent_ends_with_an_error_event(cluster: Cluster) -> None:
    cluster.add(tier="resident")
    cluster.pods[0].process.gate.clear()
    await cluster.known()
    response = await cluster.session.post(cluster.url + PATH, json=chat(stream=True, chunks=3))
    assert await response.content.readuntil(b"\n\n") == chunk_event("0 ")
    await cluster.pods[0].kill()
    rest = await response.read()
    events = [event for event in rest.split(b"\n\n") if event and not event.startswith(b":")]
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "crashed"


async def test_a_dead_agent_is_out_of_the_table_at_once_and_back_when_it_lives(cluster: Cluster) -> None:
    """ray#65976: a replica that died left the routing table too late, and calls waited on it."""
    cluster.add(tier="resident")
    await cluster.known()
    seat = cluster.backend.seats[cluster.pods[0].listening.address]
    await cluster.pods[0].kill()
    responses = await asyncio.gather(*(cluster.post(json=chat()) for _ in range(20)))
    assert {response.status for response in responses} == {200}
    assert len(cluster.pods[1].agent.requests) == 20
    await until(lambda: not seat.there)
    await cluster.pods[0].revive()
    await until(lambda: seat.there)
    assert (await cluster.post(json=chat())).status == 200
    assert cluster.asked() == [1, 20], "it is the nearer one again"


async def test_a_silent_agent_is_lost_and_what_it_holds_goes_elsewhere(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that vanishes closes no connection."""
    first, second = cluster.add(awake=False, tier="warm")
    await cluster.known()
    seat = cluster.backend.seats[cluster.pods[0].listening.address]
    asked = asyncio.create_task(cluster.post(json=chat()))
    await until(lambda: first.waiting == 1)
    cluster.backend._out(seat, "no sign of life")
    await until(lambda: second.waiting == 1)
    second.awake.set()
    assert (await asked).status == 200


async def test_an_agent_that_is_lost_in_the_moment_it_begins_loses_nothing(cluster: Cluster) -> None:
    lines = cluster.add(awake=False, tier="warm")
    await cluster.known()
    seats = [cluster.backend.seats[pod.listening.address] for pod in cluster.pods]
    for round_ in range(40):
        for line in lines:
            line.awake.clear()
        asked = [asyncio.create_task(cluster.post(json=chat())) for _ in range(6)]
        await until(lambda: sum(line.waiting for line in lines) == 6)
        for line in lines:
            line.awake.set()
        await asyncio.sleep(round_ % 8 * 0.0005)
        cluster.backend._out(seats[round_ % 2], "it is stopping")
        assert {response.status for response in await asyncio.gather(*asked)} == {200}
        cluster.pods[round_ % 2].reporter.tell()
        await until(lambda: all(seat.there for seat in seats))


async def test_requests_wait_for_the_only_agent_to_come_back(cluster: Cluster) -> None:
    cluster.pods[0].add("m", tier="resident")
    await cluster.known(pods=1)
    await cluster.pods[0].kill()
    asked = [asyncio.create_task(cluster.post(json=chat())) for _ in range(5)]
    await until(lambda: cluster.backend._held.get("default/m") == 5)
    await cluster.pods[0].revive()
    assert {response.status for response in await asyncio.gather(*asked)} == {200}
    assert not cluster.backend._held


async def test_a_request_for_an_absent_model_ends_at_its_deadline(cluster: Cluster) -> None:
    cluster.pods[0].add("m", tier="resident")
    await cluster.known(pods=1)
    await cluster.pods[0].kill()
    response = await cluster.post(json=chat(), headers={"Omni-Deadline-Seconds": "0.3"})
    assert response.status == 504
    assert "no agent had the model" in (await response.json())["error"]["message"]


async def test_the_deadline_counts_from_the_first_agent_on(cluster: Cluster) -> None:
    first, second = cluster.add(awake=False, tier="warm")
    await cluster.known()
    asked = asyncio.create_task(cluster.post(json=chat(), headers={"Omni-Deadline-Seconds": "2"}))
    await until(lambda: first.waiting == 1)
    await asyncio.sleep(0.2)
    await cluster.pods[0].kill()
    await until(lambda: second.waiting == 1)
    assert cluster.pods[1].agent.requests[0].deadline_seconds < 1.85
    second.awake.set()
    response = await asked
    assert float(response.headers["Omni-Waited-Seconds"]) > 0.2


# -- draining --


async def test_a_draining_agent_hands_over_what_it_holds(cluster: Cluster) -> None:
    first, second = cluster.add(awake=False, tier="warm")
    await cluster.known()
    asked = [asyncio.create_task(cluster.post(json=chat())) for _ in range(4)]
    await until(lambda: first.waiting >= 2)
    cluster.pods[0].gateway.closing.set()
    # What the real agent does when it stops: refuse everybody who waits.
    first.failure = DispatchError("OmniModel", "the system is stopping", reason=Reason.DRAINING, status=503)
    first.awake.set()
    await until(lambda: second.waiting == 4)
    second.awake.set()
    assert {response.status for response in await asyncio.gather(*asked)} == {200}
    assert (await cluster.post(json=chat())).status == 200
    assert not cluster.backend.seats[cluster.pods[0].listening.address].there


async def test_an_agent_that_leaves_the_list_ends_its_answers(cluster: Cluster) -> None:
    cluster.add(tier="resident")
    await cluster.known()
    cluster.pods[0].process.gate.clear()
    response = await cluster.session.post(cluster.url + PATH, json=chat(stream=True, chunks=2))
    await response.content.readuntil(b"\n\n")
    cluster.backend.set_agents([cluster.pods[1].address])
    assert (await cluster.post(json=chat())).status == 200
    cluster.pods[0].process.gate.set()
    assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await until(lambda: not cluster.backend._retiring)
