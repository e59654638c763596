"""Pods that come, publish, fall silent, and are replaced: what is Ready meanwhile, and that little moves."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kube.agents import Agents, running
from kube.world import World, conditions, is_ready, model, pool, until
from omnimodel.controllers import kubernetes_pods, kubernetes_reconcile
from omnimodel.controllers.kubernetes_cache import Cache
from omnimodel.controllers.kubernetes_health import Hearing
from omnimodel.controllers.kubernetes_pods import (
    LOST_SECONDS,
    SILENT_SECONDS,
    START_SECONDS,
    PodView,
    is_stuck,
    problem_of,
)
from omnimodel.controllers.kubernetes_remains import Remains
from omnimodel.controllers.kubernetes_writes import LaterError, Writer
from omnimodel.controllers.status import residency_entry
from omnimodel.kube import EVENTS, MODELS, PODS, POOLS, PROCESSES
from omnimodel.protocol.report import ModelReport

ENTRY = {"pod": "gpu-0", "ready": True, "budgetBytes": 1}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that takes a pod for lost within a second, and for silent when its agent misses one heartbeat."""
    monkeypatch.setattr(kubernetes_pods, "SILENT_SECONDS", 8.0)
    monkeypatch.setattr(kubernetes_pods, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(kubernetes_pods, "BACK_SECONDS", 1.0)
    monkeypatch.setattr(kubernetes_reconcile, "TICK_SECONDS", 0.2)


def message(item: dict[str, Any]) -> str:
    return next(c["message"] for c in item["status"]["conditions"] if c["type"] == "Ready")


def placed(world: World) -> dict[str, list[str]]:
    return {name: item["spec"]["pods"] for name, item in world.all(PROCESSES).items()}


async def test_models_are_ready_one_by_one_and_a_pod_that_publishes_loses_none(
    world: World, agents: Agents, start, hasty
) -> None:
    await start()
    agents.publishing |= {"b", "d"}
    await world.apply(pool("gpu", world.namespace, replicas=2), *(model(name, world.namespace) for name in "abcd"))
    await world.ready("a", "c")
    where = placed(world)
    status = world.see(POOLS, "gpu")["status"]
    assert status["readyReplicas"] < 2, "the kubelet waits for all models"
    await until(lambda: conditions(world.see(POOLS, "gpu")).get("Reconciling") == ("True", "Starting"), "it says so")
    await until(lambda: conditions(world.see(MODELS, "b"))["Ready"] == ("False", "Publishing"), "and the model")
    await asyncio.sleep(3.0)  # three times what makes a pod lost
    assert placed(world) == where
    assert is_ready(world.see(MODELS, "a"))
    agents.publishing.clear()
    await world.ready("b", "d")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")
    assert placed(world) == where


async def test_a_pod_that_is_still_to_come_is_waited_for_unless_it_cannot(
    world: World, agents: Agents, start, hasty
) -> None:
    await start()
    agents.silent |= {"gpu-0", "gpu-1"}
    await world.apply(
        pool("gpu", world.namespace, replicas=2), model("a", world.namespace), model("b", world.namespace)
    )
    await until(lambda: sorted(placed(world).values()) == [["gpu-0"], ["gpu-1"]], "each has one")
    where = placed(world)
    agents.silent.discard("gpu-0")
    (first,) = [name for name, pods in where.items() if pods == ["gpu-0"]]
    await world.ready(first)
    await asyncio.sleep(2.5)
    assert placed(world) == where, "the other pod may be pulling its image"
    body = {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}]
    }
    await world.kube.patch_status(PODS, "gpu-1", world.namespace, body, manager="kubelet")
    await until(lambda: set(map(tuple, placed(world).values())) == {("gpu-0",)}, "it cannot come: its model moves")
    await world.ready("a", "b")


async def test_a_replaced_pod_does_not_answer_for_the_one_before(world: World, agents: Agents, start) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    uid = world.see(PODS, "gpu-0")["metadata"]["uid"]
    agents.silent.add("gpu-0")
    await world.kube.delete(PODS, "gpu-0", world.namespace, grace_seconds=0)
    await until(lambda: (p := world.see(PODS, "gpu-0")) and p["metadata"]["uid"] != uid, "another pod of its name")
    await until(lambda: not world.see(MODELS, "a")["status"].get("residency"), "the old pod's entry is taken back")
    await until(lambda: not world.see(POOLS, "gpu")["status"].get("pods"), "the pool's too")
    await until(lambda: conditions(world.see(MODELS, "a"))["Ready"][0] == "Unknown", "it is not Ready")
    agents.silent.clear()
    await world.ready("a")
    assert placed(world) == {"a": ["gpu-0"]}


