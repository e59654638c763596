"""What breaks: the operator between any two writes, its lease, its watches, the API server, pods, and foreign hands."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from aiohttp import web

from kube.agents import Agents
from kube.proxy import WRITES, Proxy, status
from kube.world import World, conditions, is_ready, model, pool, until
from omnimodel.controllers.kubernetes_cache import Cache
from omnimodel.controllers.kubernetes_health import Hearing
from omnimodel.controllers.kubernetes_writes import Writer
from omnimodel.controllers.status import residency_entry
from omnimodel.kube import DISRUPTION_BUDGETS, LEASES, MODELS, PODS, POOLS, PROCESSES, SERVICES, STATEFUL_SETS
from omnimodel.protocol.report import ModelReport

OURS = "omnimodel/operator"
KILLS = 10


def essence(world: World) -> dict[str, Any]:
    """Everything the operator made, without what differs from run to run."""
    return {
        "processes": {
            name: {k: v for k, v in item["spec"].items() if k not in {"model", "identity", "hash"}}
            for name, item in world.all(PROCESSES).items()
        },
        "sets": {name: item["spec"] for name, item in world.all(STATEFUL_SETS).items()},
        "models": {name: conditions(item) for name, item in world.all(MODELS).items()},
        "pools": {name: conditions(item) for name, item in world.all(POOLS).items()},
    }


def of_round(request: web.Request) -> bool:
    """Whether a request is a write of a round, not of the election."""
    return request.method in WRITES and "/leases" not in request.path


@pytest.mark.slow
async def test_killed_between_any_two_writes_it_ends_with_the_same(
    world: World, agents: Agents, proxy: Proxy, start_process
) -> None:
    """Each life of the operator ends with its first write."""
    lives: dict[int, str] = {}  # pid -> the one write that it was let to make

    def mine(request: web.Request) -> bool:
        return of_round(request) and request.headers.get("User-Agent", "").startswith(OURS)

    async def one_write(request: web.Request) -> web.Response | None:
        if not mine(request) or (len(lives) == KILLS and operator.pid not in lives):
            return None
        if operator.pid in lives:
            return status(503, "ServiceUnavailable", "this life has written")
        lives[operator.pid] = f"{request.method} {request.path}"
        return None

    async def kill_after(request: web.Request) -> web.Response | None:
        if mine(request) and operator.pid in lives:
            operator.kill()
        return None

    operator = await start_process("one", proxy.kubeconfig)
    proxy.before, proxy.after = one_write, kill_after
    items = [pool("gpu", world.namespace), model("a", world.namespace), model("b", world.namespace)]
    await world.apply(*items)
    await world.ready("a", "b", seconds=200)
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")
    assert len(lives) >= 6, lives
    await until(lambda: operator.starts == len(lives) + 1, "it is up after its last death")
    found = essence(world)
    assert set(found["processes"]) == set("ab")
    assert all(spec["pods"] == ["gpu-0"] for spec in found["processes"].values())
    assert {c["Ready"] for c in found["models"].values()} == {("True", "Serving")}


async def test_of_two_only_one_writes_and_the_other_takes_over(
    world: World, agents: Agents, proxy: Proxy, start_process
) -> None:
    first = await start_process("first", proxy.kubeconfig)
    second = await start_process("second", proxy.kubeconfig)
    operators = {"first": first, "second": second}
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")

    async def holder() -> str:
        lease = await world.kube.get(LEASES, "omnimodel-operator", world.namespace)
        return lease["spec"]["holderIdentity"] if lease else ""

    async def writes(name: str) -> float:
        found = 0.0
        for verb in ("apply", "apply-status", "patch", "delete"):
            for kind in ("omnimodels", "omnipools", "omniprocesses", "statefulsets", "services"):
                found += await operators[name].metric("omni_operator_api_calls_total", verb=verb, kind=kind)
        return found

    leader = await holder()
    other = "second" if leader == "first" else "first"
    assert await writes(leader) > 0
    assert await writes(other) == 0
    await until(operators[other].url, "the other answers")
    await operators[leader].end()

    async def passed_on() -> bool:
        return await holder() == other

    await until(passed_on, "the other leads")
    await world.apply(model("b", world.namespace))
    await world.ready("b")
    assert await writes(other) > 0


async def test_a_leader_that_cannot_renew_ends_before_another_leads(
    world: World, agents: Agents, proxy: Proxy, start_process
) -> None:
    first = await start_process("first", proxy.kubeconfig)
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")

    async def no_leases(request: web.Request) -> web.Response | None:
        return status(503, "ServiceUnavailable", "away") if "/leases/omnimodel-operator" in request.path else None

    pid, starts = first.pid, first.starts
    proxy.before = no_leases
    await until(lambda: first.starts > starts, "it ends itself")
    assert first.pid != pid


async def test_cut_watches_and_a_forgotten_past_lose_nothing(world: World, agents: Agents, proxy: Proxy, start) -> None:
    """A deletion while the watch was away, whose version is gone by the time it is back, is told by no event."""
    here = await start("one", proxy.kubeconfig)
    await world.apply(pool("gpu", world.namespace), *(model(name, world.namespace) for name in "abc"))
    await world.ready("a", "b", "c")

    async def gone(request: web.Request) -> web.Response | None:
        if request.query.get("watch") == "true":
            said = {"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410}
            return web.json_response({"type": "ERROR", "object": said})
        return None

    proxy.before = gone
    proxy.cut()
    await world.kube.delete(MODELS, "a", world.namespace)
    await world.apply(model("b", world.namespace, flavour="edited"))
    await until(lambda: "a" not in world.all(PROCESSES), "the process is collected")
    proxy.before = _none
    await until(lambda: world.see(PROCESSES, "b")["spec"]["generation"] == 2, "the edit arrives after all")
    await here.operator.sweep()
    assert (world.namespace, "a") not in here.operator.cache.items[MODELS]
    for number in range(5):
        proxy.cut()
        await world.apply(model("c", world.namespace, flavour=f"f{number}"))
    await until(lambda: world.see(PROCESSES, "c")["spec"]["options"] == {"flavour": "f4"}, "the last edit arrives")
    await world.ready("b", "c")
    assert (await here.ask("/healthz"))[0] == 200


async def _none(_: web.Request) -> web.Response | None:
    return None


async def test_what_the_answer_to_a_write_shows_is_news(world: World) -> None:
    """An agent wrote between the operator's decision and its write; its own event comes too late to be news."""
    await world.apply(model("a", world.namespace))
    cache, news = Cache(), []
    cache.put(MODELS, await world.kube.get(MODELS, "a", world.namespace))
    writer = Writer(world.kube, cache, Hearing(), lambda: True)
    writer.changed = lambda kind, before, item: news.append((before, item))
    entry = {"residency": [residency_entry("gpu-0", ModelReport(world.namespace, "a", 1, "warm", "idle", ready=True))]}
    told = await world.kube.patch_status(MODELS, "a", world.namespace, entry, manager="omni-agent.gpu-0")
    assert await writer.status(MODELS, (world.namespace, "a"), {"observedGeneration": 1})
    assert cache.put(MODELS, told)[0] is False
    ((before, item),) = news
    assert "residency" not in (before.get("status") or {})
    assert item["status"]["residency"][0]["pod"] == "gpu-0"


