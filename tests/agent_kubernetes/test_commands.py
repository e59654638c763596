"""`omni agent` and `omni gateway` with real models against a real API server that dies, and comes back.

Pods are objects that the test makes: the agents run on this machine, at addresses of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import yaml

from agent_kubernetes.commands import START_SECONDS, TOKEN_SECRET, Commands, Load
from agent_kubernetes.world import Catalogue, eventually
from cli.linear import MANIFEST, write_weights
from cluster.cluster import Cluster
from cluster.fixtures import GIVEN, install_crds, missing
from cluster_node.models import code, prober, said
from omnimodel.gateway.tokens import bearer
from omnimodel.kube import MODELS, PODS, Kube

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
TOKEN = "t" * 64
PODS_OF_BOTH = ("default-0", "default-1")


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory):
    """A cluster that these tests may hurt."""
    why_not = missing("api") or ("these tests kill API servers; unset " + GIVEN if os.environ.get(GIVEN) else "")
    if why_not:
        pytest.skip(why_not)
    with Cluster(tmp_path_factory.mktemp("own") / "cluster", "api", orphans=False) as cluster:
        install_crds(cluster)
        yield cluster


class World(Commands):
    """The commands, and the catalogue they serve."""

    catalogue: Catalogue
    weights: Path

    async def add_model(self, name: str, *pods: str, sleep_seconds: float = 0.0) -> None:
        text = MANIFEST.format(
            name=name, weights=self.weights, shift=0.0, expected=[6.0, 22.0], sleep_seconds=sleep_seconds
        )
        manifest = yaml.safe_load(text)
        manifest["metadata"]["namespace"] = self.namespace
        manifest["spec"]["residency"] = {"preload": True}
        await self.catalogue.assign(await self.catalogue.kube.create(MODELS, manifest), *(pods or PODS_OF_BOTH))

    async def add_pod(self, name: str, ip: str) -> None:
        labels = {"omnimodel.io/pool": "default", "omnimodel.io/pool-namespace": self.namespace}
        metadata = {"name": name, "namespace": self.namespace, "labels": labels}
        spec = {
            "containers": [{"name": "agent", "image": "localhost/agent:dev"}],
            "automountServiceAccountToken": False,
        }
        await self.catalogue.kube.create(PODS, {"metadata": metadata, "spec": spec})
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
        await self.catalogue.kube.patch_status(PODS, name, self.namespace, status, manager="test-kubelet")

    async def change_token(self, token: str) -> None:
        await self.catalogue.secret(TOKEN_SECRET, token=token)
        self.token_file.write_text(token)
        self.token_file.chmod(0o440)  # as in a pod

    async def ready_on(self, name: str, *pods: str) -> bool:
        entries = await self.catalogue.entries(name)
        return all(entries.get(pod, {}).get("ready") for pod in pods)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("commands")
    folder.chmod(0o755)
    own_cluster.kubectl("create", "namespace", "team")
    async with (
        await Kube.connect(str(own_cluster.kubeconfig)) as kube,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), headers=bearer(TOKEN)) as session,
    ):
        world = World(folder, own_cluster.kubeconfig, "team", session)
        world.catalogue = Catalogue(kube, "team")
        world.weights = folder / "weights.safetensors"
        write_weights(world.weights)
        await world.change_token(TOKEN)
        await world.catalogue.pool(device={"type": "cpu", "memory": "256Mi"})
        account = own_cluster.kubectl
        await eventually(
            lambda: "default" in account("get", "serviceaccounts", "-n", "team", "-o", "name"), "the account"
        )
        for index in range(2):
            world.add_agent()
            await world.add_pod(f"default-{index}", f"127.0.0.{index + 1}")
        world.add_gateway()
        await world.add_model("one")
        await world.add_model("two")
        try:
            for name in ("one", "two"):
                await eventually(
                    lambda name=name: world.ready_on(name, *PODS_OF_BOTH), f"{name} to be ready", START_SECONDS
                )
            yield world
        except BaseException as error:
            for command in (world.gateway, *world.agents):
                error.add_note(command.tail)
            raise
        finally:
            await world.stop()


async def test_the_gateway_finds_the_agents_and_answers(world: World) -> None:
    status, answer = await world.ask("one")
    assert status == 200, answer
    assert await world.answers("two")
    status = await world.get(f"{world.gateway.url}/omni/v1/status")
    assert {agent["pod"]: agent["up"] for agent in status["agents"]} == dict.fromkeys(PODS_OF_BOTH, True)
    ready = await world.get(f"{world.gateway.url}/readyz")
    assert ready == {"ready": True, "reasons": []}


async def test_the_status_says_what_the_ledgers_say_byte_for_byte(world: World) -> None:
    async def equal() -> bool:
        for index, pod in enumerate(PODS_OF_BOTH):
            report = await world.get(f"{world.agents[index].url}/omni/v1/report")
            for name in ("one", "two"):
                entry, told = await world.catalogue.entry(name, pod), report["models"][f"team/{name}"]
                same = (entry["tier"], entry["deviceBytes"], entry["pid"]) == (
                    told["tier"], told["device_bytes"], told["process"]["pid"] if told["process"] else 0,
                )  # fmt: skip
                if not same:
                    return False
        return True

    await eventually(equal, "status and ledgers to agree", 60)


async def test_objects_of_the_gateway_are_those_of_the_cluster_with_the_newest_word(world: World) -> None:
    models = await world.get(f"{world.gateway.url}/apis/omnimodel.io/v1alpha1/omnimodels")
    assert [item["metadata"]["name"] for item in models["items"]] == ["one", "two"]
    assert {entry["pod"] for entry in models["items"][0]["status"]["residency"]} == set(PODS_OF_BOTH)
    pools = await world.get(f"{world.gateway.url}/apis/omnimodel.io/v1alpha1/omnipools")
    assert {entry["pod"] for entry in pools["items"][0]["status"]["pods"]} == set(PODS_OF_BOTH)


async def test_wake_and_evict_reach_the_agents(world: World) -> None:
    url = f"{world.gateway.url}/omni/v1/models/team/one"
    async with world.session.post(f"{url}/evict") as response:
        assert response.status == 200, await response.text()
    for pod in PODS_OF_BOTH:
        await eventually(lambda pod=pod: _tier(world, "one", pod, "warm", "parked", "cold"), f"{pod} to evict it", 60)
    async with world.session.post(f"{url}/wake") as response:
        answer = await response.json()
        assert answer["tier"] == "resident"
        assert answer["pod"] in PODS_OF_BOTH
    async with world.session.get(f"{url}/logs") as response:
        assert response.status == 200


STEERING = """
import urllib.error, urllib.request
def tried(what):
    try:
        return what()
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return error.strerror
def ask(path, method="GET"):
    with urllib.request.urlopen(urllib.request.Request(AGENT + path, method=method), timeout=30) as answer:
        return answer.status
