"""Every field of a model and of a pool, edited on a live object and taken back: what comes of it, and that something does.

kubeai#193: a field was edited, or removed, and nothing happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.connection import Connection
from kube.agents import Agents
from kube.world import World, model, pool, until
from omnimodel.api import OmniModel, OmniPool
from omnimodel.api.tree import fields
from omnimodel.kube import CONFIG_MAPS, DISRUPTION_BUDGETS, MODELS, POOLS, PROCESSES, STATEFUL_SETS, Kind, KubeError

pytestmark = [pytest.mark.cluster_api, pytest.mark.slow]
CODE = {"name": "code", "source": {"configMap": {"name": "code"}}, "path": "/code"}
CHECK = {"path": "/v1/embeddings", "json": {"input": "a"}, "expect": [{"at": "/data/0/index", "equals": 0}]}
HANDLER = {"entry": "words:Words", "files": {"words.py": "class Words: speed = 2\n"}}
WHEEL = {"name": "wordllama", "version": "0.4.0"}

# Field, its value, and what an edit of it is: another image, another process of the same one, an order to the process
# that runs (or to the gateway), or another place.
OF_MODELS: list[tuple[str, Any, str]] = [
    ("source.package", WHEEL, "image"),
    ("source.package.sha256", "b" * 64, "image"),
    ("runtime.handler", HANDLER, "image"),
    ("runtime.options.flavour", "sweet", "image"),
    ("runtime.dtype", "float16", "image"),
    ("runtime.environment.requirements", ["numpy==2.3.1"], "image"),
    ("runtime.env.MODE", "slow", "process"),
    ("runtime.threads", 2, "process"),
    ("runtime.allowNetwork", True, "process"),
    ("resources.hostMemory", "1Gi", "process"),
    ("resources.cpu", 2, "process"),
    ("resources.deviceMemory", "200Mi", "order"),
    ("limits.concurrency", 4, "process"),
    ("limits.requestBytes", "1Mi", "process"),
    ("limits.responseBytes", "1Mi", "process"),
    ("limits.processes", 100, "process"),
    ("limits.tmp", "32Mi", "process"),
    ("limits.shm", "32Mi", "process"),
    ("limits.queue", 7, "order"),
    ("limits.deadline", "3m", "order"),
    ("limits.loadDeadline", "4m", "order"),
    ("limits.drainTimeout", "5s", "order"),
    ("residency.priority", "high", "order"),
    ("residency.minResident", "10s", "order"),
    ("residency.idleAfter", "5m", "order"),
    ("residency.keepResident", True, "order"),
    ("residency.preload", True, "order"),
    ("mounts", [CODE], "process"),
    ("probe", CHECK, "order"),
    ("servedNames", ["Words/v1"], "order"),
    ("capabilities", ["embeddings"], "order"),
    ("metadata", {"owner": "search"}, "order"),
    ("description", "words as numbers", "seen"),
    ("replicas", {"min": 2}, "place"),
    ("affinity.together", ["rag"], "seen"),
    ("affinity.apart", ["large"], "seen"),
    ("pool", "other", "place"),
    ("suspend", True, "gone"),
]
# What an edit is: other pods one by one, another description of the set or its budget, other processes in the pods that
# there are, or news for the agents in them.
OF_POOLS: list[tuple[str, Any, set[str]]] = [
    ("replicas", 2, {"set"}),
    ("autoscale", {"min": 3, "max": 3}, {"set"}),
    ("updateStrategy", {"type": "OnDelete"}, {"set"}),
    ("updateStrategy", {"maxUnavailable": 2}, {"set", "budget"}),
    ("device.type", "cuda", {"pods"}),
    ("device.count", 2, {"pods"}),
    ("device.memory", "2Gi", {"agents"}),
    ("device.frameSize", "4Mi", {"agents"}),
    ("hostMemory", "3Gi", {"agents"}),
    ("overcommit", {"limit": 4}, {"agents"}),
    ("location", {"zone": "a"}, {"agents"}),
    ("isolation.level", "namespaces", {"pods", "processes"}),
    ("volumes", [{"name": "models", "path": "/srv/models"}], {"pods"}),
    ("volumes", [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}], {"pods"}),
    ("volumes", [{"name": "models", "image": {"reference": "example/models:1", "pullPolicy": "Always"}}], {"pods"}),
    ("store", {"path": "/srv/omnimodel"}, {"pods"}),
    ("store", {"published": [{"name": "catalogue", "path": "/srv/catalogue"}]}, {"pods"}),
    ("pod", {"image": "example/agent:2"}, {"pods"}),
    ("pod", {"nodeSelector": {"gpu": "l4"}}, {"pods"}),
    ("pod", {"tolerations": [{"key": "gpu", "operator": "Exists"}]}, {"pods"}),
    ("pod", {"resources": {"cpu": 2, "memory": "4Gi"}}, {"pods"}),
    ("pod", {"serviceAccountName": "builder"}, {"pods"}),
    ("pod", {"priorityClassName": "high"}, {"pods"}),
    ("pod", {"runtimeClassName": "machine"}, {"pods"}),
    ("sources", {"packageIndex": "https://packages.example.org/simple"}, {"agents"}),
    ("sources", {"netrc": {"secretKeyRef": {"name": "logins", "key": "netrc"}}}, {"pods"}),
]


def edited(item: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A manifest with one field of its spec set."""
    *folders, last = path.split(".")
    spec: dict[str, Any] = dict(item["spec"])
    place = spec
    for name in folders:
        place[name] = dict(place.get(name) or {})
        place = place[name]
    place[last] = value
    return {**item, "spec": spec}


def known(kind: type[OmniModel | OmniPool]) -> set[str]:
    """Fields of a spec."""
    return set(fields(fields(kind)["spec"].annotation))


