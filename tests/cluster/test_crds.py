"""The CRDs on a real API server: columns, scaling, status apart from spec, entries by owner, applying twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.builders import MODEL, POOL, model
from cluster.connection import Connection
from cluster.server import APPLY, MERGE, Answer, Server, path_of
from omnimodel.api import API_VERSION, OmniModel, OmniPool, parse
from omnimodel.render import render_process

pytestmark = pytest.mark.cluster_api

ROOT = Path(__file__).parents[2]
CATALOG = ROOT / "examples" / "catalog"


def entry(pod: str, **fields: Any) -> dict[str, Any]:
    """What one pod says about a model."""
    return {"pod": pod, "tier": "resident", "wakes": 2, **fields}


def apply_status(server: Server, namespace: str, manager: str, status: dict[str, Any], **query: str) -> Answer:
    """Server-side apply of a part of the model's status."""
    body = {"apiVersion": API_VERSION, "kind": "OmniModel", "metadata": {"name": "tiny"}, "status": status}
    path = path_of("OmniModel", namespace, "tiny", "status")
    return server.ask("PATCH", path, body, APPLY, fieldManager=manager, **query)


def generation(answer: Answer) -> int:
    return int(answer.body["metadata"]["generation"])


def test_kubectl_prints_the_columns_of_a_model(api_cluster: Connection, server: Server, namespace: str) -> None:
    server.create(MODEL, namespace)
    status = {
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}],
        "residency": [entry("default-0")],
        "footprint": {"weightsBytes": 1048576},
    }
    assert apply_status(server, namespace, "test", status).ok
    head, row = (line.split() for line in api_cluster.kubectl("get", "omnimodels", "-n", namespace).splitlines())
    assert head == ["NAME", "READY", "TIER", "SIZE", "POOL", "WAKES", "AGE"]
    assert dict(zip([name for name in head if name != "POOL"], row, strict=True)) | {"AGE": ""} == {
        "NAME": "tiny", "READY": "True", "TIER": "resident", "SIZE": "1048576", "WAKES": "2", "AGE": "",
    }  # fmt: skip


def test_kubectl_prints_the_columns_of_a_pool(api_cluster: Connection, server: Server, namespace: str) -> None:
    server.create(POOL, namespace)
    head = api_cluster.kubectl("get", "opool", "-n", namespace).splitlines()[0].split()
    assert head == ["NAME", "READY", "DEVICES", "BUDGET", "OVERCOMMIT", "RESIDENT", "AGE"]


def test_everything_of_ours_is_one_category(api_cluster: Connection, server: Server, namespace: str) -> None:
    server.create(MODEL, namespace)
    server.create(POOL, namespace)
    names = api_cluster.kubectl("get", "omni", "-n", namespace, "-o", "name").split()
    assert names == ["omnimodel.omnimodel.io/tiny", "omnipool.omnimodel.io/default"]


def test_kubectl_scales_a_pool(api_cluster: Connection, server: Server, namespace: str) -> None:
    server.create({**POOL, "spec": {"replicas": 1}}, namespace)
    selected = {"replicas": 1, "selector": "omnimodel.io/pool=default"}
    path = path_of("OmniPool", namespace, "default", "status")
    assert server.ask("PATCH", path, {"status": selected}, MERGE).ok
    api_cluster.kubectl("scale", "omnipool/default", "--replicas=3", "-n", namespace)
    scale = server.ask("GET", path_of("OmniPool", namespace, "default", "scale")).body
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 1, "selector": "omnimodel.io/pool=default"}


def test_whoever_writes_the_spec_cannot_write_the_status_nor_the_other_way_round(
    server: Server, namespace: str
) -> None:
    made = server.create({**MODEL, "status": {"observedGeneration": 7}}, namespace)
    assert made.body["status"] == {"observedGeneration": -1}
    both = {"spec": {"suspend": True}, "status": {"observedGeneration": 1}}
    path = path_of("OmniModel", namespace, "tiny")
    told = server.ask("PATCH", f"{path}/status", both, MERGE)
    assert told.body["status"] == {"observedGeneration": 1}
    assert "suspend" not in told.body["spec"]
    assert generation(told) == 1
    wanted = server.ask("PATCH", path, {**both, "status": {"observedGeneration": 9}}, MERGE)
    assert wanted.body["spec"]["suspend"] is True
    assert wanted.body["status"] == {"observedGeneration": 1}
    assert generation(wanted) == 2


def test_each_pod_owns_its_entry_and_only_that(server: Server, namespace: str) -> None:
    server.create(MODEL, namespace)
    for pod in ("default-0", "default-1"):
        assert apply_status(server, namespace, f"omni-agent.{pod}", {"residency": [entry(pod)]}).ok
    foreign = apply_status(server, namespace, "omni-agent.default-0", {"residency": [entry("default-1", wakes=9)]})
    assert foreign.status == 409
    assert "omni-agent.default-1" in foreign.body["message"]
    gone = apply_status(server, namespace, "omni-agent.default-0", {"residency": []})
    assert gone.body["status"]["residency"] == [entry("default-1")]


