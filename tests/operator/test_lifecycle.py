"""From manifests to models that serve, on a real API server: what people apply, edit, delete, and break."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube.agents import Agents
from kube.world import GIB, World, conditions, is_ready, model, pool, until
from omnimodel.errors import Reason
from omnimodel.kube import (
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    EVENTS,
    MODELS,
    POOLS,
    PROCESSES,
    SECRETS,
    SERVICES,
    STATEFUL_SETS,
)

CATALOG = Path(__file__).parents[2] / "examples/catalog"


def catalogue(namespace: str) -> list[dict[str, Any]]:
    items = [item for path in sorted(CATALOG.glob("*.yaml")) for item in yaml.safe_load_all(path.read_text()) if item]
    return [{**item, "metadata": {**item["metadata"], "namespace": namespace}} for item in items]


async def told(world: World, name: str, reason: str, sentence: str) -> bool:
    """Whether an event of an object has this reason and says this."""
    events = [e for e in (await world.kube.list(EVENTS, world.namespace)).items if e["involvedObject"]["name"] == name]
    return any(event["reason"] == reason and sentence in event["message"] for event in events)


async def test_the_catalogue_becomes_pods_and_processes_and_is_ready(world: World, agents: Agents, start) -> None:
    operator = await start()
    items = catalogue(world.namespace)
    names = [item["metadata"]["name"] for item in items if item["kind"] == "OmniModel"]
    await world.apply(*items)
    await world.ready(*names)

    assert set(world.all(PROCESSES)) == set(names)
    stateful_set = world.see(STATEFUL_SETS, "default")
    assert stateful_set is not None
    assert stateful_set["spec"]["replicas"] == 1
    assert await world.kube.get(SERVICES, "default", world.namespace)
    assert await world.kube.get(DISRUPTION_BUDGETS, "default", world.namespace)
    await until(lambda: is_ready(world.see(POOLS, "default")), "the pool is Ready")
    status = world.see(POOLS, "default")["status"]
    assert (status["budgetBytes"], status["readyReplicas"], status["models"]) == (GIB, 1, len(names))
    for name in names:
        process = world.see(PROCESSES, name)
        assert process["spec"]["pods"] == ["default-0"]
        assert process["metadata"]["ownerReferences"][0]["uid"] == world.see(MODELS, name)["metadata"]["uid"]
        found = world.see(MODELS, name)
        assert found["status"]["footprint"] == {
            "weightsBytes": 32 << 20,
            "workingBytes": 32 << 20,
            "privateBytes": 5 << 20,
        }
        # Nothing of the user's object is the operator's but its status.
        for entry in (await world.kube.get(MODELS, name, world.namespace))["metadata"]["managedFields"]:
            assert entry["manager"] == "person" or entry.get("subresource") == "status", entry
        assert "finalizers" not in found["metadata"]
    assert (await operator.ask("/healthz"))[0] == (await operator.ask("/readyz"))[0] == 200


async def test_applied_twice_nothing_changes(world: World, agents: Agents, start) -> None:
    await start()
    items = [pool("gpu", world.namespace), model("a", world.namespace), model("b", world.namespace)]
    await world.apply(*items)
    await world.ready("a", "b")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")
    # Controllers of the cluster write the status of a StatefulSet whenever they like.
    stamps = {MODELS: "resourceVersion", PROCESSES: "resourceVersion", STATEFUL_SETS: "generation"}
    before = {kind: {n: i["metadata"][stamp] for n, i in world.all(kind).items()} for kind, stamp in stamps.items()}
    await world.apply(*items)
    await world.apply(model("last", world.namespace))
    await world.ready("last")
    for kind, versions in before.items():
        for name, version in versions.items():
            assert world.see(kind, name)["metadata"][stamps[kind]] == version, (kind.name, name)


async def test_an_edit_is_not_ready_before_the_new_generation_serves(world: World, agents: Agents, start) -> None:
    """kubectl#962: a wait after a patch passed on the Ready of before."""
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    agents.held.clear()
    await world.apply(model("a", world.namespace, flavour="new"))
    await until(lambda: world.see(MODELS, "a")["status"].get("observedGeneration") == 2, "the edit is seen")
    assert conditions(world.see(MODELS, "a"))["Ready"] == ("Unknown", "Pending")
    assert conditions(world.see(MODELS, "a"))["Reconciling"][0] == "True"
    await until(lambda: world.see(PROCESSES, "a")["spec"]["generation"] == 2, "the new process is described")
    agents.held.set()
    await world.ready("a")