def test_no_field_is_forgotten() -> None:
    assert {row[0].partition(".")[0] for row in OF_MODELS} == known(OmniModel)
    assert {row[0].partition(".")[0] for row in OF_POOLS} == known(OmniPool)


async def seen(world: World, kind: Kind, item: Mapping[str, Any]) -> None:
    """Apply an object, and wait until the operator speaks of it as it is now."""
    answer = await world.kube.apply(kind, item, manager="person")
    name, generation = item["metadata"]["name"], answer["metadata"]["generation"]
    await until(
        lambda: ((world.see(kind, name) or {}).get("status") or {}).get("observedGeneration") == generation,
        f"{item['spec']} is seen",
    )


def process_of(world: World, name: str) -> dict[str, Any]:
    """What is described for a model, without the number of its edit; empty for nothing."""
    found = world.see(PROCESSES, name)
    return {} if found is None else {key: value for key, value in found["spec"].items() if key != "generation"}


async def test_each_field_of_a_model_does_something_and_is_taken_back(world: World, agents: Agents, start) -> None:
    await start()
    code = {"metadata": {"name": "code", "namespace": world.namespace}, "data": {"a.py": "1"}}
    await world.kube.create(CONFIG_MAPS, code)
    base = model("a", world.namespace)
    await world.apply(pool("gpu", world.namespace, replicas=2), pool("other", world.namespace, replicas=1), base)
    await until(lambda: process_of(world, "a"), "a process is described")
    before = process_of(world, "a")

    def effect() -> str:
        """What the edit came to."""
        now = process_of(world, "a")
        if not now:
            return "gone"
        if now["publishHash"] != before["publishHash"]:
            return "image"
        if now["pool"] != before["pool"] or now["pods"] != before["pods"]:
            return "place"
        if now["hash"] != before["hash"]:
            return "process"
        return "order" if now != before else "seen"

    for path, value, wanted in OF_MODELS:
        await seen(world, MODELS, edited(base, path, value))
        try:
            await until(lambda wanted=wanted: effect() == wanted, path, 10.0)
        except AssertionError:
            raise AssertionError(f"{path}: {effect()}, not {wanted}: {world.see(MODELS, 'a')}") from None
        await seen(world, MODELS, base)
        try:
            await until(lambda: process_of(world, "a") == before, f"without {path} it is as before", 10.0)
        except AssertionError:
            raise AssertionError(f"{path} is not taken back: {process_of(world, 'a')} is not {before}") from None


async def test_each_field_of_a_pool_does_something_and_is_taken_back(world: World, start) -> None:
    await start()
    base = pool("gpu", world.namespace)
    await world.apply(base, model("a", world.namespace))
    await until(lambda: process_of(world, "a") and world.see(STATEFUL_SETS, "gpu"), "pods and a process are described")

    async def described() -> dict[str, Any]:
        wanted = dict(world.see(STATEFUL_SETS, "gpu")["spec"])
        budget = await world.kube.get(DISRUPTION_BUDGETS, "gpu", world.namespace)
        return {
            "pods": wanted.pop("template"), "set": wanted, "budget": budget["spec"],
            "processes": {key: value for key, value in process_of(world, "a").items() if key != "hash"},
        }  # fmt: skip

    before = await described()
    for path, value, wanted in OF_POOLS:
        await seen(world, POOLS, edited(base, path, value))

        async def done(wanted: set[str] = wanted) -> bool:
            now = await described()
            return {part for part in before if now[part] != before[part]} == wanted - {"agents"}

        try:
            await until(done, path, 10.0)
        except AssertionError:
            now = await described()
            raise AssertionError(f"{path}: {[part for part in before if now[part] != before[part]]}") from None
        await seen(world, POOLS, base)

        async def back() -> bool:
            return await described() == before

        await until(back, f"without {path} it is as before")


async def test_pods_that_a_person_restarts_are_restarted(world: World, start, api_cluster: Connection) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace))
    await until(lambda: world.see(STATEFUL_SETS, "gpu"), "pods are described")
    restart = ("rollout", "restart", "statefulset/gpu", "-n", world.namespace)
    await asyncio.to_thread(api_cluster.kubectl, *restart)

    def asked() -> object:
        return world.see(STATEFUL_SETS, "gpu")["spec"]["template"]["metadata"].get("annotations")

    note = await until(asked, "it is asked for")
    await seen(world, POOLS, pool("gpu", world.namespace, pod={"nodeSelector": {"gpu": "l4"}}))
    await until(lambda: "nodeSelector" in world.see(STATEFUL_SETS, "gpu")["spec"]["template"]["spec"], "an edit")
    assert asked() == note


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(MODELS, {"spec": {"source": {"path": "/srv/models/a"}}}, id="a second source"),
        pytest.param(MODELS, {"spec": {"limits": {"deadline": "60"}}}, id="a duration without a unit"),
        pytest.param(POOLS, {"spec": {"autoscale": {"min": 3, "max": 2}}}, id="a range the wrong way round"),
        pytest.param(POOLS, {"spec": {"replicas": 1, "autoscale": {"min": 1, "max": 1}}}, id="two who say how many"),
        pytest.param(
            POOLS, {"spec": {"store": {"volumeClaimTemplate": {"size": "9Gi"}}}}, id="claims of pods there are"
        ),
    ],
)
async def test_an_edit_that_is_nonsense_is_refused_and_nothing_changes(
    world: World, kind: Kind, body: dict[str, Any]
) -> None:
    name = "a" if kind is MODELS else "gpu"
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    before = await world.kube.get(kind, name, world.namespace)
    with pytest.raises(KubeError) as refused:
        await world.kube.merge(kind, name, world.namespace, body)
    assert refused.value.invalid
    assert await world.kube.get(kind, name, world.namespace) == before
