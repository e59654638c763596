"""Models that share pods and models that must not, on a real API server: placed, edited, refused, and said."""

from __future__ import annotations

from typing import Any

from kube.agents import Agents
from kube.world import World, conditions, is_ready, model, pool, until
from omnimodel.kube import EVENTS, MODELS, POOLS, PROCESSES

RAG: dict[str, Any] = {"affinity": {"together": ["rag"]}}
LARGE: dict[str, Any] = {"affinity": {"apart": ["large"]}}
CONFLICT = ("True", "AffinityConflict")


def pods(world: World, name: str) -> list[str]:
    return ((world.see(PROCESSES, name) or {}).get("spec") or {}).get("pods") or []


def stalled(world: World, name: str) -> tuple[str, str]:
    return conditions(world.see(MODELS, name)).get("Stalled", ("", ""))


async def two_pods(world: World) -> None:
    await world.apply(pool("gpu", world.namespace, replicas=2))
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pods are ready")


def message(world: World, name: str) -> str:
    found = world.see(MODELS, name)["status"]["conditions"]
    return str(next(condition for condition in found if condition["type"] == "Stalled")["message"])


async def test_models_to_be_apart_get_a_pod_each_and_the_one_too_many_is_told_why(
    world: World, agents: Agents, start
) -> None:
    await start()
    await two_pods(world)
    for name in "ab":
        await world.apply(model(name, world.namespace, **LARGE))
        await world.ready(name)
    assert (pods(world, "a"), pods(world, "b")) == (["gpu-0"], ["gpu-1"])
    await world.apply(model("c", world.namespace, **LARGE))
    await until(lambda: stalled(world, "c") == CONFLICT, "it is refused")
    assert f"is to be apart from {world.namespace}/a (group large), which is on gpu-0" in message(world, "c")
    assert "raise spec.replicas of the pool" in message(world, "c")

    async def told() -> bool:
        events = (await world.kube.list(EVENTS, world.namespace)).items
        return any(event["reason"] == "AffinityConflict" for event in events)

    await until(told, "and told in an event")
    await world.apply(pool("gpu", world.namespace, replicas=3))
    await world.ready("a", "b", "c")
    assert (pods(world, "a"), pods(world, "b"), pods(world, "c")) == (["gpu-0"], ["gpu-1"], ["gpu-2"])


async def test_put_together_by_an_edit_one_comes_to_the_other_and_parted_again(
    world: World, agents: Agents, start
) -> None:
    await start()
    await two_pods(world)
    for name in "ab":
        await world.apply(model(name, world.namespace))
        await world.ready(name)
    assert (pods(world, "a"), pods(world, "b")) == (["gpu-0"], ["gpu-1"])
    before = world.see(PROCESSES, "b")["spec"]["hash"]
    agents.reports["gpu-0", "b"] = {"ready": False, "tier": "cold", "phase": "publishing"}
    await world.apply(model("a", world.namespace, **RAG), model("b", world.namespace, **RAG))
    await until(lambda: pods(world, "b") == ["gpu-0", "gpu-1"], "it goes there and serves where it was")
    del agents.reports["gpu-0", "b"]
    await until(lambda: pods(world, "b") == ["gpu-0"], "it has left")
    await world.ready("a", "b")
    assert pods(world, "a") == ["gpu-0"]
    assert world.see(PROCESSES, "b")["spec"]["hash"] == before
    why = [entry["why"] for entry in world.see(MODELS, "b")["status"]["assigned"]]
    assert f"it goes with {world.namespace}/a (group rag)" in why
    await world.apply(model("a", world.namespace, **LARGE), model("b", world.namespace, **LARGE))
    await until(lambda: {*pods(world, "a"), *pods(world, "b")} == {"gpu-0", "gpu-1"}, "they part")
    await until(lambda: len(pods(world, "a")) == len(pods(world, "b")) == 1, "each is on a pod of its own")
    await world.ready("a", "b")


async def test_an_edit_that_no_pod_can_keep_is_refused_and_takes_nobody_down(
    world: World, agents: Agents, start
) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    await world.apply(model("b", world.namespace))
    await world.ready("b")
    good = world.see(PROCESSES, "b")["spec"]["hash"]
    await world.apply(model("a", world.namespace, **LARGE), model("b", world.namespace, **LARGE))
    await until(lambda: stalled(world, "b") == CONFLICT, "the younger is refused")
    assert message(world, "b").endswith("serves on")
    assert (pods(world, "b"), world.see(PROCESSES, "b")["spec"]["hash"]) == (["gpu-0"], good)
    await world.ready("a")
    await world.apply(model("b", world.namespace))
    await world.ready("b")


async def test_a_group_is_of_the_pool_of_its_oldest_model(world: World, agents: Agents, start) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), pool("cpu", world.namespace), model("a", world.namespace, **RAG))
    await world.ready("a")
    await world.apply(model("b", world.namespace, pool="cpu", **RAG))
    await until(lambda: stalled(world, "b") == CONFLICT, "it is refused")
    assert "(group rag), which is older and asks for pool gpu, not cpu; write the same spec.pool" in message(world, "b")
    await world.apply(model("a", world.namespace, pool="cpu", **RAG))
    await world.ready("a", "b")
    assert pods(world, "a") == pods(world, "b") == ["cpu-0"]
    await world.apply(model("a", world.namespace, **RAG))
    await until(lambda: stalled(world, "b") == CONFLICT, "it is refused again")
    await world.kube.delete(MODELS, "a", world.namespace)
    await world.ready("b")