def test_the_operator_and_an_agent_write_one_status_without_conflict(server: Server, namespace: str) -> None:
    server.create(MODEL, namespace)
    ready = [{"type": "Ready", "status": "True", "reason": "Serving"}]
    assert apply_status(server, namespace, "omni-agent.default-0", {"residency": [entry("default-0")]}).ok
    told = apply_status(server, namespace, "omni-operator", {"observedGeneration": 1, "conditions": ready})
    assert told.body["status"] == {
        "observedGeneration": 1, "conditions": ready, "residency": [entry("default-0")],
    }  # fmt: skip


def test_the_same_entry_twice_changes_nothing(server: Server, namespace: str) -> None:
    server.create(MODEL, namespace)
    versions = [
        apply_status(server, namespace, "omni-agent.default-0", {"residency": [entry("default-0")]}).body["metadata"]
        for _ in range(2)
    ]
    assert versions[0]["resourceVersion"] == versions[1]["resourceVersion"]


def test_a_pod_with_two_entries_is_refused(server: Server, namespace: str) -> None:
    server.create(MODEL, namespace)
    assert not apply_status(server, namespace, "test", {"residency": [entry("a"), entry("a")]}).ok


@pytest.mark.parametrize("how", [[], ["--server-side"]], ids=["client-side", "server-side"])
def test_the_catalogue_applied_twice_changes_nothing(api_cluster: Connection, namespace: str, how: list[str]) -> None:
    command = ["apply", *how, "-n", namespace, "-f", str(CATALOG)]
    files = len(list(CATALOG.glob("*.yaml")))
    first = api_cluster.kubectl(*command).splitlines()
    assert len(first) == files
    api_cluster.kubectl(*command)  # with no operator here, the next write stores the default of the status
    before = versions(api_cluster, namespace)
    second = api_cluster.kubectl(*command).splitlines()
    assert all(line.endswith("serverside-applied" if how else "unchanged") for line in second)
    assert versions(api_cluster, namespace) == before
    assert api_cluster.kubectl("diff", *how, "-n", namespace, "-f", str(CATALOG)) == ""


def versions(cluster: Connection, namespace: str) -> dict[str, str]:
    """The resource version of everything of ours, by name."""
    items = cluster.get("omni", "-n", namespace)["items"]
    return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in items}


def test_what_is_stored_of_the_catalogue_is_what_the_files_say(server: Server) -> None:
    for path in CATALOG.glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            answer = server.try_create(document, "default")
            assert answer.ok, (path.name, answer.sentences)
            assert answer.body["spec"] == json.loads(json.dumps(document["spec"])), path.name
            assert parse(dict(answer.body)).to_dict()["spec"] == document["spec"], path.name


def test_a_rendered_process_is_stored_whole(server: Server) -> None:
    pool = OmniPool.model_validate(POOL)
    for path in CATALOG.glob("*.yaml"):
        resource = parse(yaml.safe_load(path.read_text()))
        if isinstance(resource, OmniModel):
            process = render_process(resource, pool)
            document = json.loads(json.dumps(process.to_dict()))
            answer = server.try_create(document, "default")
            assert answer.ok, (path.name, answer.sentences)
            assert answer.body["spec"] == document["spec"], path.name


def test_a_definition_applied_twice_is_unchanged(api_cluster: Connection) -> None:
    command = ["apply", "-f", str(ROOT / "crds")]
    api_cluster.kubectl(*command)
    assert [line.split()[-1] for line in api_cluster.kubectl(*command).splitlines()] == ["unchanged"] * 3


def test_a_definition_is_established_without_complaints(api_cluster: Connection) -> None:
    for item in api_cluster.get("crds")["items"]:
        if item["spec"]["group"] == "omnimodel.io":
            conditions = {one["type"]: one["status"] for one in item["status"]["conditions"]}
            assert conditions["Established"] == "True"
            assert conditions["NamesAccepted"] == "True"
            assert conditions.get("NonStructuralSchema", "False") == "False"


def test_an_edit_of_a_model_in_use_is_checked_like_a_new_one(server: Server, namespace: str) -> None:
    server.create(model(residency={"idleAfter": "5m"}), namespace)
    path = path_of("OmniModel", namespace, "tiny")
    refused = server.ask("PATCH", path, {"spec": {"residency": {"keepResident": True}}}, MERGE)
    assert refused.sentences == [
        "spec.residency.idleAfter: keepResident and idleAfter exclude each other; remove idleAfter, or keepResident"
    ]
