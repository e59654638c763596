"""The controller of one pod against a real API server: what is assigned, what is written, and a line that is cut."""

from __future__ import annotations

import asyncio
import time

import pytest

from agent_kubernetes.world import POD, Catalogue, eventually, pool_entry, quiet, serving
from omnimodel.controllers.agent_kubernetes_status import Pace
from omnimodel.controllers.status import residency_entry
from omnimodel.kube import MODELS, POOLS, PROCESSES, Mirror

# -- what is assigned --


async def test_what_is_assigned_to_this_pod_is_applied_and_nothing_else(catalogue: Catalogue, start) -> None:
    await catalogue.pool("other")
    await catalogue.assign(await catalogue.model("mine"), POD, "default-1")
    await catalogue.assign(await catalogue.model("theirs"), "default-1")
    await catalogue.assign(await catalogue.model("elsewhere", pool="other"), POD, pool="other")
    pod = await start()
    await eventually(lambda: pod.agent.applied, "the first round")
    assert pod.agent.names == [catalogue.key("mine")]
    assert pod.agent.applied[-1][1].metadata.name == "default"

    await catalogue.assign(await catalogue.kube.get(MODELS, "theirs", catalogue.namespace), "default-1", POD)
    await eventually(lambda: len(pod.agent.names) == 2, "the one that came")
    await catalogue.unassign("mine")
    await eventually(lambda: pod.agent.names == [catalogue.key("theirs")], "the one that went")


async def test_another_pods_coming_and_going_is_none_of_this_ones_business(catalogue: Catalogue, start) -> None:
    model = await catalogue.model("m")
    await catalogue.assign(model, POD)
    pod = await start()
    await eventually(lambda: pod.agent.applied, "the first round")
    rounds = len(pod.agent.applied)
    version = pod.controller._processes[0].items[catalogue.namespace, "m"]["metadata"]["resourceVersion"]
    await catalogue.assign(model, POD, "default-1", "default-2")
    await eventually(
        lambda: pod.controller._processes[0].items[catalogue.namespace, "m"]["metadata"]["resourceVersion"] != version,
        "the change",
    )
    await asyncio.sleep(0.3)
    assert len(pod.agent.applied) == rounds


async def test_an_edit_of_the_pool_reaches_the_agent(catalogue: Catalogue, start) -> None:
    pod = await start()
    await eventually(lambda: pod.agent.applied, "the first round")
    spec = {"device": {"type": "cpu", "memory": "256Mi"}}
    await catalogue.kube.merge(POOLS, "default", catalogue.namespace, {"spec": spec})
    await eventually(lambda: str(pod.agent.applied[-1][1].spec.device.memory) == "256Mi", "the edit")


# -- what is written --


