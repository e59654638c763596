"""Pods that cannot be made, and references that may not be read: the real reason, on pool and model, with a cure."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from kube.agents import Agents
from kube.proxy import Proxy, no_trouble, status
from kube.world import World, conditions, is_ready, model, pool, until
from omnimodel.controllers import kubernetes_reconcile, kubernetes_references, kubernetes_troubles
from omnimodel.controllers.kubernetes import Operator
from omnimodel.kube import CONFIG_MAPS, EVENTS, MODELS, PODS, POOLS, PROCESSES, SECRETS, Kind

ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount")
QUOTAS = Kind("", "v1", "resourcequotas", "ResourceQuota")
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
ENFORCE = "pod-security.kubernetes.io/enforce"
REFUSED = "violates PodSecurity"
LABEL = f"a namespace whose label {ENFORCE} is"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that asks at once why a pod is not there, and often."""
    monkeypatch.setattr(kubernetes_troubles, "AWAY_SECONDS", 0.5)
    monkeypatch.setattr(kubernetes_troubles, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(kubernetes_reconcile, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(kubernetes_reconcile, "TICK_SECONDS", 0.2)
    monkeypatch.setattr(kubernetes_reconcile, "FAULT_SECONDS", 0.5)


def message(item: dict[str, Any], kind: str = "Ready") -> str:
    return next(c["message"] for c in item["status"]["conditions"] if c["type"] == kind)


async def no_account(world: World) -> tuple[dict[str, Any], Any]:
    async def mend() -> None:
        await world.kube.create(ACCOUNTS, {"metadata": {"name": "omni-agent", "namespace": world.namespace}})

    return {"pod": {"serviceAccountName": "omni-agent"}}, mend


async def no_quota(world: World) -> tuple[dict[str, Any], Any]:
    quota = {"metadata": {"name": "none", "namespace": world.namespace}, "spec": {"hard": {"pods": "0"}}}
    await world.kube.create(QUOTAS, quota)

    async def counted() -> bool:
        found = await world.kube.get(QUOTAS, "none", world.namespace)
        return bool(found and (found.get("status") or {}).get("hard"))

    await until(counted, "the quota is in force")

    async def mend() -> None:
        await world.kube.delete(QUOTAS, "none", world.namespace)

    return {}, mend


async def restricted(world: World, spec: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    async def enforce(level: str | None) -> None:
        await world.kube.merge(NAMESPACES, world.namespace, "", {"metadata": {"labels": {ENFORCE: level}}})

    await enforce("restricted")

    async def mend() -> None:
        await enforce(None)

    return spec, mend


async def no_privileges(world: World) -> tuple[dict[str, Any], Any]:
    return await restricted(world, {"isolation": {"level": "namespaces"}})


async def no_folders(world: World) -> tuple[dict[str, Any], Any]:
    return await restricted(world, {"volumes": [{"name": "local", "path": "/srv"}]})


async def no_baseline(world: World) -> tuple[dict[str, Any], Any]:
    return await restricted(world, {"volumes": [{"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}]})


@pytest.mark.parametrize(
    ("cause", "said", "cure"),
    [
        pytest.param(no_account, 'serviceaccount "omni-agent" not found', "agent.namespaces", id="no ServiceAccount"),
        pytest.param(no_quota, "exceeded quota: none", "raise that ResourceQuota", id="no quota"),
        pytest.param(
            no_privileges, REFUSED, f"for isolation level namespaces {LABEL} privileged at most", id="no level"
        ),
        pytest.param(no_folders, REFUSED, f"for a folder of the node {LABEL} privileged at most", id="no folders"),
        pytest.param(
            no_baseline, REFUSED, f"its pods need {LABEL} baseline at most", id="no pods that are not restricted"
        ),
    ],
)
async def test_pods_that_cannot_be_made_say_why_and_heal(
    world: World, agents: Agents, start, hasty, cause, said: str, cure: str
) -> None:
    spec, mend = await cause(world)
    await start()
    await world.apply(pool("gpu", world.namespace, **spec), model("a", world.namespace))
    stalled = ("True", "PodNotCreated")
    await until(lambda: conditions(world.see(POOLS, "gpu")).get("Stalled") == stalled, "the pool says so")
    await until(lambda: conditions(world.see(MODELS, "a")).get("Ready") == ("Unknown", "PodNotCreated"), "the model")
    for item in (world.see(POOLS, "gpu"), world.see(MODELS, "a")):
        assert said in message(item)
        assert cure in message(item)
    await mend()
    await world.ready("a")
    await until(lambda: conditions(world.see(POOLS, "gpu"))["Ready"][0] == "True", "the pool is Ready")


async def test_a_pod_that_does_not_start_says_what_the_kubelet_said(world: World, start, hasty) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    pod = await until(lambda: world.see(PODS, "gpu-0"), "the pod")
    metadata = pod["metadata"]
    for reason, text in (
        ("Scheduled", "fine"),
        ("FailedMount", "hostPath type check failed: /models is not a directory"),
    ):
        about = {
            "kind": "Pod",
            "name": "gpu-0",
            "namespace": world.namespace,
            "uid": metadata["uid"],
            "apiVersion": "v1",
        }
        head = {"name": f"gpu-0.{reason.lower()}", "namespace": world.namespace}
        event = {"metadata": head, "involvedObject": about, "reason": reason, "message": text, "type": "Warning"}
        await world.kube.create(EVENTS, event)
    await until(lambda: conditions(world.see(POOLS, "gpu")).get("Stalled") == ("True", "PodFailed"), "it says so")
    assert "/models is not a directory" in message(world.see(POOLS, "gpu"))


def secretive(name: str, namespace: str, secret: str) -> dict[str, Any]:
    item = model(name, namespace)
    item["spec"]["runtime"]["env"] = {"KEY": {"secretKeyRef": {"name": secret, "key": "value"}}}
    return item


async def put(world: World, name: str, value: str) -> None:
    body = {"metadata": {"name": name, "namespace": world.namespace}, "stringData": {"value": value}}
    await world.kube.apply(SECRETS, body, manager="person")


async def test_a_secret_that_may_not_be_read_is_said_and_read_when_it_may(
    world: World, agents: Agents, proxy: Proxy, start, hasty
) -> None:
    await put(world, "token", "x")

    async def forbidden(request: web.Request) -> web.Response | None:
        return status(403, "Forbidden", 'secrets "token" is forbidden') if "/secrets/" in request.path else None

    proxy.before = forbidden
    await start("one", proxy.kubeconfig)
    await world.apply(pool("gpu", world.namespace), secretive("a", world.namespace, "token"))
    await until(lambda: conditions(world.see(MODELS, "a")).get("Stalled") == ("True", "NotAllowed"), "it says so")
    assert 'secrets "token" is forbidden' in message(world.see(MODELS, "a"))
    assert "agent.namespaces" in message(world.see(MODELS, "a"))
    proxy.before = no_trouble
    await world.ready("a")


SOURCES = {
    "hubToken": {"secretKeyRef": {"name": "fetching", "key": "token"}},
    "certificates": {"configMapKeyRef": {"name": "authorities", "key": "ca.crt"}},
}


async def test_what_the_sources_of_a_pool_refer_to_is_missed_by_name_until_it_is_there(
    world: World, agents: Agents, start, hasty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_references, "MISSING_SECONDS", 0.2)
    monkeypatch.setattr(kubernetes_references, "LOOK_SECONDS", 0.2)
    await start()
    await world.apply(pool("gpu", world.namespace, sources=SOURCES), model("a", world.namespace))

    async def missed(problem: str) -> None:
        sentence = f"spec.sources: {problem} of namespace {world.namespace}; add that key to a"

        def said() -> bool:
            item = world.see(POOLS, "gpu")
            stalled = conditions(item).get("Stalled") == ("True", "SourceNotFound")
            return stalled and message(item).startswith(sentence)

        await until(said, sentence)

    await missed("there is no key ca.crt in a ConfigMap authorities")
    await world.ready("a")
    head = {"name": "authorities", "namespace": world.namespace}
    await world.kube.create(CONFIG_MAPS, {"metadata": head, "data": {"ca.crt": "PEM"}})
    await missed("there is no key token in a Secret fetching")
    head = {"name": "fetching", "namespace": world.namespace}
    await world.kube.create(SECRETS, {"metadata": head, "stringData": {"toking": "x"}})
    await until(lambda: conditions(world.see(POOLS, "gpu"))["Stalled"][0] == "True", "another key is none")
    await world.kube.merge(SECRETS, "fetching", world.namespace, {"stringData": {"token": "x"}})
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "it heals")
    events = (await world.kube.list(EVENTS, world.namespace)).items
    assert any(event["reason"] == "SourceNotFound" and "Secret fetching" in event["message"] for event in events)
    await world.kube.delete(SECRETS, "fetching", world.namespace)
    await missed("there is no key token in a Secret fetching")
    await world.apply(pool("gpu", world.namespace))
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "a pool that does not ask for it any more")


async def test_sources_that_the_operator_may_not_read_are_the_kubelets_affair(
    world: World, agents: Agents, proxy: Proxy, start, hasty
) -> None:
    async def forbidden(request: web.Request) -> web.Response | None:
        return status(403, "Forbidden", "no") if request.path.endswith("/secrets/fetching") else None

    proxy.before = forbidden
    await start("one", proxy.kubeconfig)
    sources = {"hubToken": SOURCES["hubToken"]}
    await world.apply(pool("gpu", world.namespace, sources=sources), model("a", world.namespace))
    await world.ready("a")
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")


async def test_an_edited_secret_is_another_process_though_one_before_it_cannot_be_read(
    world: World, agents: Agents, proxy: Proxy, start, hasty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_references, "LOOK_SECONDS", 0.5)
    for name in ("first", "second"):
        await put(world, name, "old")
    await start("one", proxy.kubeconfig)
    await world.apply(pool("gpu", world.namespace))
    for name in ("first", "second"):
        await world.apply(secretive(f"uses-{name}", world.namespace, name))
    await world.ready("uses-first", "uses-second")
    before = {name: item["spec"]["hash"] for name, item in world.all(PROCESSES).items()}

    async def broken(request: web.Request) -> web.Response | None:
        return status(500, "InternalError", "no") if request.path.endswith("/secrets/first") else None

    proxy.before = broken
    await put(world, "second", "new")
    await until(lambda: world.see(PROCESSES, "uses-second")["spec"]["hash"] != before["uses-second"], "the new digest")
    assert world.see(PROCESSES, "uses-first")["spec"]["hash"] == before["uses-first"]
    await world.ready("uses-second")


async def test_a_pool_that_cannot_be_read_any_more_is_named_and_its_models_serve_on(
    world: World, agents: Agents, start
) -> None:
    """A field of a later version, which the API server takes and this operator does not."""
    here = await start()
    operator: Operator = here.operator
    await world.apply(pool("gpu", world.namespace), model("a", world.namespace))
    await world.ready("a")
    process = world.see(PROCESSES, "a")["spec"]
    item = await world.kube.get(POOLS, "gpu", world.namespace)
    later = {**item, "spec": {**item["spec"], "device": {"type": "quantum"}}}
    later["metadata"] = {**item["metadata"], "generation": 99, "resourceVersion": "999999999999"}
    operator._put(POOLS, later)
    await until(lambda: conditions(world.see(MODELS, "a")).get("Stalled") == ("True", "InvalidManifest"), "it says so")
    assert "pool gpu is not valid" in message(world.see(MODELS, "a"))
    assert world.see(PROCESSES, "a")["spec"] == process