async def test_conflicts_refusals_and_a_slow_server_only_delay(
    world: World, agents: Agents, proxy: Proxy, start
) -> None:
    storm = itertools.count()

    async def trouble(request: web.Request) -> web.Response | None:
        await asyncio.sleep(0.05)
        if not of_round(request):
            return None
        match next(storm) % 7:
            case 0:
                return status(409, "Conflict", "the object has been modified")
            case 1:
                return status(500, "InternalError", "etcdserver: request timed out")
            case 2:
                return status(429, "TooManyRequests", "slow down")
        return None

    proxy.before = trouble
    await start("one", proxy.kubeconfig)
    await world.apply(pool("gpu", world.namespace), *(model(name, world.namespace) for name in "abcd"))
    await world.ready("a", "b", "c", "d", seconds=120)


async def test_an_api_server_that_is_away_for_a_while_is_only_a_pause(
    world: World, agents: Agents, proxy: Proxy, start_process
) -> None:
    """Longer than a lease: the operator ends itself, waits until the server is back, and goes on."""
    operator = await start_process("one", proxy.kubeconfig)
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    starts = operator.starts

    async def away(_: web.Request) -> web.Response | None:
        return status(503, "ServiceUnavailable", "restarting")

    proxy.before = away
    proxy.cut()
    await world.apply(model("b", world.namespace), model("a", world.namespace, flavour="edited"))
    await until(lambda: operator.starts > starts, "it has ended itself")
    proxy.before = _none
    await world.ready("a", "b")