async def test_an_agent_that_is_heard_of_has_not_said_what_the_one_before_it_did(
    world: World, agents: Agents, start
) -> None:
    """Nobody led while its pod was replaced, and it has much to say: until then nothing that it would not say."""
    first = await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    await first.__aexit__()
    uid = world.see(PODS, "gpu-0")["metadata"]["uid"]
    agents.silent.add("gpu-0")
    await world.kube.delete(PODS, "gpu-0", world.namespace, grace_seconds=0)
    await until(lambda: (p := world.see(PODS, "gpu-0")) and p["metadata"]["uid"] != uid, "another pod of its name")
    await world.kube.patch_status(PODS, "gpu-0", world.namespace, running(ready=False), manager="kubelet")
    await agents._renew("gpu-0", world.see(PODS, "gpu-0")["metadata"]["uid"], "gpu")
    assert is_ready(world.see(MODELS, "a")), "the status is the one before it's"
    await start("two")
    await until(lambda: not world.see(MODELS, "a")["status"].get("residency"), "its entry is taken back")
    await until(lambda: not world.see(POOLS, "gpu")["status"].get("pods"), "the pool's too")
    await until(lambda: conditions(world.see(MODELS, "a"))["Ready"][0] == "Unknown", "it is not Ready")
    agents.silent.clear()
    await world.ready("a")
    (entry,) = world.see(MODELS, "a")["status"]["residency"]
    assert entry["podUid"] == world.see(PODS, "gpu-0")["metadata"]["uid"]


async def test_what_an_agent_writes_before_its_pod_is_known_stays(world: World) -> None:
    """News of a pod may come after news of its agent's words."""
    await world.apply(model("a", world.namespace))
    spec = {"containers": [{"name": "agent", "image": "localhost/none:dev"}], "automountServiceAccountToken": False}
    pod = await world.kube.create(PODS, {"metadata": {"name": "gpu-0", "namespace": world.namespace}, "spec": spec})
    before = {**pod, "metadata": {**pod["metadata"], "uid": "of the one before"}}
    writer = Writer(world.kube, Cache(), Hearing(), lambda: True)
    known = PodView("gpu-0", 0, before, {}, None, None)
    entry = {"pod": "gpu-0", "podUid": pod["metadata"]["uid"]}
    assert not await writer.is_by_predecessor(world.namespace, known, entry)
    assert await writer.is_by_predecessor(world.namespace, known, {**entry, "podUid": "of the one before"})


async def test_what_an_agent_says_while_its_entry_is_taken_back_stays(world: World) -> None:
    """The operator took it for dead, by what it knew; the agent has just come back."""
    await world.apply(model("a", world.namespace))
    key = (world.namespace, "a")

    async def say(tier: str) -> None:
        entry = residency_entry("gpu-0", ModelReport(world.namespace, "a", 1, tier, "idle", ready=True))
        await world.kube.patch_status(MODELS, "a", world.namespace, {"residency": [entry]}, manager="omni-agent.gpu-0")

    await say("cold")
    cache = Cache()
    cache.put(MODELS, await world.kube.get(MODELS, "a", world.namespace))
    writer = Writer(world.kube, cache, Hearing(), lambda: True)
    await say("warm")
    (cold,) = cache.get(MODELS, key)["status"]["residency"]
    with pytest.raises(LaterError):
        await writer.clear_entry(MODELS, key, "residency", cold)
    found = await world.kube.get(MODELS, "a", world.namespace)
    (warm,) = found["status"]["residency"]
    assert warm["tier"] == "warm"
    cache.put(MODELS, found)
    await writer.clear_entry(MODELS, key, "residency", warm)
    assert not (await world.kube.get(MODELS, "a", world.namespace)).get("status", {}).get("residency")