def listed(folder):
    import os
    return sorted(os.listdir(folder))
answer = {
    "evict": tried(lambda: ask("/omni/v1/models/team/one/evict", "POST")),
    "logs": tried(lambda: ask("/omni/v1/models/team/one/logs")),
    "objects": tried(lambda: ask("/apis/omnimodel.io/v1alpha1/omnimodels")),
    "request": tried(lambda: ask("/omni/v1/ingress/team/one/v2/models/one")),
    "alive": tried(lambda: ask("/healthz")),
    "token": tried(lambda: open(TOKEN_FILE).read()),
}
"""


async def test_a_model_with_the_network_steers_nobody(world: World) -> None:
    """It shares the network of its pod, where no policy stands between it and the agent."""
    manifest = prober("spy", runtime={"allowNetwork": True})
    manifest["metadata"]["namespace"] = world.namespace
    manifest["spec"] |= {"source": {"path": str(world.weights)}, "residency": {"preload": True}}
    await world.catalogue.assign(await world.catalogue.kube.create(MODELS, manifest), PODS_OF_BOTH[0])
    await eventually(lambda: world.ready_on("spy", PODS_OF_BOTH[0]), "the spy", START_SECONDS)
    agent = world.agents[0]
    await eventually(lambda: _known(world, "spy"), "the gateway to know of it", 60)
    text = f"AGENT, TOKEN_FILE = {agent.url!r}, {str(world.token_file)!r}\n{STEERING}"
    question = world.session.post(f"{world.gateway.url}/v2/models/team/spy/infer", data=json.dumps(code(text)))
    async with question as response:
        seen = said((await response.json())["outputs"][0]["data"])
    assert isinstance(seen, dict), seen
    assert seen.pop("alive") == 200, "it does reach the port"
    assert seen.pop("token") in {"No such file or directory", "Permission denied"}
    assert seen == dict.fromkeys(("evict", "logs", "objects", "request"), 401)
    await world.catalogue.delete("spy")
    await eventually(lambda: _forgotten(world, agent.url, "team/spy"), "the agent to unload it", 60)


async def test_the_command_line_asks_an_agent_with_its_token(world: World) -> None:
    async def omni(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "omnimodel.cli", "get", "models", "--address", world.agents[0].url, *options]
        return await asyncio.to_thread(
            subprocess.run, command, env=world.agents[0].environment, capture_output=True, text=True, check=False
        )

    done = await omni("--token-file", str(world.token_file))
    assert (done.returncode, "team/one" in done.stdout) == (0, True), done.stderr
    done = await omni()
    assert done.returncode == 1
    assert done.stderr.startswith("error: this agent is asked with a token, and there was none; send the one of the")
    done = await omni("--token-file", str(world.folder / "none"))
    assert done.returncode == 1
    assert "name a file that can be read" in done.stderr


async def test_a_token_that_is_changed_costs_no_request(world: World) -> None:
    load = Load(world, "one", "two")
    await load.more(20, "before")
    await world.change_token("n" * 64)
    url = f"{world.agents[0].url}/omni/v1/report"

    async def known() -> bool:
        async with world.session.get(url, headers=bearer("n" * 64)) as response:
            return response.status == 200

    await eventually(known, "the agent to know it")
    await load.more(40, "after")
    await world.change_token(TOKEN)
    await load.more(20, "after the first came back")
    await load.end()
    assert load.failures == []


async def _tier(world: World, name: str, pod: str, *tiers: str) -> bool:
    return (await world.catalogue.entry(name, pod)).get("tier") in tiers


async def test_an_api_server_that_dies_under_load_costs_no_request(world: World, own_cluster: Cluster) -> None:
    load = Load(world, "one", "two")
    await load.more(20, "before")
    own_cluster.kill_api_server()
    await load.more(100, "without an API server")
    for model in ("one", "two"):  # and swaps go on
        async with world.session.post(f"{world.gateway.url}/omni/v1/models/team/{model}/evict") as response:
            assert response.status == 200, await response.text()
    await load.more(50, "after swaps without an API server")
    own_cluster.start_api_server()
    own_cluster.wait_for_api_server()
    await load.more(50, "after it came back")
    await load.end()
    assert load.failures == []
    await eventually(lambda: world.ready_on("one", *PODS_OF_BOTH), "the entries", 90)


async def test_an_agent_that_starts_without_an_api_server_serves_what_it_was_told_last(
    world: World, own_cluster: Cluster
) -> None:
    agent = world.agents[1]
    await eventually((world.folder / "default-1" / "desired.json").exists, "the kept assignment")
    own_cluster.kill_api_server()
    try:
        agent.kill()
        agent.start()
        await eventually(lambda: world.answers("one", url=agent.url), "its answer", START_SECONDS)
        assert await world.answers("two", url=agent.url)
    finally:
        own_cluster.start_api_server()
        own_cluster.wait_for_api_server()
    await eventually(lambda: world.ready_on("one", *PODS_OF_BOTH), "its entry", 90)


async def test_an_agent_that_is_told_to_stop_fails_no_request(world: World) -> None:
    await world.add_model("slow", sleep_seconds=0.5)
    await eventually(lambda: world.ready_on("slow", *PODS_OF_BOTH), "the slow one", START_SECONDS)
    await eventually(lambda: world.answers("slow"), "the gateway to know of it", 60)
    load = Load(world, "one", "slow", workers=4)
    await load.more(20, "before")
    agent = world.agents[0]
    assert await agent.stop() == 0, agent.tail
    await load.more(20, "by the other alone")
    await load.end()
    assert load.failures == []
    agent.start()
    await eventually(lambda: world.answers("one", url=agent.url), "it to be back", START_SECONDS)


async def test_an_agent_that_is_killed_fails_what_its_models_had_taken_and_no_more(world: World) -> None:
    load = Load(world, "one", "slow", workers=4)
    await load.more(20, "before")
    agent = world.agents[0]
    agent.kill()
    await load.more(40, "by the other alone")
    await load.end()
    assert len(load.failures) <= 8, load.failures
    assert {status for status, _ in load.failures} <= {502}
    agent.start()
    await eventually(lambda: world.answers("one", url=agent.url), "it to be back", START_SECONDS)


async def test_a_model_that_is_deleted_is_gone_and_its_bytes_are_free(world: World) -> None:
    await world.catalogue.delete("slow")
    await eventually(lambda: _status(world, "slow", 404), "the gateway to forget it")
    for agent in world.agents:
        await eventually(lambda agent=agent: _forgotten(world, agent.url, "team/slow"), "the agent to unload it", 60)
    assert await world.answers("one")


async def _known(world: World, name: str) -> bool:
    return (await world.ask(name))[0] not in {0, 404, 503}


async def _status(world: World, name: str, status: int) -> bool:
    return (await world.ask(name))[0] == status


async def _forgotten(world: World, url: str, key: str) -> bool:
    report = await world.get(f"{url}/omni/v1/report")
    return report is not None and key not in report["models"]


async def test_a_gateway_that_is_told_to_stop_finishes_what_it_has(world: World) -> None:
    await world.add_model("last", sleep_seconds=1.0)
    await eventually(lambda: world.answers("last"), "the last one", START_SECONDS)
    asked = asyncio.create_task(world.ask("last"))
    await asyncio.sleep(0.3)
    gateway = world.gateway
    assert await gateway.stop() == 0, gateway.tail
    assert (await asked)[0] == 200
    gateway.start()
    await eventually(lambda: world.answers("one"), "it to be back", 60)


async def test_a_gateway_for_agents_that_were_named(world: World) -> None:
    """Without Kubernetes: `omni gateway --agents`."""
    await world.gateway.stop()
    gateway = world.add_gateway(
        "--agents", ",".join(agent.url for agent in world.agents), "--agent-token-file", str(world.token_file)
    )
    await eventually(lambda: world.answers("one"), "its answer", 60)
    models = await world.get(f"{gateway.url}/apis/omnimodel.io/v1alpha1/omnimodels")
    assert {item["metadata"]["name"] for item in models["items"]} >= {"one", "two"}
    (pool,) = (await world.get(f"{gateway.url}/apis/omnimodel.io/v1alpha1/omnipools"))["items"]
    hosts = {agent.url.removeprefix("http://") for agent in world.agents}
    assert {entry["pod"] for entry in pool["status"]["pods"]} == hosts
    processes = await world.get(f"{gateway.url}/apis/omnimodel.io/v1alpha1/omniprocesses")
    assert {item["status"]["pod"] for item in processes["items"]} <= hosts