async def test_foreign_hands_are_put_right_and_what_is_the_users_is_left(world: World, agents: Agents, start) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    kube, namespace = world.kube, world.namespace
    good = world.see(PROCESSES, "a")["spec"]
    wanted = world.see(STATEFUL_SETS, "gpu")["spec"]

    await kube.merge(STATEFUL_SETS, "gpu", namespace, {"spec": {"replicas": 3}})
    await until(lambda: world.see(STATEFUL_SETS, "gpu")["spec"]["replicas"] == 1, "scaled back")
    await kube.merge(STATEFUL_SETS, "gpu", namespace, {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}})
    await until(
        lambda: "app.kubernetes.io/managed-by" in world.see(STATEFUL_SETS, "gpu")["metadata"]["labels"], "label is back"
    )
    uid = world.see(STATEFUL_SETS, "gpu")["metadata"]["uid"]
    await kube.delete(STATEFUL_SETS, "gpu", namespace)
    await until(lambda: (s := world.see(STATEFUL_SETS, "gpu")) and s["metadata"]["uid"] != uid, "made anew")
    assert world.see(STATEFUL_SETS, "gpu")["spec"] == wanted
    await kube.delete(SERVICES, "gpu", namespace)

    async def service() -> Any:
        return await kube.get(SERVICES, "gpu", namespace)

    await until(service, "the Service is made anew")

    async def budget() -> Any:
        found = await kube.get(DISRUPTION_BUDGETS, "gpu", namespace)
        return found is not None and found["spec"]["maxUnavailable"] == 1

    await kube.merge(DISRUPTION_BUDGETS, "gpu", namespace, {"spec": {"maxUnavailable": 3}})
    await until(budget, "the budget is what it was")
    await kube.delete(DISRUPTION_BUDGETS, "gpu", namespace)
    await until(budget, "the budget is made anew")

    await kube.merge(PROCESSES, "a", namespace, {"spec": {"env": {"EVIL": "1"}, "threads": 7, "pods": []}})
    await until(lambda: world.see(PROCESSES, "a")["spec"] == good, "the process is what it was")
    old = world.see(PROCESSES, "a")["metadata"]["uid"]
    await kube.delete(PROCESSES, "a", namespace)
    await until(lambda: (p := world.see(PROCESSES, "a")) and p["metadata"]["uid"] != old, "the process is made anew")

    lie = {
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Lie",
                "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ]
    }
    await kube.patch_status(MODELS, "a", namespace, lie, manager="foreign")
    await world.ready("a")
    await kube.merge(
        MODELS, "a", namespace, {"metadata": {"labels": {"team": "mine"}, "annotations": {"note": "mine"}}}
    )
    await world.apply(model("a", namespace, flavour="seen"))
    await world.ready("a")
    found = await kube.get(MODELS, "a", namespace)
    assert (found["metadata"]["labels"], found["metadata"]["annotations"]) == ({"team": "mine"}, {"note": "mine"})


