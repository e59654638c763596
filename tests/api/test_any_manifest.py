"""Whatever stands in a manifest, what comes back is a resource or sentences of ours, never a library's words."""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.builders import API_VERSION
from omnimodel.api import OmniModel, OmniPool, parse, reference, validate
from omnimodel.api.tree import paths

FULL: dict[str, Any] = {
    **yaml.safe_load(reference.EXAMPLE),
    "status": {"conditions": [{"type": "Ready", "status": "True"}], "residency": [{"pod": "a"}]},
}
NAMES = sorted(
    {name for kind in (OmniModel, OmniPool) for path in paths(kind) for name in path} | {"ttl", "idle_after", "x"}
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(
            ["24Gi", "80%", "auto", "never", "5m", "python", "{port}", "../x", "/a/../b", "--port 80", "{{ x", "a\0b"]
        ),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)),
    max_leaves=8,
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every path of a document but its root."""
    found: list[tuple[str | int, ...]] = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += places(child, (*path, key))
    return found


def sound(document: Any) -> None:
    resource, errors = validate(document)
    assert (resource is None) == bool(errors)
    for error in errors:
        assert error.problem
        assert error.cure
        assert "Input should" not in str(error)
        assert "pydantic" not in str(error)
        assert "\n" not in str(error)
    if resource is not None:
        assert parse(json.loads(json.dumps(resource.to_dict()))) == resource


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_right_manifest_with_anything_anywhere(data: st.DataObject) -> None:
    document = copy.deepcopy(FULL)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(document)))
        target: Any = document
        for element in path[:-1]:
            target = target[element]
        if isinstance(target, dict) and data.draw(st.booleans()):
            target[data.draw(st.sampled_from(NAMES))] = data.draw(VALUES)
        else:
            target[path[-1]] = data.draw(VALUES)
    sound(document)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["OmniModel", "OmniPool", "OmniProcess"]), VALUES, VALUES)
def test_any_spec_of_any_kind(kind: str, spec: Any, metadata: Any) -> None:
    sound({"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "a"}, "spec": spec})
    sound({"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec})
    sound(spec)