async def test_the_entry_says_what_the_agent_reports_byte_for_byte(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m")
    pod.agent.say(catalogue.key("m"), tier="resident", device_bytes=123_456_789, wakes=3, last_wake_seconds=0.25)
    await eventually(lambda: _tier(catalogue, "m", "resident"), "the swap")
    assert await catalogue.entry("m") == residency_entry(POD, pod.agent.reports[catalogue.key("m")])
    assert (await pool_entry(catalogue))["budgetBytes"] == 1 << 30


async def _tier(catalogue: Catalogue, name: str, tier: str) -> bool:
    return (await catalogue.entry(name)).get("tier") == tier


async def test_an_agent_owns_its_entry_and_nothing_else(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m")
    other = {"residency": [{"pod": "default-1", "tier": "warm"}]}
    await catalogue.kube.patch_status(MODELS, "m", catalogue.namespace, other, manager="omni-agent.default-1")
    operator = {"observedGeneration": 1, "conditions": []}
    await catalogue.kube.patch_status(MODELS, "m", catalogue.namespace, operator, manager="omni-operator")
    pod.agent.say(catalogue.key("m"), tier="resident")
    await eventually(lambda: _tier(catalogue, "m", "resident"), "the swap")

    entries = await catalogue.entries("m")
    assert set(entries) == {POD, "default-1"}
    assert entries["default-1"]["tier"] == "warm"
    item = await catalogue.kube.get(MODELS, "m", catalogue.namespace)
    fields = {f["manager"]: f for f in item["metadata"]["managedFields"] if f.get("subresource") == "status"}
    own = fields[f"omni-agent.{POD}"]
    assert own["operation"] == "Apply"
    assert list(own["fieldsV1"]["f:status"]) == ["f:residency"]
    assert list(own["fieldsV1"]["f:status"]["f:residency"]) == [f'k:{{"pod":"{POD}"}}']
    assert item["status"]["observedGeneration"] == 1


async def test_requests_are_no_transition(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m")
    before = await quiet(pod)
    for number in range(200):
        pod.agent.say(
            catalogue.key("m"), served=number, in_flight=number % 3, waiting=number % 5, last_request_seconds=time.time(),
            phase="serving" if number % 2 else "idle", host_bytes=number, prompt_tokens=number, generated_tokens=number,
        )  # fmt: skip
        await asyncio.sleep(0)
    assert await quiet(pod) == before
    pod.agent.say(catalogue.key("m"), tier="resident", device_bytes=1)
    await eventually(lambda: _tier(catalogue, "m", "resident"), "the swap")
    assert await quiet(pod) == before + 1


async def test_a_swap_under_way_is_written_when_it_is_over(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m")
    before = await quiet(pod)
    pod.agent.say(catalogue.key("m"), tier="warm", phase="waking", device_bytes=5)
    await asyncio.sleep(0.5)
    assert pod.writes == before
    pod.agent.say(catalogue.key("m"), tier="resident", phase="idle", device_bytes=9)
    await eventually(lambda: _tier(catalogue, "m", "resident"), "the end of the swap")
    assert (await catalogue.entry("m"))["deviceBytes"] == 9
    assert await quiet(pod) == before + 1


async def test_a_device_that_swaps_all_the_time_writes_little_and_the_last_word_in_the_end(
    catalogue: Catalogue, start
) -> None:
    """dynamo#14298: status conflicts from zero; here, an API server kept busy by swaps."""
    pod = await serving(catalogue, start, "a", "b", "c")
    before = await quiet(pod)
    pod.controller.writer._pace = Pace(5, 2.0)
    began = time.monotonic()
    for number in range(600):
        for name in "abc":
            tier = "resident" if (number + ord(name)) % 2 else "warm"
            pod.agent.say(catalogue.key(name), tier=tier, device_bytes=number)
        await asyncio.sleep(0.005)
    for name in "abc":
        pod.agent.say(catalogue.key(name), tier="resident", device_bytes=77)
    for name in "abc":
        await eventually(lambda name=name: _bytes(catalogue, name, 77), f"the last word on {name}")
    seconds = time.monotonic() - began
    assert pod.writes - before <= 5 + 2.0 * seconds + 1


async def _bytes(catalogue: Catalogue, name: str, device_bytes: int) -> bool:
    return (await catalogue.entry(name)).get("deviceBytes") == device_bytes


async def test_at_rest_nothing_is_written(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "a", "b")
    await quiet(pod)
    pod.kube.calls.clear()
    for _ in range(20):
        pod.agent.ring()
        await asyncio.sleep(0.05)
    assert {key for key in pod.kube.calls if key[0] != "watch"} <= {("apply", "leases")}


async def test_agents_that_write_to_one_model_at_once_lose_nothing(catalogue: Catalogue, start) -> None:
    """keycloak#43198: server-side apply answers 409 to requests that race."""
    pods = [f"default-{index}" for index in range(6)]
    await catalogue.assign(await catalogue.model("m"), *pods)
    running = [await start(name) for name in pods]
    for pod in running:
        await eventually(lambda pod=pod: pod.agent.reports, "the model")
    for number in range(5):
        for pod in running:
            pod.agent.say(catalogue.key("m"), tier="resident", device_bytes=1000 + number)
        await asyncio.sleep(0.05)
    await eventually(lambda: _all_bytes(catalogue, pods, 1004), "every entry")


async def _all_bytes(catalogue: Catalogue, pods: list[str], device_bytes: int) -> bool:
    entries = await catalogue.entries("m")
    return set(entries) == set(pods) and {entry["deviceBytes"] for entry in entries.values()} == {device_bytes}


# -- what goes --


async def test_the_entry_of_a_model_that_goes_elsewhere_is_taken_back(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m", "n")
    await catalogue.assign(await catalogue.kube.get(MODELS, "m", catalogue.namespace), "default-1")
    await eventually(lambda: _gone(catalogue, "m"), "the entry to go")
    assert pod.agent.names == [catalogue.key("n")]
    assert await catalogue.entry("n")


async def _gone(catalogue: Catalogue, name: str) -> bool:
    return not await catalogue.entries(name)


async def test_a_deleted_model_is_unloaded_and_not_written_to(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m")
    await catalogue.delete("m")
    await eventually(lambda: not pod.agent.names, "the model to be unloaded")
    assert await catalogue.kube.get(MODELS, "m", catalogue.namespace) is None, "no finalizer holds it"
    await quiet(pod)
    assert pod.controller.writer.written == ()


async def test_deleted_and_created_again_at_once_it_is_the_new_one(catalogue: Catalogue, start) -> None:
    """aibrix#239: a stale cache said that it exists, and the new one was never loaded."""
    pod = await serving(catalogue, start, "m")
    for round_ in range(10):
        await catalogue.delete("m")
        model = await catalogue.model("m", description=f"number {round_}")
        await catalogue.assign(model, POD)
        uid = model["metadata"]["uid"]
        await eventually(lambda uid=uid: _runs(pod, uid), "the new one")
        await eventually(lambda: catalogue.entry("m"), "its entry")


def _runs(pod, uid: str) -> bool:
    processes, _ = pod.agent.applied[-1]
    return [process.spec.model.uid for process in processes] == [uid]


async def test_what_an_earlier_pod_of_its_name_left_behind_is_taken_back(catalogue: Catalogue, start) -> None:
    await catalogue.model("left")
    stale = {"residency": [{"pod": POD, "tier": "resident", "deviceBytes": 5}]}
    await catalogue.kube.patch_status(MODELS, "left", catalogue.namespace, stale, manager=f"omni-agent.{POD}")
    await start()
    await eventually(lambda: _gone(catalogue, "left"), "the stale entry to go")


async def test_a_pod_that_takes_the_place_of_one_that_swapped_is_heard(catalogue: Catalogue, start) -> None:
    await catalogue.assign(await catalogue.model("m"), POD)
    left = {"residency": [{"pod": POD, "tier": "resident", "wakes": 3, "swaps": {"request": 2, "room": 1}}]}
    await catalogue.kube.patch_status(MODELS, "m", catalogue.namespace, left, manager=f"omni-agent.{POD}")
    pod = await start()
    await eventually(lambda: _says(catalogue, pod, "m"), "the new pod's word")


async def _says(catalogue: Catalogue, pod, name: str) -> bool:
    report = pod.agent.reports.get(catalogue.key(name))
    return report is not None and await catalogue.entry(name) == residency_entry(POD, report)


async def test_an_entry_that_someone_removed_is_written_anew(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m")
    nothing = {"residency": []}
    await catalogue.kube.patch_status(MODELS, "m", catalogue.namespace, nothing, manager=f"omni-agent.{POD}")
    assert await _gone(catalogue, "m")
    await pod.controller.writer.sweep()
    await eventually(lambda: catalogue.entry("m"), "the entry")


async def test_what_the_operator_took_back_is_written_anew_at_once(catalogue: Catalogue, start) -> None:
    """It took the agent for dead, and was wrong."""
    await serving(catalogue, start, "m")
    manager = f"omni-agent.{POD}"
    await catalogue.kube.patch_status(MODELS, "m", catalogue.namespace, {"residency": []}, manager=manager)
    await catalogue.kube.patch_status(POOLS, "default", catalogue.namespace, {"pods": []}, manager=manager)
    await eventually(lambda: pool_entry(catalogue), "the pool's entry")
    await eventually(lambda: catalogue.entry("m"), "the model's entry")


async def test_an_empty_list_that_comes_last_is_news_too(
    catalogue: Catalogue, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes in a list that is empty, and yet the pool is to be applied then."""
    run = Mirror.run

    async def late(mirror: Mirror) -> None:
        if mirror._kind is PROCESSES:
            await asyncio.sleep(1.0)
        await run(mirror)

    monkeypatch.setattr(Mirror, "run", late)
    pod = await start()
    await eventually(lambda: pod.agent.applied, "the pool")
    assert pod.agent.names == []
