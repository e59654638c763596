"""Several agents behind one gateway: who is asked, what happens when one of them dies, and what is never sent twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from gateway.standin import System, chunk_event
from gateway.world import until
from gateway_remote.world import Pod, start_pod
from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway.app import create_app, serve
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.gateway.order import Place
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.gateway.routing_measures import RoutingMeasures
from omnimodel.gateway.seats import Address
from omnimodel.gateway.settings import Settings
from omnimodel.protocol.dispatch import InferenceRequest, ModelCard

PATH = "/v1/chat/completions"


def chat(model: str = "m", **more) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


class Cluster:
    """Two pods and a gateway."""

    def __init__(self, pods: list[Pod], backend: RoutingBackend, url: str, gateway, session) -> None:
        self.pods = pods
        self.backend = backend
        self.url = url
        self.gateway = gateway
        self.session = session

    def add(self, name: str = "m", task: str = "text-generation", **more):
        return [pod.add(name, task, **more) for pod in self.pods]

    async def known(self, key: str = "default/m", pods: int = 2) -> None:
        await until(lambda: len(self.backend._by_model.get(key, ())) == pods)

    async def tiers(self, *tiers: str, key: str = "default/m") -> None:
        """Wait until the gateway knows where the model is."""
        seats = [self.backend.seats[pod.listening.address] for pod in self.pods]
        await until(lambda: [seat.snapshot and seat.snapshot.cards[key].tier for seat in seats] == list(tiers))

    async def post(self, path: str = PATH, **more) -> aiohttp.ClientResponse:
        response = await self.session.post(self.url + path, **more)
        await response.read()
        return response

    def asked(self) -> list[int]:
        return [len(pod.agent.requests) for pod in self.pods]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        pods = []
        for index in range(2):
            pod = await start_pod(tmp_path, f"pod-{index}", Place("eu", f"eu-{index}"))
            stack.push_async_callback(pod.close)
            pods.append(pod)
        backend = RoutingBackend(here=Place("eu", "eu-0"))
        stack.push_async_callback(backend.close)
        backend.set_agents([pod.address for pod in pods])
        app = create_app(backend, System(), settings=Settings(keepalive_seconds=0.05, drain_seconds=2.0))
        listening = await serve(app, "127.0.0.1", 0)
        stack.push_async_callback(listening.close)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Cluster(pods, backend, listening.address, app[GATEWAY], session)
        for pod in pods:
            pod.process.gate.set()


# -- who is asked --


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


# -- death --


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
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "crashed"
    assert events[-1] == b"data: [DONE]"


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


# -- models that are known without an agent --


def card(**more) -> ModelCard:
    return ModelCard("m", "default", ("m",), "text-generation", "cold", **{"ready": True, **more})


async def asked_of(known: dict[str, ModelCard | None], **request) -> DispatchError:
    backend = RoutingBackend(known=lambda: known)
    with pytest.raises(DispatchError) as caught:
        async with backend.open(InferenceRequest("m", "POST", PATH, {}, b"", **request)):
            pass
    return caught.value


async def test_a_failed_model_without_an_agent_says_why() -> None:
    error = await asked_of({"default/m": card(ready=False, reason="TooLarge", message="it needs 9 GiB")})
    assert (error.status, error.reason, error.problem) == (503, Reason.TOO_LARGE, "it needs 9 GiB")


async def test_a_deleted_model_is_not_found_though_an_agent_still_has_it(cluster: Cluster) -> None:
    """ollama-operator#118: a deleted model was still served."""
    cluster.add(tier="resident")
    await cluster.known()
    cluster.backend._known = lambda: {"default/m": None}
    cluster.backend.changed()
    assert cluster.backend.models() == []
    assert (await cluster.post(json=chat())).status == 404
    assert (await asked_of({})).reason is Reason.MODEL_NOT_FOUND


async def test_a_model_that_only_its_agent_knows_of_yet_is_served(cluster: Cluster) -> None:
    """The gateway's watch may lag behind the agent's."""
    cluster.add(tier="resident")
    cluster.backend._known = lambda: {"default/other": card()}
    await cluster.known()
    assert (await cluster.post(json=chat())).status == 200


async def test_a_model_that_is_being_assigned_is_waited_for() -> None:
    error = await asked_of({"default/m": card()}, deadline_seconds=0.05)
    assert error.reason is Reason.DEADLINE_EXCEEDED


# -- metrics, reports --


async def test_metrics_count_decisions_and_retries(tmp_path: Path, cluster: Cluster) -> None:
    measures = cluster.backend.measures
    cluster.pods[0].add("m", tier="resident")
    cluster.pods[1].add("m", tier="warm")
    await cluster.known()
    await cluster.post(json=chat())
    await cluster.pods[0].kill()
    await cluster.post(json=chat())
    assert measures.routed.labels("pod-0", "free_place")._value.get() == 1
    assert measures.routed.labels("pod-1", "warm")._value.get() == 1
    cluster.backend.set_agents([cluster.pods[1].address])
    series = set(measures.routed._metrics)
    assert {agent for agent, _ in series} == {"pod-1"}


def test_measures_of_two_backends_do_not_meet() -> None:
    RoutingMeasures()
    RoutingMeasures()


async def test_a_report_without_following_is_whole(cluster: Cluster) -> None:
    cluster.pods[0].add("m", tier="resident")
    async with cluster.session.get(cluster.pods[0].listening.address + "/omni/v1/report") as response:
        body = await response.json()
    assert body["whole"] is True
    assert body["cards"]["default/m"]["tier"] == "resident"


async def test_something_that_is_no_agent_is_never_asked(cluster: Cluster, tmp_path: Path) -> None:
    """FMA#388: two had the same port, and the wrong one said 200."""
    backend = RoutingBackend()
    backend.set_agents([Address(cluster.url, "a gateway")])
    seat = backend.seats[cluster.url]
    await until(lambda: "404" in seat.problem)
    assert not seat.there
    await backend.close()
