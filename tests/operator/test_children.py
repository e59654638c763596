"""What is rendered for a pool."""

from __future__ import annotations

from typing import Any

import pytest

from omnimodel.api import OmniPool
from omnimodel.controllers.kubernetes_children import AgentSettings, build_stateful_set, differences


def pod_of(settings: AgentSettings | None = None, **spec: Any) -> dict[str, Any]:
    pool = OmniPool.model_validate({"metadata": {"name": "default", "uid": "u"}, "spec": spec})
    found: dict[str, Any] = build_stateful_set(pool, settings or AgentSettings(), 1).body["spec"]["template"]["spec"]
    return found


def test_what_sources_refer_to_is_one_folder_of_the_pod() -> None:
    pod = pod_of(
        sources={
            "packageIndex": "https://packages.example.org/simple",
            "certificates": {"configMapKeyRef": {"name": "authorities", "key": "bundle.pem"}},
            "netrc": {"secretKeyRef": {"name": "fetching", "key": "netrc"}},
        }
    )
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "sources")
    assert volume["projected"]["sources"] == [
        {"configMap": {"name": "authorities", "items": [{"key": "bundle.pem", "path": "ca.crt"}], "optional": True}},
        {"secret": {"name": "fetching", "items": [{"key": "netrc", "path": "netrc"}], "optional": True}},
    ]
    container = pod["containers"][0]
    mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "sources")
    assert mount["readOnly"]
    assert {"name": "OMNI_SOURCES_DIR", "value": mount["mountPath"]} in container["env"]


def test_where_things_come_from_makes_no_other_pods() -> None:
    """The agent reads it from its pool: pods are not replaced for it."""
    plain, named = pod_of(), pod_of(sources={"packageIndex": "https://packages.example.org/simple"})
    assert differences(plain, named) == differences(named, plain) == []


@pytest.mark.parametrize(
    ("spec", "requests"),
    [
        pytest.param({}, {"cpu": "500m"}, id="nothing is said"),
        pytest.param({"device": {"type": "cuda", "count": 4}}, {"cpu": "2", "nvidia.com/gpu": "4"}, id="four devices"),
        pytest.param({"pod": {"resources": {"cpu": 8}}}, {"cpu": "8"}, id="cores are said"),
        pytest.param({"pod": {"resources": {"memory": "8Gi"}}}, {"cpu": "500m", "memory": "8Gi"}, id="memory is said"),
    ],
)
def test_a_pod_is_sure_of_some_processor_time(spec: dict[str, Any], requests: dict[str, str]) -> None:
    resources = pod_of(**spec)["containers"][0]["resources"]
    assert resources["requests"] == requests
    assert "cpu" not in resources.get("limits", {})


def test_the_token_is_a_file_that_the_agent_is_told_of() -> None:
    pod = pod_of(AgentSettings(token_secret="omnimodel-agents"))
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "token")
    assert volume["secret"]["secretName"] == "omnimodel-agents"
    assert "optional" not in volume["secret"], "a pod without it would answer nobody"
    container = pod["containers"][0]
    mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "token")
    (item,) = volume["secret"]["items"]
    assert {"name": "OMNI_TOKEN_FILE", "value": f"{mount['mountPath']}/{item['path']}"} in container["env"]
