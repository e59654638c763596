"""Whatever manifest offline validation takes, the API server takes, keeps whole, and gives back unchanged."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.builders import MODEL, POOL
from api.test_any_manifest import FULL, VALUES, places
from cluster.server import Server
from omnimodel.api import OmniModel, OmniPool, parse, validate

pytestmark = pytest.mark.cluster_api

# No function-scoped state is kept between examples: everything is a dry run.
SETTINGS = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
FULL_MODEL: dict[str, Any] = {
    **FULL,
    "spec": {
        **FULL["spec"],
        "description": "tells whether a text is glad",
        "suspend": False,
        "pool": "gpu",
        "replicas": {"min": 2, "max": 2},
        "affinity": {"together": ["speech"], "apart": ["large"]},
        "capabilities": ["glad"],
        "metadata": {"team": "search", "cost": {"centre": 7}},
        "mounts": [
            {"name": "code", "source": {"configMap": {"name": "code"}}, "path": "/code"},
            {"name": "key", "source": {"secret": {"name": "key"}}, "path": "/key"},
            {"name": "voices", "source": {"volume": {"name": "c", "subPath": "en"}}, "path": "/voices"},
        ],
    },
}
FULL_POOL: dict[str, Any] = {
    **POOL,
    "spec": {
        "replicas": 2,
        "device": {"type": "cpu", "count": 1, "memory": "512Mi", "frameSize": "16Mi"},
        "hostMemory": "50%",
        "overcommit": {"limit": 8},
        "isolation": {"level": "landlock"},
        "location": {"region": "eu", "zone": "eu-1"},
        "volumes": [
            {"name": "a", "path": "/srv/a"},
            {"name": "b", "persistentVolumeClaim": {"claimName": "b"}, "readOnly": False},
            {"name": "c", "image": {"reference": "registry.example.org/voices:1", "pullPolicy": "Always"}},
        ],
        "pod": {
            "nodeSelector": {"gpu": "l4"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "resources": {"cpu": 0.5, "memory": "8Gi"},
        },
        "updateStrategy": {"type": "RollingUpdate", "maxUnavailable": 2},
        "sources": {
            "packageIndex": "https://packages.example.org/simple",
            "extraPackageIndexes": ["https://wheels.example.org/simple"],
            "hubEndpoint": "https://hub.example.org",
            "proxy": {"https": "http://proxy.example.org:3128", "noProxy": [".example.org"]},
            "certificates": {"configMapKeyRef": {"name": "authorities", "key": "ca.crt"}},
            "netrc": {"secretKeyRef": {"name": "fetching", "key": "netrc"}},
            "hubToken": {"secretKeyRef": {"name": "fetching", "key": "token"}},
        },
        "store": {
            "volumeClaimTemplate": {"size": "100Gi", "storageClassName": "fast"},
            "published": [
                {"name": "a", "persistentVolumeClaim": {"claimName": "a"}},
                {"name": "b", "image": {"reference": "registry.example.org/catalogue:1"}},
                {"name": "c", "path": "/srv/c"},
            ],
        },
    },
}
NEAR = st.one_of(
    VALUES,
    st.sampled_from([0, 1, 2, 0.5, 1.5, 1000, 2**31, 2**53, True, False, "", "1", "0", "1Mi", "1.5Gi", "1e3", "100m", "0s", "1h30m", "never", "auto", "100%", "a", "A", "a-b", "/a", "a/b", "cpu", "warm", "cold", [], {}, ["a"], {"a": "b"}]),
)  # fmt: skip


@st.composite
def edited(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """The document with a few values replaced, left out or added."""
    result = {key: copy.deepcopy(value) for key, value in document.items() if key != "status"}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(result) if path[0] == "spec"]))
        target: Any = result
        for element in path[:-1]:
            target = target[element]
        if isinstance(target, dict) and draw(st.integers(0, 3)) == 0:
            target.pop(path[-1])
            if path == ("spec",):
                break
        else:
            target[path[-1]] = copy.deepcopy(draw(NEAR))  # or one that is drawn twice may come to lie within itself
    return result


def exact(value: Any) -> bool:
    """Whether JSON of the API server holds it as it is: its integers have 64 bits, and its texts are UTF-8."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        return False
    if isinstance(value, dict):
        return all(exact(key) and exact(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(exact, value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1e16 and 10000000000000000 are one number, true and 1 are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return type(one) in (int, float) and type(other) in (int, float) and float(one) == float(other)
    return type(one) is type(other) and bool(one == other)


def both_take_it(document: dict[str, Any], server: Server) -> None:
    resource, _ = validate(document)
    answer = server.try_create(document, "default")
    if resource is None:
        return  # the schema cannot say everything: see test_crd_rules
    assert answer.ok, answer.sentences
    assert same(answer.body.get("spec", {}), document.get("spec", {}))
    assert same(parse(dict(answer.body)).to_dict().get("spec"), resource.to_dict().get("spec"))


@SETTINGS
@given(edited(FULL_MODEL).filter(exact))
def test_a_model(server: Server, document: dict[str, Any]) -> None:
    both_take_it(document, server)


@SETTINGS
@given(edited(MODEL).filter(exact))
def test_a_small_model(server: Server, document: dict[str, Any]) -> None:
    both_take_it(document, server)


@SETTINGS
@given(edited(FULL_POOL).filter(exact))
def test_a_pool(server: Server, document: dict[str, Any]) -> None:
    both_take_it(document, server)


@pytest.mark.parametrize(
    ("document", "kind", "lacks"),
    [
        pytest.param(FULL_MODEL, OmniModel, set(), id="a model"),
        pytest.param(FULL_POOL, OmniPool, {"autoscale"}, id="a pool"),  # excludes replicas
    ],
)
def test_the_starting_points_are_right_and_whole(
    server: Server, document: dict[str, Any], kind: type[OmniModel | OmniPool], lacks: set[str]
) -> None:
    plain = {key: value for key, value in document.items() if key != "status"}
    assert isinstance(parse(plain), kind)
    both_take_it(plain, server)
    spec = kind.model_fields["spec"].annotation
    assert spec is not None
    assert {field.alias or name for name, field in spec.model_fields.items()} - plain["spec"].keys() == lacks