async def test_what_the_next_pod_says_while_it_is_asked_who_spoke_before_it_stays(world: World) -> None:
    """Its agent is heard of between the question and the answer, and so is what it says."""
    await world.apply(model("a", world.namespace))
    key, cache = (world.namespace, "a"), Cache()
    spec = {"containers": [{"name": "agent", "image": "localhost/none:dev"}], "automountServiceAccountToken": False}
    pod = await world.kube.create(PODS, {"metadata": {"name": "gpu-0", "namespace": world.namespace}, "spec": spec})
    uid = pod["metadata"]["uid"]

    async def say(pod_uid: str) -> None:
        entry = residency_entry("gpu-0", ModelReport(world.namespace, "a", 1, "warm", "idle", ready=True), pod_uid)
        await world.kube.patch_status(MODELS, "a", world.namespace, {"residency": [entry]}, manager="omni-agent.gpu-0")
        cache.put(MODELS, await world.kube.get(MODELS, "a", world.namespace))

    class Asking(Writer):
        async def is_by_predecessor(self, *asked: Any) -> bool:
            found = await super().is_by_predecessor(*asked)
            await say(uid)
            return found

    await say("of the one before")
    remains = Remains(cache, Asking(world.kube, cache, Hearing(), lambda: True), None, None, time.monotonic, time.time)
    with pytest.raises(LaterError):
        await remains.clear(MODELS, key, "residency", world.namespace, [PodView("gpu-0", 0, pod, {}, None, None)])
    (entry,) = (await world.kube.get(MODELS, "a", world.namespace))["status"]["residency"]
    assert entry["podUid"] == uid


@pytest.mark.slow
async def test_agents_that_are_all_silent_and_come_back_keep_what_they_had(
    world: World, agents: Agents, start, hasty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """seldon#5032: nothing was loaded when the servers came back."""
    await start()
    await world.apply(pool("gpu", world.namespace, replicas=2))
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "both pods are ready")
    await world.apply(*(model(name, world.namespace) for name in "abc"))
    await world.ready("a", "b", "c")
    where = placed(world)
    agents.silent |= {"gpu-0", "gpu-1"}
    for name in where:
        await until(lambda name=name: conditions(world.see(MODELS, name))["Ready"][0] == "Unknown", "nobody answers")
    await until(lambda: not world.see(POOLS, "gpu")["status"].get("pods"), "what they said is taken back")
    assert placed(world) == where
    message = next(c for c in world.see(POOLS, "gpu")["status"]["conditions"] if c["type"] == "Ready")["message"]
    version = world.see(POOLS, "gpu")["metadata"]["resourceVersion"]
    assert "has not been heard of since 2" in message
    await asyncio.sleep(2.0)
    assert world.see(POOLS, "gpu")["metadata"]["resourceVersion"] == version, "time alone changes nothing in it"
    monkeypatch.setattr(kubernetes_pods, "BACK_SECONDS", 30.0)  # one comes back before the other
    agents.silent.discard("gpu-0")
    await world.ready(*(name for name, pods in where.items() if pods == ["gpu-0"]))
    agents.silent.discard("gpu-1")
    await world.ready("a", "b", "c")
    assert placed(world) == where


async def test_replicas_are_spread_over_the_zones_of_their_nodes(
    world: World, agents: Agents, start, node: Any
) -> None:
    zones = {"gpu-0": "a", "gpu-1": "a", "gpu-2": "b"}
    nodes = {pod: await node(zone) for pod, zone in zones.items()}
    await start()
    await world.apply(pool("gpu", world.namespace, replicas=3))
    for pod, name in nodes.items():
        await until(lambda pod=pod: world.see(PODS, pod), "the pod")
        await world.bind(pod, name)
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pods are ready")
    await world.apply(model("m", world.namespace, replicas={"min": 2}))
    await world.ready("m")
    assert placed(world)["m"] in (["gpu-0", "gpu-2"], ["gpu-1", "gpu-2"])
    # Why a pod was chosen stays to be read, also once it is where the model was already.
    assert [entry["pod"] for entry in world.see(MODELS, "m")["status"]["assigned"]] == placed(world)["m"]
    assert all("had the most room" in entry["why"] for entry in world.see(MODELS, "m")["status"]["assigned"])
    await world.apply(model("m", world.namespace, replicas={"min": 4}))
    few = "asks for 4 pods and has 3: pool gpu has no other pod"
    await until(lambda: few in message(world.see(MODELS, "m")), "that it has too few is said where it is Ready")

    async def told() -> bool:
        return any(event["reason"] == "TooFewPods" for event in (await world.kube.list(EVENTS, world.namespace)).items)

    await until(told, "and in an event")
    await world.ready("m")


