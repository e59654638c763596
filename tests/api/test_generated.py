"""CRDs and manifest reference: made from the models, small, structural, and with the sentences of offline validation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnimodel.api import KINDS, Metadata, OmniModel, OmniPool, Part, crd, parse, reference
from omnimodel.api.tree import fields, shape

ROOT = Path(__file__).parents[2]
CRDS = {name: yaml.safe_load(text) for name, text in crd.generate().items()}


def schemas(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema node of a CRD with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from schemas(node[key], f"{path}[]")


def root(definition: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def parts(part: type[Part], path: str) -> Iterator[tuple[str, type[Part]]]:
    yield path, part
    for name, info in fields(part).items():
        form = shape(info.annotation)
        for child in form.parts:
            yield from parts(child, f"{path}.{name}{'[]' if form.container else ''}")


def test_the_files_are_what_the_models_say() -> None:
    for name, text in crd.generate().items():
        assert (ROOT / "crds" / name).read_text(encoding="utf-8") == text, "run `make generate`"
    assert sorted(path.name for path in (ROOT / "crds").glob("*.yaml")) == sorted(CRDS)


def test_the_reference_is_what_the_models_say() -> None:
    assert (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8") == reference.generate(), "run `make generate`"


def test_the_example_of_the_reference_is_a_right_manifest() -> None:
    assert isinstance(parse(yaml.safe_load(reference.EXAMPLE)), OmniModel)


@pytest.mark.parametrize("name", sorted(CRDS))
def test_a_crd_fits_the_annotation_that_kubectl_keeps_it_in(name: str) -> None:
    assert len((ROOT / "crds" / name).read_bytes()) < crd.SIZE_LIMIT_BYTES


@pytest.mark.parametrize("name", sorted(CRDS))
def test_a_crd_is_structural(name: str) -> None:
    for path, node in schemas(root(CRDS[name])):
        typed = (
            "type" in node or node.get("x-kubernetes-int-or-string") or node.get("x-kubernetes-preserve-unknown-fields")
        )
        assert typed, path
        assert not {"$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "title", "uniqueItems"} & set(node), path
        assert not isinstance(node.get("additionalProperties"), bool), path
        assert not isinstance(node.get("exclusiveMinimum"), float), path
        assert node.get("type") != "array" or "maxItems" in node, path
        assert "additionalProperties" not in node or "maxProperties" in node, path


def test_nothing_has_a_default_but_the_status_that_nobody_wrote_yet() -> None:
    found = {(n, path): node["default"] for n in CRDS for path, node in schemas(root(CRDS[n])) if "default" in node}
    unseen = {"observedGeneration": -1}  # kstatus takes an object without it for done
    assert found == {("omnimodels.yaml", ".status"): unseen, ("omnipools.yaml", ".status"): unseen}


@pytest.mark.parametrize("name", sorted(CRDS))
def test_what_a_rule_looks_at_is_bounded_so_that_its_cost_is(name: str) -> None:
    for path, node in schemas(root(CRDS[name])):
        rules = node.get("x-kubernetes-validations", [])
        if rules and node.get("type") == "string":
            assert "maxLength" in node, path
        for rule in rules:
            assert len(rule["message"]) <= 2048, path
            assert "\n" not in rule["message"], path


@pytest.mark.parametrize("kind", [OmniModel, OmniPool], ids=lambda kind: kind.__name__)
def test_the_api_server_refuses_with_the_sentences_of_offline_validation(kind: type[OmniModel | OmniPool]) -> None:
    said = {
        rule["message"] for _, node in schemas(root(CRDS[f"{kind.plural}.yaml"])) for rule in node.get("x-kubernetes-validations", [])
    }  # fmt: skip
    unions = {
        "spec.runtime.env[]",
        "spec.mounts[].source",
        "spec.servedNames[]",
        "spec.probe.form[]",
        "spec.runtime.handler",
    }
    spec = shape(fields(kind)["spec"].annotation).parts[0]
    rules = 0
    for path, part in parts(spec, "spec"):
        for rule in part.rules:
            if rule.cel and rule.holds and not any(path.startswith(union) for union in unions):
                assert f"{rule.problem}; {rule.cure}" in said, path
                rules += 1
    assert rules > 2


def test_the_columns_that_kubectl_prints() -> None:
    printed = {
        name: [
            column["name"]
            for column in definition["spec"]["versions"][0]["additionalPrinterColumns"]
            if not column.get("priority")
        ]
        for name, definition in CRDS.items()
    }
    assert printed["omnimodels.yaml"] == ["READY", "TIER", "SIZE", "POOL", "WAKES", "AGE"]
    assert printed["omnipools.yaml"] == ["READY", "DEVICES", "BUDGET", "OVERCOMMIT", "RESIDENT", "AGE"]


def test_status_and_scale_are_subresources_with_paths_that_exist() -> None:
    for definition in CRDS.values():
        version = definition["spec"]["versions"][0]
        assert version["subresources"]["status"] == {}
    scale = CRDS["omnipools.yaml"]["spec"]["versions"][0]["subresources"]["scale"]
    known = dict(schemas(root(CRDS["omnipools.yaml"])))
    for path in scale.values():
        assert path in known


def test_entries_of_a_status_are_merged_by_their_key() -> None:
    known = dict(schemas(root(CRDS["omnimodels.yaml"])))
    for path, key in ((".status.residency", "pod"), (".status.conditions", "type"), (".spec.mounts", "name")):
        assert known[path]["x-kubernetes-list-type"] == "map"
        assert known[path]["x-kubernetes-list-map-keys"] == [key]
        assert key in known[path]["items"]["required"]


def test_rules_point_at_fields_that_exist() -> None:
    for definition in CRDS.values():
        known = dict(schemas(root(definition)))
        for path, node in schemas(root(definition)):
            for rule in node.get("x-kubernetes-validations", []):
                where = rule.get("fieldPath", "")
                assert f"{path}{where}" in known


def test_every_field_that_a_person_writes_has_a_sentence_and_an_example() -> None:
    for kind in (OmniModel, OmniPool):
        for section in ("spec", "status"):
            for path, part in parts(shape(fields(kind)[section].annotation).parts[0], section):
                for name, info in fields(part).items():
                    assert info.description, f"{kind.__name__} {path}.{name}"
                    assert info.description.endswith("."), f"{kind.__name__} {path}.{name}"
                    assert info.examples, f"{kind.__name__} {path}.{name}"
    assert Metadata.model_fields["name"].examples


def test_examples_of_fields_are_right() -> None:
    base = {"apiVersion": "omnimodel.io/v1alpha1", "metadata": {"name": "example"}}
    spec = {
        name: info.examples[0]
        for name, info in fields(shape(fields(OmniModel)["spec"].annotation).parts[0]).items()
        if info.examples and name != "suspend"
    }
    parse({**base, "kind": "OmniModel", "spec": spec})
    pool = {
        name: info.examples[0]
        for name, info in fields(shape(fields(OmniPool)["spec"].annotation).parts[0]).items()
        if info.examples and name != "autoscale"
    }
    parse({**base, "kind": "OmniPool", "spec": pool})


def test_every_kind_has_a_definition() -> None:
    assert {definition["spec"]["names"]["kind"] for definition in CRDS.values()} == set(KINDS)
    for definition in CRDS.values():
        assert re.fullmatch(r"[a-z]+\.omnimodel\.io", definition["metadata"]["name"])
