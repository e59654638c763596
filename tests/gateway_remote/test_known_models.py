"""Models that are known without an agent, what is measured, and what agents report."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.world import until
from gateway_remote.world import PATH, Cluster, chat
from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.gateway.routing_measures import RoutingMeasures
from omnimodel.gateway.seats import Address
from omnimodel.protocol.dispatch import InferenceRequest, ModelCard


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


async def test_what_only_an_agent_knows_of_a_model_outlives_it(cluster: Cluster) -> None:
    tensors = ({"name": "image", "datatype": "FP32", "shape": [-1, 3]},)
    cluster.add(task="infer", tier="resident", inputs=tensors, created_seconds=7)
    await cluster.known()
    told = card(ready=False, reason="NoPods", defaults={"m": {"top": 1}}, request_bytes=1 << 28, unlisted=("m",))
    cluster.backend._known = lambda: {"default/m": told}
    for pod in cluster.pods:
        await pod.kill()
    await until(lambda: not cluster.backend._by_model)
    (found,) = cluster.backend.models()
    assert (found.ready, found.reason, found.defaults) == (False, "NoPods", {"m": {"top": 1}})
    assert (found.request_bytes, found.listed) == (1 << 28, False)
    assert (found.inputs, found.created_seconds) == (tensors, 7)


async def test_a_model_that_is_being_assigned_is_waited_for() -> None:
    error = await asked_of({"default/m": card()}, deadline_seconds=0.05)
    assert error.reason is Reason.DEADLINE_EXCEEDED


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


async def test_agents_of_one_name_in_two_namespaces_are_two_series(cluster: Cluster) -> None:
    first, second = (pod.address for pod in cluster.pods)
    names = {first.url: "team-a", second.url: "team-b"}
    cluster.backend.set_agents(Address(url, "default-0", namespace=namespace) for url, namespace in names.items())
    cluster.add(tier="resident")
    await cluster.known()
    registry = CollectorRegistry()
    RoutingMeasures(registry).seats = cluster.backend.seats
    text = generate_latest(registry).decode()
    up = [line for line in text.splitlines() if line.startswith("omni_agent_up{")]
    assert sorted(up) == ['omni_agent_up{agent="team-a/default-0"} 1.0', 'omni_agent_up{agent="team-b/default-0"} 1.0']


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
