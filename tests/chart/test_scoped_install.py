"""A release for two namespaces, with the rights that the chart gives and no others: operator, agents and gateway."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from chart.chart import CHART, options
from chart.rights import Recorder, account, granted, sorted_rights
from cluster.cluster import Cluster
from controllers.standin import StandInAgent
from kube.world import is_ready, model, pool, until
from omnimodel.controllers.agent_kubernetes import PodController
from omnimodel.controllers.agent_kubernetes_status import PodIdentity
from omnimodel.controllers.gateway_kubernetes import Discovery
from omnimodel.controllers.kubernetes import Operator, OperatorSettings
from omnimodel.controllers.kubernetes_children import AgentSettings
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.kube import MODELS, PODS, POOLS, SECRETS, STATEFUL_SETS, Kube, KubeError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster_api,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
SYSTEM = "omni-system"
SECONDS = 120.0
OURS = ("team-a", "team-b")
ROLE = "omni-omnimodel.omni-system.omnimodel.io"
MODEL = {namespace: f"words-{namespace}" for namespace in OURS}
TOKEN = "omni-omnimodel-agents"
CUSTOM = "cloud-agent"  # the account of the pool in team-b

# Granted though the life of this test does not come to it, with the reason.
RARELY = {
    "operator": {
        ("pods", "delete"): "of a node that is gone",
        ("omnimodels", "get"): "after an entry was taken out",
        ("omnipools", "get"): "after an entry was taken out",
        ("configmaps", "get"): "of models that refer to one",
        ("events", "list"): "of pods that cannot be made",
        ("events", "patch"): "of what is told again",
        ("leases", "get"): "of a pod that may be dead",
        ("leases", "create"): "where someone has deleted the chart's",
        ("leases", "patch"): "the canary, where the operator's own namespace is watched",
    },
    "agent": {
        ("events", "patch"): "of what is told again",
        ("omnipools", "get"): "whether a pool of another namespace is meant",
        ("configmaps", "get"): "of models that refer to one",
    },
    "gateway": {},
}


@dataclass
class Installed:
    """The release at work."""

    kube: Kube
    backend: RoutingBackend
    discovery: Discovery
    agents: list[StandInAgent]
    recorders: dict[str, list[Recorder]]

    async def status(self, namespace: str) -> dict[str, Any]:
        return await self.kube.get(MODELS, MODEL[namespace], namespace) or {}

    def denied(self) -> dict[str, list[str]]:
        """What was refused, by who asked."""
        return {who: [line for each in all_ for line in each.denied] for who, all_ in self.recorders.items()}

    def used(self, who: str) -> set[tuple[str, str]]:
        return set().union(*(each.used for each in self.recorders[who]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installed(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Installed]:
    folder = tmp_path_factory.mktemp("scoped")
    for namespace in (*OURS, "team-c"):
        own_cluster.kubectl("create", "namespace", namespace)
    values = options({"namespaces": list(OURS), "agent": {"moreServiceAccountNames": [CUSTOM]}})
    own_cluster.helm("install", "omni", str(CHART), "-n", SYSTEM, "--create-namespace", *values)
    own_cluster.kubectl("create", "serviceaccount", CUSTOM, "-n", "team-b")
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(await Kube.connect(str(own_cluster.kubeconfig)))
        recorders: dict[str, list[Recorder]] = {}
        agents: list[StandInAgent] = []

        async def as_account(who: str, namespace: str, name: str, pod: str = "") -> Kube:
            kubeconfig = account(own_cluster, folder, namespace, name, pod)
            recorder = await stack.enter_async_context(Recorder(kubeconfig, folder / f"{who}.{namespace}"))
            recorders.setdefault(who, []).append(recorder)
            return await stack.enter_async_context(await Kube.connect(str(recorder.kubeconfig), component=who))

        async def running(work: Any) -> None:
            task = asyncio.create_task(work)

            async def end() -> None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            stack.push_async_callback(end)

        reader = await as_account("gateway", SYSTEM, "omni-omnimodel-gateway")
        discovery = Discovery(
            reader, OURS, port=9, token_secret=TOKEN
        )  # nobody is there: whom it would ask is all that counts
        backend = RoutingBackend(known=discovery.known)
        stack.push_async_callback(backend.close)
        await running(discovery.run(backend))
        settings = OperatorSettings(
            "one", SYSTEM, "omni-omnimodel", OURS, port=0,
            agents=AgentSettings(image="localhost/agent:dev", service_account="omni-agent", token_secret=TOKEN),
            lease_seconds=60.0, renew_seconds=40.0, retry_seconds=1.0,
        )  # fmt: skip
        operator = Operator(
            await as_account("operator", SYSTEM, "omni-omnimodel-operator"), settings, on_lost=lambda: None
        )
        serving = asyncio.create_task(operator.run())
        stack.push_async_callback(asyncio.gather, serving, return_exceptions=True)
        stack.callback(operator.stop)
        for namespace in OURS:
            own = {"pod": {"serviceAccountName": CUSTOM}} if namespace == "team-b" else {}
            await kube.create(POOLS, pool("gpu", namespace, **own))
            own_cluster.kubectl("create", "secret", "generic", "key", "--from-literal=word=x", "-n", namespace)
            asked = model(MODEL[namespace], namespace)
            asked["spec"]["runtime"]["env"] = {"WORD": {"secretKeyRef": {"name": "key", "key": "word"}}}
            await kube.create(MODELS, asked)
        for namespace in OURS:
            await until(lambda namespace=namespace: kube.get(PODS, "gpu-0", namespace), f"a pod in {namespace}")
            status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
            status["conditions"] = [{"type": "Ready", "status": "True"}]
            await kube.patch_status(PODS, "gpu-0", namespace, status, manager="kubelet")
            name = CUSTOM if namespace == "team-b" else "omni-agent"
            own = await as_account("agent", namespace, name, "gpu-0")
            identity = PodIdentity("gpu-0", namespace, "gpu", namespace)
            state = folder / f"state.{namespace}"
            state.mkdir()
            agents.append(StandInAgent())
            await running(PodController(own, agents[-1], identity, state, namespaces=OURS, memory=state).run())
        yield Installed(kube, backend, discovery, agents, recorders)


async def test_models_become_ready_in_every_namespace_of_the_release(installed: Installed) -> None:
    async def ready() -> bool:
        return all([is_ready(await installed.status(namespace)) for namespace in OURS])

    try:
        await until(ready, "models are ready", SECONDS)
    except AssertionError:
        told = {name: (await installed.status(name)).get("status") for name in OURS}
        raise AssertionError(f"not ready: {told}; denied: {installed.denied()}") from None
    entries = [(await installed.status(namespace))["status"]["residency"] for namespace in OURS]
    assert [[entry["pod"] for entry in told] for told in entries] == [["gpu-0"]] * len(OURS)


async def test_agents_tell_people_what_happens(installed: Installed) -> None:
    for namespace, agent in zip(OURS, installed.agents, strict=True):
        agent.events.add("OmniModel", namespace, MODEL[namespace], "Woken", "waking took 0.1 s")
    told = [recorder.used for recorder in installed.recorders["agent"]]
    await until(lambda: all(("events", "create") in used for used in told), "events")


async def test_the_gateway_finds_models_and_agents(installed: Installed) -> None:
    await until(lambda: len(installed.backend.seats) >= 1, "agents")
    await until(lambda: set(installed.discovery.known()) == {f"{name}/{MODEL[name]}" for name in OURS}, "models")
    await until(lambda: all(card and card.granted for card in installed.discovery.known().values()), "their names")


async def test_the_gateway_has_the_token_of_the_agents_of_each_namespace(installed: Installed) -> None:
    kube = installed.kube
    tokens = {name: base64.b64decode((await kube.get(SECRETS, TOKEN, name))["data"]["token"]).decode() for name in OURS}
    assert len(set(tokens.values())) == len(OURS)
    there = {seat.address.namespace: seat for seat in installed.backend.seats.values()}
    await until(lambda: all(seat.agent.tokens == (tokens[name],) for name, seat in there.items()), "its tokens")
    assert there


async def test_a_life_with_edits_ends_without_anything_left(installed: Installed) -> None:
    kube = installed.kube
    before = (await installed.status("team-a"))["metadata"]["generation"]
    await kube.merge(MODELS, MODEL["team-a"], "team-a", {"spec": {"runtime": {"options": {"flavour": "other"}}}})

    async def followed() -> bool:
        item = await installed.status("team-a")
        return item["metadata"]["generation"] > before and is_ready(item)

    await until(followed, "the edit is ready", SECONDS)
    await kube.delete(MODELS, MODEL["team-a"], "team-a")
    await kube.delete(POOLS, "gpu", "team-a")

    async def gone() -> bool:
        return await kube.get(STATEFUL_SETS, "gpu", "team-a") is None

    await until(gone, "the pool's pods go", SECONDS)


@pytest.mark.parametrize(
    ("who", "roles"),
    [
        (
            "operator",
            (
                f"clusterrole/{ROLE}:operator",
                f"clusterrole/{ROLE}:references",
                f"role/omni-omnimodel-operator/{SYSTEM}",
                f"role/{TOKEN}-operator/team-a",
            ),
        ),
        ("agent", (f"clusterrole/{ROLE}:agent", f"clusterrole/{ROLE}:heartbeat", f"clusterrole/{ROLE}:references")),
        ("gateway", (f"clusterrole/{ROLE}:gateway", f"role/{TOKEN}/team-a")),
    ],
)
async def test_no_right_is_missing_and_none_is_idle(
    own_cluster: Cluster, installed: Installed, who: str, roles: tuple[str, ...]
) -> None:
    assert installed.denied()[who] == []
    idle = granted(own_cluster, *roles) - installed.used(who) - RARELY[who].keys()
    assert sorted_rights(idle) == {}


async def test_an_account_of_a_pools_own_is_held_to_its_pod(
    own_cluster: Cluster, installed: Installed, tmp_path: Path
) -> None:
    """One that came with rights at a cloud may write statuses as any agent may, and not more."""
    del installed
    stranger = account(own_cluster, tmp_path, "team-b", CUSTOM)
    entry = [{"pod": "gpu-0", "ready": True}]
    async with await Kube.connect(str(stranger)) as kube:
        with pytest.raises(KubeError, match="the token was made for no pod"):
            await kube.patch_status(POOLS, "gpu", "team-b", {"pods": entry}, manager="omni-agent.gpu-0")


async def test_nobody_looks_into_another_namespace(installed: Installed) -> None:
    for who, recorders in installed.recorders.items():
        asked = set().union(*(recorder.namespaces for recorder in recorders))
        assert asked <= {*OURS, SYSTEM, ""}, who
        lists = {resource for recorder in recorders for resource, verb in recorder.used if verb == "list"}
        assert lists, who
