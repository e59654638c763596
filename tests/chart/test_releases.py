"""Releases on an API server: installed, upgraded, rolled back, uninstalled, installed anew, and two beside each other."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.builders import MODEL
from chart.chart import CHART, options
from cluster.cluster import Cluster
from cluster.connection import ClusterError
from kube.agents import Agents
from kube.world import OperatorHere, World, conditions, is_ready, model, pool, until
from omnimodel.api.crd import SCHEMA_LABEL
from omnimodel.controllers import kubernetes
from omnimodel.kube import MODELS as MODEL_KIND
from omnimodel.kube import PODS, POOLS, PROCESSES, STATEFUL_SETS, Kube

pytestmark = [pytest.mark.cluster_api, pytest.mark.slow]
MODELS = "omnimodels.omnimodel.io"
FEWER = {"omnimodels": ("suspend", "description"), "omniprocesses": ("probe", "network")}  # in the version before


@pytest.fixture
def place(own_cluster: Cluster) -> Iterator[str]:
    """A namespace that takes restricted pods only; all releases in it and the CRDs are gone after the test."""
    name = f"omni-{secrets.token_hex(4)}"
    own_cluster.kubectl("create", "namespace", name)
    own_cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    for release in releases(own_cluster):
        own_cluster.helm("uninstall", release["name"], "-n", release["namespace"])
    own_cluster.kubectl("delete", "crds", "--all", "--wait")
    # When kinds go while a namespace is emptied, the next try may be minutes away: nobody waits for it.
    own_cluster.kubectl("delete", "namespace", name, "--wait=false")


def releases(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.helm("list", "-A", "-o", "json"))
    return found


def install(cluster: Cluster, namespace: str, *more: str, chart: Path = CHART, name: str = "omni") -> str:
    return cluster.helm("upgrade", "--install", name, str(chart), "-n", namespace, *more)


def older(folder: Path) -> Path:
    """The chart as a version before it might have been: definitions with less in them, and another number of gateways."""
    chart = folder / "omnimodel"
    shutil.copytree(CHART, chart)
    head = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**head, "version": "0.0.9", "appVersion": "0.0.9"}))
    for definition in (chart / "files/crds").iterdir():
        content = yaml.safe_load(definition.read_text())
        del content["metadata"]["labels"][SCHEMA_LABEL]
        schema = content["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        schema["status"].pop("default", None)
        for name in FEWER.get(definition.stem, ()):
            del schema["spec"]["properties"][name]
        # The template finds the head of a definition by its line.
        definition.write_text(yaml.safe_dump(content, sort_keys=False))
    values = chart / "values.yaml"
    values.write_text(values.read_text().replace("gateway:\n  replicas: 2", "gateway:\n  replicas: 1"))
    return chart


def described(cluster: Cluster) -> set[str]:
    """Fields of a model's spec that the API server knows."""
    definition = cluster.get("crd", MODELS)
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return set(schema["properties"])


def gateways(cluster: Cluster, namespace: str) -> int:
    return int(cluster.get("deployment", "omni-omnimodel-gateway", "-n", namespace)["spec"]["replicas"])


def test_pods_are_made_where_only_restricted_ones_are(own_cluster: Cluster, place: str) -> None:
    install(own_cluster, place)
    for _ in own_cluster.until(60):
        pods = own_cluster.get("pods", "-n", place)["items"]
        components = sorted(pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods)
        if components == ["gateway", "gateway", "operator", "operator"]:
            break


def test_the_notes_say_what_to_do_next(own_cluster: Cluster, place: str) -> None:
    notes = install(own_cluster, place)
    assert f"kubectl apply -n {place} -f examples/catalog/" in notes
    assert f"helm test omni -n {place}" in notes
    warning = "every pod of the cluster reaches the gateway's admin port"
    assert warning not in notes
    assert warning in install(own_cluster, place, *options({"networkPolicy": {"enabled": False}}))


def test_an_upgrade_brings_new_fields_and_a_rollback_takes_everything_back(
    own_cluster: Cluster, place: str, tmp_path: Path
) -> None:
    install(own_cluster, place, chart=older(tmp_path))
    before = described(own_cluster)
    own_cluster.apply({**MODEL, "metadata": {"name": "tiny", "namespace": place}})
    uid = own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"]
    assert gateways(own_cluster, place) == 1
    install(own_cluster, place)
    assert described(own_cluster) - before == {"suspend", "description"}
    assert gateways(own_cluster, place) == 2
    own_cluster.helm("rollback", "omni", "1", "-n", place)
    assert described(own_cluster) == before
    assert gateways(own_cluster, place) == 1
    assert own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"] == uid


def test_the_same_upgrade_twice_changes_no_object(own_cluster: Cluster, place: str) -> None:
    install(own_cluster, place)
    before = stamps(own_cluster, place)
    install(own_cluster, place)
    assert stamps(own_cluster, place) == before


def stamps(cluster: Cluster, namespace: str) -> dict[str, object]:
    """What shows that an object was written: its version, or where controllers write a status its generation."""
    followed = "deployments,poddisruptionbudgets,crds,validatingadmissionpolicies"
    others = "services,serviceaccounts,networkpolicies,roles,rolebindings,clusterroles,clusterrolebindings"
    found: dict[str, object] = {}
    for kinds, stamp in ((followed, "generation"), (others, "resourceVersion")):
        for item in cluster.get(kinds, "-n", namespace)["items"]:
            found[f"{item['kind']}/{item['metadata']['name']}"] = item["metadata"][stamp]
    return found


