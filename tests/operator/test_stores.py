"""Volumes of a pool's stores: what is rendered, and what a real API server and its controllers make of it."""

from __future__ import annotations

from typing import Any

import pytest

from api.builders import model
from kube.agents import Agents
from kube.world import World, is_ready, pool, until
from omnimodel.agent.kept import FOLDER_VARIABLE
from omnimodel.api import OmniModel, OmniPool
from omnimodel.controllers.kubernetes_children import AgentSettings, Child, build_stateful_set, differences
from omnimodel.controllers.kubernetes_pods import PodView, problem_of
from omnimodel.kube import PODS, POOLS, STATEFUL_SETS, Kind, KubeError
from omnimodel.render import render

CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
TEMPLATE = {"volumeClaimTemplate": {"size": "2Gi", "storageClassName": "none-here"}}


def child(**spec: Any) -> Child:
    return build_stateful_set(
        OmniPool.model_validate({"metadata": {"name": "gpu", "uid": "u"}, "spec": spec}), AgentSettings(), 1
    )


def volumes(found: Child) -> dict[str, Any]:
    return {volume["name"]: volume for volume in found.body["spec"]["template"]["spec"]["volumes"]}


def mounts(found: Child) -> dict[str, Any]:
    container = found.body["spec"]["template"]["spec"]["containers"][0]
    return {mount["name"]: mount for mount in container["volumeMounts"]}


def told(found: Child) -> dict[str, Any]:
    container = found.body["spec"]["template"]["spec"]["containers"][0]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def test_a_pool_without_a_store_keeps_everything_in_the_pod() -> None:
    found = child()
    assert "volumeClaimTemplates" not in found.body["spec"]
    assert "store" not in volumes(found)
    assert FOLDER_VARIABLE not in told(found)
    assert differences(found.body["spec"], child(store={}).body["spec"]) == []


def test_each_pod_gets_a_claim_of_its_own() -> None:
    found = child(store=TEMPLATE)
    (template,) = found.body["spec"]["volumeClaimTemplates"]
    assert template["metadata"]["name"] == "store"
    assert template["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "2Gi"}},
        "storageClassName": "none-here",
    }
    assert "store" not in volumes(found), "the StatefulSet adds it"
    assert told(found)[FOLDER_VARIABLE] == mounts(found)["store"]["mountPath"]
    assert "subPathExpr" not in mounts(found)["store"]