async def test_swaps_change_nothing_that_the_operator_says(world: World, agents: Agents, start) -> None:
    operator = await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace), model("marker", world.namespace))
    await world.ready("a", "marker")
    written = await operator.metric("omni_operator_api_calls_total", verb="apply-status", kind="omnimodels")
    for tier in ("resident", "warm", "cold", "parked", "resident"):
        agents.reports["gpu-0", "a"] = {"tier": tier, "wakes": 3}
        await until(lambda tier=tier: world.see(MODELS, "a")["status"]["residency"][0]["tier"] == tier, tier)
    await world.apply(model("marker", world.namespace, flavour="later"))  # what comes after has been seen
    await until(lambda: world.see(MODELS, "marker")["status"]["observedGeneration"] == 2, "the marker is seen")
    await world.ready("marker")
    assert await operator.metric("omni_operator_api_calls_total", verb="apply-status", kind="omnimodels") <= written + 2
    assert is_ready(world.see(MODELS, "a"))


@pytest.mark.parametrize(
    "order", [("model", "pool"), ("pool", "model"), ("process", "model", "pool")], ids=" then ".join
)
async def test_deleting_in_any_order_finishes_and_leaves_nothing(world: World, agents: Agents, start, order) -> None:
    """kserve#6154, seldon#5043: stuck for ever when what it refers to went first."""
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    kinds = {"model": (MODELS, "a"), "pool": (POOLS, "gpu"), "process": (PROCESSES, "a")}
    for what in order:
        await world.kube.delete(*kinds[what][:1], kinds[what][1], world.namespace)
    await until(lambda: not world.all(MODELS) and not world.all(POOLS), "user objects are gone")
    await until(lambda: not world.all(PROCESSES) and not world.all(STATEFUL_SETS), "children are gone")


async def test_deleting_finishes_without_an_operator(world: World, agents: Agents, start) -> None:
    operator = await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    await operator.__aexit__()
    await world.kube.delete(MODELS, "a", world.namespace)
    await world.kube.delete(POOLS, "gpu", world.namespace)
    await until(lambda: not any(world.all(kind) for kind in (MODELS, POOLS, PROCESSES, STATEFUL_SETS)), "all is gone")


async def test_deleted_and_created_at_once_is_served_by_the_new_one(world: World, agents: Agents, start) -> None:
    """aibrix#239: the cache said that it exists, and the new one was never loaded."""
    await start()
    await world.apply(pool("gpu", world.namespace))
    for number in range(20):
        await world.apply(model("a", world.namespace, flavour=f"f{number}"))
        uid = (await world.kube.get(MODELS, "a", world.namespace))["metadata"]["uid"]
        if number % 2:
            await world.ready("a")
        if number < 19:
            await world.kube.delete(MODELS, "a", world.namespace)
    await until(
        lambda: (p := world.see(PROCESSES, "a")) and p["spec"]["model"]["uid"] == uid
        and p["spec"]["options"] == {"flavour": "f19"}, "the process is of the last one",
    )  # fmt: skip
    await world.ready("a")