@asynccontextmanager
async def team(cluster: Cluster) -> AsyncIterator[World]:
    """A namespace of models with agents in its pods, which is gone afterwards."""
    cluster.kubectl("create", "namespace", "team")
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(await Kube.connect(str(cluster.kubeconfig)))
        world = await stack.enter_async_context(World(kube, "team"))
        await stack.enter_async_context(Agents(world))
        yield world
    cluster.kubectl("delete", "namespace", "team", "--wait")


async def test_an_operator_waits_for_definitions_and_for_those_of_its_version(
    own_cluster: Cluster, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None at first; then those of the version before, the right ones, and those before again."""
    monkeypatch.setattr(kubernetes, "WAIT_SECONDS", 0.2)
    stalled = ("True", "OutdatedDefinitions")

    async def helm(command: Callable[..., object], *arguments: str, **options: Any) -> None:
        await asyncio.to_thread(command, *arguments, **options)
        await here.operator.sweep()

    async with OperatorHere(own_cluster.kubeconfig, "team", "one") as here:

        async def waits() -> bool:
            code, text = await here.ask("/readyz")
            return code == 503 and "install them with the chart" in text

        await until(waits, "it says what it waits for")
        await asyncio.to_thread(install, own_cluster, place, chart=older(tmp_path))
        async with team(own_cluster) as world:

            def said() -> dict[str, tuple[str, str]]:
                return conditions(world.see(MODEL_KIND, "a"))

            await world.apply(pool("gpu", "team"), model("a", "team"))
            await until(lambda: said().get("Stalled") == stalled, "it says so")
            uid = world.see(MODEL_KIND, "a")["metadata"]["uid"]
            await helm(install, own_cluster, place)
            await world.ready("a")
            serves = world.see(PROCESSES, "a")["metadata"]["uid"]
            await helm(own_cluster.helm, "rollback", "omni", "1", "-n", place)
            await until(lambda: said().get("Stalled") == stalled, "it says so again")
            assert said()["Ready"][0] == "True", "what serves, serves on"
            assert world.see(PROCESSES, "a")["metadata"]["uid"] == serves
            assert world.see(MODEL_KIND, "a")["metadata"]["uid"] == uid


async def test_what_serves_outlives_the_release_and_is_taken_over_by_the_next(own_cluster: Cluster, place: str) -> None:
    await asyncio.to_thread(install, own_cluster, place)
    async with team(own_cluster) as world:
        async with OperatorHere(own_cluster.kubeconfig, "team", "one"):
            await world.apply(pool("gpu", "team"), *(model(name, "team") for name in "abc"))
            await world.ready("a", "b", "c")
            await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")
        kinds = (STATEFUL_SETS, PODS, PROCESSES, MODEL_KIND)

        def identities() -> dict[tuple[str, str], object]:
            return {
                (kind.name, name): (item["metadata"]["uid"], item["metadata"].get("generation"))
                for kind in kinds
                for name, item in world.all(kind).items()
                if name != "c"
            }

        before = identities()
        await asyncio.to_thread(own_cluster.helm, "uninstall", "omni", "-n", place)
        assert identities() == before
        assert is_ready(world.see(MODEL_KIND, "a")), "agents serve on"
        await asyncio.to_thread(own_cluster.kubectl, "delete", "omnimodel", "c", "-n", "team", "--timeout=20s")
        await until(lambda: world.see(PROCESSES, "c") is None, "what is deleted meanwhile is gone")
        await asyncio.to_thread(install, own_cluster, place)
        async with OperatorHere(own_cluster.kubeconfig, "team", "two") as here:
            await world.apply(model("d", "team"))
            await world.ready("a", "b", "d")
            assert await here.metric("omni_operator_api_calls_total", verb="apply", kind="statefulsets") == 0
        assert {key: found for key, found in identities().items() if key[1] != "d"} == before
        every = ("delete", "omnimodels,omnipools", "--all", "-n", "team", "--wait", "--timeout=30s")
        await asyncio.to_thread(own_cluster.kubectl, *every)
        await until(
            lambda: not any(world.all(kind) for kind in (*kinds, POOLS)),
            "nothing holds on to anything without an operator",
        )


def test_models_outlive_the_release_and_are_there_when_it_comes_back(own_cluster: Cluster, place: str) -> None:
    install(own_cluster, place)
    own_cluster.apply({**MODEL, "metadata": {"name": "tiny", "namespace": place}})
    uid = own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"]
    own_cluster.helm("uninstall", "omni", "-n", place)
    assert own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"] == uid
    left = "deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets"
    selected = ["-l", "app.kubernetes.io/instance=omni"]
    assert own_cluster.get(left, "-A", *selected)["items"] == []
    cluster_wide = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
    assert own_cluster.get(cluster_wide, *selected)["items"] == []
    install(own_cluster, place)
    assert own_cluster.get("omnimodel", "tiny", "-n", place)["metadata"]["uid"] == uid


def test_two_releases_in_two_namespaces(own_cluster: Cluster, place: str) -> None:
    own_cluster.kubectl("create", "namespace", "omni-other")
    install(own_cluster, place, *options({"namespaces": [place]}))
    with pytest.raises(ClusterError, match="CustomResourceDefinition"):
        install(own_cluster, "omni-other", *options({"namespaces": ["omni-other"]}))
    second = {"namespaces": ["omni-other"], "crds": {"install": False}}
    install(own_cluster, "omni-other", *options(second))
    assert {release["namespace"] for release in releases(own_cluster)} == {place, "omni-other"}
    own_cluster.helm("uninstall", "omni", "-n", place)
    assert gateways(own_cluster, "omni-other") == 2
    own_cluster.helm("uninstall", "omni", "-n", "omni-other")
    own_cluster.kubectl("delete", "namespace", "omni-other", "--wait=false")