@pytest.mark.parametrize(
    ("store", "volume"),
    [
        ({"persistentVolumeClaim": {"claimName": "all"}}, {"persistentVolumeClaim": {"claimName": "all"}}),
        ({"path": "/srv/omni"}, {"hostPath": {"path": "/srv/omni", "type": "DirectoryOrCreate"}}),
    ],
)
def test_in_a_volume_that_pods_share_each_has_a_folder_of_its_own(store: Any, volume: Any) -> None:
    found = child(store=store)
    assert volumes(found)["store"] == {"name": "store", **volume}
    mount = mounts(found)["store"]
    assert mount["subPathExpr"] == "$(OMNI_POD_NAMESPACE)/$(OMNI_POD_NAME)"
    names = [variable["name"] for variable in found.body["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert {"OMNI_POD_NAMESPACE", "OMNI_POD_NAME"} <= set(names)
    assert told(found)[FOLDER_VARIABLE] == mount["mountPath"]


def test_published_stores_are_read_only_where_the_agent_looks() -> None:
    published = [
        {"name": "a", "persistentVolumeClaim": {"claimName": "catalogue"}},
        {"name": "b", "image": {"reference": "registry.example.org/catalogue:1", "pullPolicy": "Always"}},
        {"name": "c", "path": "/srv/catalogue"},
    ]
    found = child(store={"published": published})
    there = volumes(found)
    assert there["published-a"]["persistentVolumeClaim"] == {"claimName": "catalogue", "readOnly": True}
    assert there["published-b"]["image"] == {"reference": "registry.example.org/catalogue:1", "pullPolicy": "Always"}
    assert there["published-c"]["hostPath"] == {"path": "/srv/catalogue", "type": "Directory"}
    store = OmniPool.model_validate(
        {"metadata": {"name": "gpu"}, "spec": {"store": {"published": published}}}
    ).spec.store
    assert store is not None
    for item in store.published:
        mount = mounts(found)[f"published-{item.name}"]
        assert (mount["mountPath"], mount["readOnly"]) == (item.folder, True)
    assert FOLDER_VARIABLE not in told(found), "what is missing there is published into the pod"


def test_volumes_of_models_are_where_their_processes_look() -> None:
    listed = [
        {"name": "a", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "b", "persistentVolumeClaim": {"claimName": "notes"}, "readOnly": False},
        {"name": "c", "image": {"reference": "registry.example.org/voices:1"}},
        {"name": "d", "path": "/srv/models"},
    ]
    found = child(volumes=listed)
    there = volumes(found)
    assert there["volume-a"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert there["volume-b"]["persistentVolumeClaim"] == {"claimName": "notes"}
    assert there["volume-c"]["image"] == {"reference": "registry.example.org/voices:1", "pullPolicy": "IfNotPresent"}
    assert there["volume-d"]["hostPath"] == {"path": "/srv/models", "type": "Directory"}
    pool = OmniPool.model_validate({"metadata": {"name": "gpu", "namespace": "default"}, "spec": {"volumes": listed}})
    for volume in pool.spec.volumes:
        mount = mounts(found)[f"volume-{volume.name}"]
        assert mount.get("readOnly", False) == volume.read_only
        source = {"volume": {"name": volume.name, "subPath": "en/one.txt"}}
        process = render(OmniModel.model_validate(model(source=source)), pool).spec
        assert process.source == {"volume": {**source["volume"], "path": f"{mount['mountPath']}/en/one.txt"}}


@pytest.mark.parametrize(
    ("said", "now", "stalled"),
    [
        pytest.param("pod has unbound immediate PersistentVolumeClaims", 2.0, False, id="its volume is being made"),
        pytest.param("pod has unbound immediate PersistentVolumeClaims", 61.0, True, id="nobody makes its volume"),
        pytest.param('persistentvolumeclaim "stores" not found', 2.0, True, id="it is not there"),
    ],
)
def test_a_claim_has_time_to_be_bound(said: str, now: float, stalled: bool) -> None:
    conditions = [{"type": "PodScheduled", "status": "False", "message": said}]
    item = {"metadata": {"name": "gpu-0", "uid": "u"}, "status": {"phase": "Pending", "conditions": conditions}}
    pod = PodView("gpu-0", 0, item, {}, heard_seconds=None, away_seconds=0.0)
    found, by_hand = problem_of(pod, now) or (None, None)
    assert found is not None
    assert (found.reason, by_hand) == ("ClaimNotFound", stalled)


@pytest.mark.cluster_api
async def test_the_claim_of_a_pod_stays_when_the_pod_goes_and_nothing_is_applied_twice(
    world: World, agents: Agents, start
) -> None:
    await start()
    await world.apply(pool("gpu", world.namespace, replicas=2, store=TEMPLATE))
    await until(lambda: is_ready(world.see(POOLS, "gpu")), "the pool is Ready")
    claims = {item["metadata"]["name"]: item["metadata"]["uid"] for item in (await listed(world))}
    assert set(claims) == {"store-gpu-0", "store-gpu-1"}
    generation = world.see(STATEFUL_SETS, "gpu")["metadata"]["generation"]
    before = world.see(PODS, "gpu-0")["metadata"]["uid"]
    await world.kube.delete(PODS, "gpu-0", world.namespace, grace_seconds=0)

    def is_new() -> bool:
        pod = world.see(PODS, "gpu-0")
        return pod is not None and pod["metadata"]["uid"] != before

    await until(is_new, "another pod of that name")
    pod = world.see(PODS, "gpu-0")
    store = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "store")
    assert store["persistentVolumeClaim"]["claimName"] == "store-gpu-0"
    assert {item["metadata"]["name"]: item["metadata"]["uid"] for item in (await listed(world))} == claims
    assert world.see(STATEFUL_SETS, "gpu")["metadata"]["generation"] == generation


async def listed(world: World) -> list[Any]:
    return list((await world.kube.list(CLAIMS, world.namespace)).items)


@pytest.mark.cluster_api
@pytest.mark.parametrize(
    "store", [None, {"path": "/srv/omni"}, {"volumeClaimTemplate": {"size": "3Gi", "storageClassName": "none-here"}}]
)
async def test_the_claims_of_a_pool_cannot_be_changed_and_the_refusal_says_what_to_do(world: World, store: Any) -> None:
    await world.apply(pool("gpu", world.namespace, store=TEMPLATE))
    with pytest.raises(KubeError, match="make a pool of another name") as caught:
        await world.apply(pool("gpu", world.namespace, **({} if store is None else {"store": store})))
    assert caught.value.invalid
    await world.apply(pool("gpu", world.namespace, replicas=2, store=TEMPLATE))
    await world.apply(pool("other", world.namespace))
    with pytest.raises(KubeError, match="make a pool of another name"):
        await world.apply(pool("other", world.namespace, store=TEMPLATE))