async def test_an_object_of_someone_else_with_the_name_is_left_alone(world: World, agents: Agents, start) -> None:
    await start()
    labels = {"app": "theirs"}
    theirs = {
        "metadata": {"name": "gpu", "namespace": world.namespace},
        "spec": {
            "replicas": 0, "serviceName": "x", "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        },
    }  # fmt: skip
    await world.kube.create(STATEFUL_SETS, theirs)
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await until(lambda: conditions(world.see(POOLS, "gpu")).get("Stalled") == ("True", "NameOccupied"), "it says so")
    await until(lambda: conditions(world.see(MODELS, "a")).get("Ready") == ("Unknown", "NameOccupied"), "the model too")
    ready = next(c for c in world.see(POOLS, "gpu")["status"]["conditions"] if c["type"] == "Ready")
    assert "a StatefulSet named gpu is there already" in ready["message"]
    assert "; delete that object, or give the pool another name" in ready["message"]
    assert world.see(STATEFUL_SETS, "gpu")["spec"]["serviceName"] == "x"
    await world.kube.delete(STATEFUL_SETS, "gpu", world.namespace)
    await world.apply(pool("gpu", world.namespace, replicas=1))  # a reason to look again
    await world.ready("a")


POD_TROUBLE = {
    "no node takes it": (
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"}]},
        "Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu", "free or add a node that takes it",
    ),
    "its claim is missing": (
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": 'persistentvolumeclaim "models" not found'}]},
        "ClaimNotFound", 'persistentvolumeclaim "models" not found', "create that claim in the pool's namespace",
    ),
    "its image cannot be pulled": (
        {"phase": "Pending", "containerStatuses": [{"name": "agent", "image": "x", "imageID": "", "ready": False, "restartCount": 0,
         "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"}}}]},
        "ImageNotPulled", "Back-off pulling image x", "correct spec.pod.image of the pool",
    ),
    "its agent crashes": (
        {"phase": "Running", "containerStatuses": [{"name": "agent", "image": "x", "imageID": "", "ready": False, "restartCount": 5,
         "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
         "lastState": {"terminated": {"reason": "Error", "exitCode": 3}}}]},
        "PodFailed", "back-off 40s (exit code 3)", "see kubectl logs --previous",
    ),
    "its agent runs out of memory": (
        {"phase": "Running", "containerStatuses": [{"name": "agent", "image": "x", "imageID": "", "ready": False, "restartCount": 5,
         "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
         "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
        "OutOfMemory", "its container ran out of memory and was killed: back-off 40s", "raise spec.pod.resources.memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trouble", list(POD_TROUBLE))
async def test_a_pod_that_cannot_run_says_why_on_pool_and_model(world: World, start, trouble: str) -> None:
    body, reason, sentence, cure = POD_TROUBLE[trouble]
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await until(lambda: "gpu-0" in world.all(PODS), "the pod is made")
    await world.kube.patch_status(PODS, "gpu-0", world.namespace, body, manager="kubelet")
    await until(lambda: conditions(world.see(POOLS, "gpu")).get("Stalled") == ("True", reason), reason)
    await until(lambda: conditions(world.see(MODELS, "a")).get("Ready") == ("Unknown", reason), "on the model")
    for item in (world.see(POOLS, "gpu"), world.see(MODELS, "a")):
        ready = next(c for c in item["status"]["conditions"] if c["type"] == "Ready")
        assert f"gpu-0: {sentence}; {cure}" in ready["message"]


async def test_a_lost_pod_is_not_ready_its_entries_go_and_its_models_move(
    world: World, agents: Agents, start, monkeypatch
) -> None:
    """seldon#5032: models of dead servers stayed Ready."""
    from omnimodel.controllers import kubernetes_pods, kubernetes_reconcile

    agents.beat_seconds = 1.0
    monkeypatch.setattr(kubernetes_pods, "SILENT_SECONDS", 5.0)
    monkeypatch.setattr(kubernetes_pods, "LOST_SECONDS", 2.0)
    monkeypatch.setattr(kubernetes_pods, "BACK_SECONDS", 1.0)
    monkeypatch.setattr(kubernetes_reconcile, "TICK_SECONDS", 0.3)
    await start()
    await world.apply(
        pool("gpu", world.namespace, replicas=2), model("a", world.namespace), model("b", world.namespace)
    )
    await world.ready("a", "b")
    (pod,) = world.see(PROCESSES, "a")["spec"]["pods"]
    other = "gpu-1" if pod == "gpu-0" else "gpu-0"
    agents.silent.add(pod)
    await until(lambda: world.see(PROCESSES, "a")["spec"]["pods"] == [other], "it moves to the other pod")
    await world.ready("a", "b")
    await until(
        lambda: [e["pod"] for e in world.see(MODELS, "a")["status"]["residency"]] == [other], "the entry is gone"
    )
    await until(
        lambda: [e["pod"] for e in world.see(POOLS, "gpu")["status"].get("pods", ())] == [other], "the pool's too"
    )


async def test_models_leave_a_pod_before_it_goes(world: World, agents: Agents, start) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace, replicas=2))
    # A pod that serves is preferred to one that is to come, so both have to be there before the models.
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "both pods are ready")
    await world.apply(*(model(name, world.namespace) for name in "abcd"))
    await world.ready("a", "b", "c", "d")
    moving = [name for name, p in world.all(PROCESSES).items() if p["spec"]["pods"] == ["gpu-1"]]
    assert moving
    seen: list[tuple[str, ...]] = [("gpu-1",)]

    def note(key: tuple[str, str], _: object, item: dict[str, Any] | None) -> None:
        if item is not None and key[1] == moving[0] and seen[-1] != (pods := tuple(item["spec"]["pods"])):
            seen.append(pods)

    world.mirrors[PROCESSES]._on_change = note
    await world.kube.merge(POOLS, "gpu", world.namespace, {"spec": {"replicas": 1}})
    await until(lambda: world.see(STATEFUL_SETS, "gpu")["spec"]["replicas"] == 1, "the pod goes")
    await world.ready("a", "b", "c", "d")
    # Objects of another kind may be seen later than they were written.
    await until(lambda: seen == [("gpu-1",), ("gpu-0", "gpu-1"), ("gpu-0",)], "it was on both for a while")


async def test_an_edit_of_the_pod_template_reaches_the_stateful_set_and_back(
    world: World, agents: Agents, start
) -> None:
    await start()
    await world.apply(
        pool("gpu", world.namespace, pod={"nodeSelector": {"gpu": "l4"}, "resources": {"cpu": 8, "memory": "32Gi"}})
    )

    def spec() -> Any:
        return ((world.see(STATEFUL_SETS, "gpu") or {}).get("spec") or {}).get("template", {}).get("spec", {})

    await until(lambda: spec().get("nodeSelector") == {"gpu": "l4"}, "it is there")
    await world.apply(pool("gpu", world.namespace))
    default = {"requests": {"cpu": "500m"}}
    await until(
        lambda: "nodeSelector" not in spec() and spec()["containers"][0]["resources"] == default, "it is taken out"
    )
