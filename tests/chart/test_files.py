"""What the chart's files must be, whoever renders them."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import yaml

from chart.chart import CHART, ROOT

TEMPLATES = sorted((CHART / "templates").rglob("*.*"))


def test_the_crds_are_those_of_the_repository() -> None:
    copies = CHART / "files" / "crds"
    originals = {path.name: path.read_text() for path in (ROOT / "crds").iterdir()}
    assert {path.name: path.read_text() for path in copies.iterdir()} == originals, "run `make generate`"


def test_nothing_in_it_changes_from_one_rendering_to_the_next() -> None:
    for path in TEMPLATES:
        text = path.read_text()
        assert not re.search(
            r"\b(lookup|rand\w+|now|date|uuidv4|gen(CA|SelfSigned|Signed|PrivateKey)\w*|htpasswd)\b *[\"(.$]", text
        ), path


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def known(node: dict[str, Any], path: str = "") -> set[str]:
        found = {path} if path else set()
        if node.get("additionalProperties") is False:
            for name, child in node["properties"].items():
                found |= known(child, f"{path}.{name}")
        return found

    def given(node: Any, path: str = "", schemas: set[str] = frozenset()) -> set[str]:
        found = {path} if path else set()
        if isinstance(node, dict):
            for name, child in node.items():
                if f"{path}.{name}" in schemas:
                    found |= given(child, f"{path}.{name}", schemas)
        return found

    described = known(schema)
    assert given(values, "", described) == described - {".global"}


def test_every_value_has_a_sentence() -> None:
    def without(node: dict[str, Any], path: str) -> list[str]:
        found = [] if node.get("description") else [path]
        for name, child in node.get("properties", {}).items():
            found += without(child, f"{path}.{name}")
        return found

    schema = json.loads((CHART / "values.schema.json").read_text())
    for name, child in schema["properties"].items():
        assert without(child, name) == []