async def test_each_thing_that_is_missing_has_its_reason_and_ends_when_it_comes(
    world: World, agents: Agents, start
) -> None:
    await start()
    # While a pod's budget is not known nothing is too large for it but in the eyes of its agent.
    agents.publishing.add("large")
    env = {"KEY": {"secretKeyRef": {"name": "token", "key": "value"}}}
    mount = [{"name": "code", "source": {"configMap": {"name": "code"}}, "path": "/code"}]
    with_secret = model("secretive", world.namespace)
    with_secret["spec"]["runtime"]["env"] = env
    await world.apply(
        model("poolless", world.namespace, pool="none"),
        pool("gpu", world.namespace, overcommit={"limit": 1}),
        with_secret,
        model("mounted", world.namespace, mounts=mount),
        model("large", world.namespace, resources={"deviceMemory": "8Gi"}),
        model("wide", world.namespace, mounts=[]) | {},
    )
    expected = {
        "poolless": (
            Reason.POOL_NOT_FOUND,
            "asks for pool none, which does not exist; pools: gpu; add an OmniPool of that name",
        ),
        "secretive": (Reason.SOURCE_NOT_FOUND, "there is no Secret token in its namespace; add"),
        "mounted": (Reason.SOURCE_NOT_FOUND, "there is no ConfigMap code in its namespace; add"),
        "large": (
            Reason.TOO_LARGE,
            "needs 8.00 GiB on the device, but pool gpu has 1.00 GiB; raise spec.device.memory of the pool",
        ),
    }

    def stalled(name: str) -> bool:
        return conditions(world.see(MODELS, name)).get("Stalled") == ("True", expected[name][0])

    for name, (_, sentence) in expected.items():
        await until(lambda name=name: stalled(name), f"{name} is stalled: {conditions(world.see(MODELS, name))}")
        ready = next(c for c in world.see(MODELS, name)["status"]["conditions"] if c["type"] == "Ready")
        assert sentence in ready["message"]
        assert ready["status"] == "False"
    await world.ready("wide")
    for name, (reason, sentence) in expected.items():  # an event is written after the status, and may come later
        await until(lambda it=(name, reason, sentence): told(world, *it), f"an event tells it of {name}")

    await world.apply(pool("none", world.namespace))
    await world.kube.create(
        SECRETS, {"metadata": {"name": "token", "namespace": world.namespace}, "stringData": {"value": "x"}}
    )
    await world.kube.create(
        CONFIG_MAPS, {"metadata": {"name": "code", "namespace": world.namespace}, "data": {"a.py": "1"}}
    )
    await world.apply(model("large", world.namespace, resources={"deviceMemory": "512Mi"}))
    agents.publishing.clear()
    await world.ready(*expected)


async def test_a_bad_new_revision_leaves_the_good_one_alone(world: World, agents: Agents, start) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    good = world.see(PROCESSES, "a")["spec"]
    broken = model("a", world.namespace, mounts=[{"name": "x", "source": {"configMap": {"name": "x"}}, "path": "/x"}])
    await world.apply(broken)
    await until(
        lambda: conditions(world.see(MODELS, "a")).get("Stalled") == ("True", "SourceNotFound"), "it is refused"
    )
    assert conditions(world.see(MODELS, "a"))["Ready"] == ("Unknown", "SourceNotFound")
    assert world.see(PROCESSES, "a")["spec"] == good
    await world.apply(model("a", world.namespace, flavour="right"))
    await world.ready("a")


async def test_the_oldest_keeps_a_name_and_the_next_gets_it(world: World, agents: Agents, start) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), model("old", world.namespace, servedNames=["GPT"]))
    await world.ready("old")
    await asyncio.sleep(1.1)  # creation times have whole seconds
    await world.apply(model("young", world.namespace, servedNames=["GPT"]))
    await world.ready("young")
    assert conditions(world.see(MODELS, "young"))["NameConflict"] == ("True", "NameTaken")
    assert world.see(MODELS, "young")["status"]["servedNames"] == ["young"]
    await world.kube.delete(MODELS, "old", world.namespace)
    await until(
        lambda: world.see(MODELS, "young")["status"]["servedNames"] == ["young", "GPT"], "the name is passed on"
    )
    await until(lambda: "NameConflict" not in conditions(world.see(MODELS, "young")), "and the conflict is over")


async def test_suspended_gives_everything_back_and_resumes(world: World, agents: Agents, start) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    await world.apply(model("a", world.namespace, suspend=True))
    await until(lambda: not world.all(PROCESSES), "the process is gone")
    await until(lambda: conditions(world.see(MODELS, "a")).get("Ready") == ("False", "Suspended"), "it says so")
    assert conditions(world.see(MODELS, "a"))["Stalled"][0] == "False"
    await world.apply(model("a", world.namespace))
    await world.ready("a")


async def test_over_the_limit_the_youngest_is_refused_until_there_is_room(world: World, agents: Agents, start) -> None:
    await start()
    sizes = {"resources": {"deviceMemory": "600Mi"}}
    await world.apply(pool("gpu", world.namespace, overcommit={"limit": 1}), model("a", world.namespace, **sizes))
    await world.ready("a")
    await world.apply(model("b", world.namespace, **sizes))
    await until(
        lambda: conditions(world.see(MODELS, "b")).get("Stalled") == ("True", "OverCommitLimit"), "it is refused"
    )
    ready = next(c for c in world.see(MODELS, "b")["status"]["conditions"] if c["type"] == "Ready")
    assert "its overcommit.limit is 1; raise that limit or spec.replicas of the pool" in ready["message"]
    await world.kube.delete(MODELS, "a", world.namespace)
    await world.ready("b")