async def test_a_node_whose_kubelet_is_silent_is_named_although_its_models_serve(
    world: World, agents: Agents, start, node: Any
) -> None:
    name = await node()
    await start()
    await world.apply(pool("gpu", world.namespace), model("m", world.namespace))
    await until(lambda: world.see(PODS, "gpu-0"), "the pod")
    await world.bind("gpu-0", name)
    await world.ready("m")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")

    async def kubelet(*, there: bool) -> None:
        """It is heard of, or not: then the cluster takes the node and its pods for not ready."""
        await node.say(name, ready=there)
        await world.kube.patch_status(PODS, "gpu-0", world.namespace, running(ready=there), manager="kubelet")

    await kubelet(there=False)
    told = f"gpu-0 serves, but cannot be told ready: node {name} does not answer; restart its kubelet"
    await until(lambda: told in message(world.see(POOLS, "gpu")), "it says so")
    assert conditions(world.see(POOLS, "gpu"))["Reconciling"] == ("True", "NodeSilent")
    await world.ready("m")
    await kubelet(there=True)
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "it is back")


def view(*, phase: str = "Running", ready: bool = False, heard: float | None = 0.0, **more: Any) -> PodView:
    conditions = [{"type": "Ready", "status": str(ready)}]
    item = {"metadata": {"name": "gpu-0", "uid": "u"}, "status": {"phase": phase, "conditions": conditions}}
    return PodView(**{"name": "gpu-0", "index": 0, "item": item, "entry": ENTRY, "heard_seconds": heard,
                      "away_seconds": None, **more})  # fmt: skip


@pytest.mark.parametrize(
    ("pod", "now", "answers", "lost"),
    [
        pytest.param(view(), 1.0, True, False, id="it publishes: the kubelet does not say ready"),
        pytest.param(view(entry={}), 1.0, False, False, id="its agent has said nothing yet"),
        pytest.param(
            view(entry={}, heard=99.0, first_seconds=99.0, away_seconds=0.0),
            100.0,
            False,
            False,
            id="it is heard of at last, and says what it has in a moment",
        ),
        pytest.param(view(phase="Pending", heard=None, away_seconds=0.0), 99.0, False, False, id="its image is pulled"),
        pytest.param(view(heard=None, away_seconds=0.0), START_SECONDS + 1, False, True, id="it never comes"),
        pytest.param(view(away_seconds=41.0), SILENT_SECONDS + 2, False, False, id="silent for a moment"),
        pytest.param(view(away_seconds=41.0), 42 + LOST_SECONDS, False, True, id="silent for long"),
        pytest.param(view(item=None, heard=None, away_seconds=0.0), 99.0, False, False, id="to be made anew"),
    ],
)
def test_what_a_pod_is_taken_for(pod: PodView, now: float, answers: bool, lost: bool) -> None:
    assert (pod.answers(now), pod.lost(now)) == (answers, lost)


@pytest.mark.parametrize(
    ("pod", "now", "reason"),
    [
        pytest.param(view(lost_node="n"), 1.0, "NodeSilent", id="its agent is heard of"),
        pytest.param(view(lost_node="n", ready=True), 1.0, "", id="nobody takes it for not ready yet"),
        pytest.param(view(lost_node="n"), SILENT_SECONDS + 1, "AgentSilent", id="its agent neither"),
        pytest.param(view(), 1.0, "", id="it publishes"),
    ],
)
def test_a_silent_node_is_a_problem_of_its_pods(pod: PodView, now: float, reason: str) -> None:
    found = problem_of(pod, now)
    assert (found[0].reason if found else "") == reason
    assert found is None or "node n does not answer" in found[0].message


@pytest.mark.parametrize(
    ("silent", "node_lost", "after_seconds", "stuck"),
    [
        pytest.param(True, True, 61, True, id="nobody ends it"),
        pytest.param(True, True, 59, False, id="its grace period is hardly over"),
        pytest.param(False, True, 999, False, id="its agent is heard of"),
        pytest.param(True, False, 999, False, id="its kubelet is there"),
    ],
)
def test_a_pod_is_buried_only_when_nobody_else_can(
    silent: bool, node_lost: bool, after_seconds: int, stuck: bool
) -> None:
    pod = {"metadata": {"name": "gpu-0", "deletionTimestamp": "1970-01-01T00:10:00Z"}}
    assert is_stuck(pod, silent=silent, node_lost=node_lost, unix_seconds=600.0 + after_seconds) is stuck
    assert not is_stuck({"metadata": {"name": "gpu-0"}}, silent=True, node_lost=True, unix_seconds=1e9)
