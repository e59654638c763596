"""CustomResourceDefinitions made from the pydantic models.

Structural schemas: references inlined, null dropped, quantities as int-or-string, rules across fields as CEL with the
sentences of offline validation, and no defaults in a spec, for GitOps tools take a defaulted field for a change. Where
a value is a text or an object, Kubernetes can only preserve it; the operator checks it and says so in a condition.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from omnimodel.api.fields import LABEL_PATTERN, Checked, cel
from omnimodel.api.meta import GROUP, VERSION, Part, Resource
from omnimodel.api.model import OmniModel
from omnimodel.api.owned import argument_rules
from omnimodel.api.pool import OmniPool
from omnimodel.api.process import OmniProcess
from omnimodel.api.runtime import Runtime
from omnimodel.api.tree import fields

SIZE_LIMIT_BYTES = 262_144  # of an annotation, which is where `kubectl apply` keeps a whole object
# Raise it with every change of a schema that controllers or agents rely on: they refuse to work with an older one.
SCHEMA_VERSION = 1
SCHEMA_LABEL = f"{GROUP}/schema-version"
MAX_ITEMS = 1024
MAX_PROPERTIES = 256
_PRESERVE = {"x-kubernetes-preserve-unknown-fields": True}
_SHORT_NAMES = {OmniModel: ["om"], OmniPool: ["opool"], OmniProcess: ["oproc"]}
# Lists that are maps: entries are merged by key, and a second one of the same key is refused.
_LIST_KEYS = {
    "conditions": "type",
    **dict.fromkeys(("residency", "pods"), "pod"),
    **dict.fromkeys(("mounts", "volumes", "published"), "name"),
}
_READY = '.status.conditions[?(@.type=="Ready")].status'

Columns = list[tuple[str, str, str, int]]  # name, type, path, priority
_COLUMNS: dict[type[Resource], Columns] = {
    OmniModel: [
        ("READY", "string", _READY, 0),
        ("TIER", "string", ".status.residency[*].tier", 0),
        ("SIZE", "integer", ".status.footprint.weightsBytes", 0),
        ("POOL", "string", ".spec.pool", 0),
        ("WAKES", "integer", ".status.residency[*].wakes", 0),
        ("ENGINE", "string", ".spec.runtime.engine", 1),
        ("REASON", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
        ("AGE", "date", ".metadata.creationTimestamp", 0),
    ],
    OmniPool: [
        ("READY", "string", _READY, 0),
        ("DEVICES", "integer", ".status.devices", 0),
        ("BUDGET", "integer", ".status.budgetBytes", 0),
        ("OVERCOMMIT", "number", ".status.overcommitRatio", 0),
        ("RESIDENT", "integer", ".status.residentBytes", 0),
        ("ISOLATION", "string", ".status.isolation.level", 1),
        ("AGE", "date", ".metadata.creationTimestamp", 0),
    ],
    OmniProcess: [
        ("STATE", "string", ".status.state", 0),
        ("ENGINE", "string", ".spec.engine", 0),
        ("TASK", "string", ".spec.task", 0),
        ("POOL", "string", ".spec.pool", 0),
        ("AGE", "date", ".metadata.creationTimestamp", 0),
    ],
}
_HEADER = "# Made from operator/omnimodel/api by `omni crds`. Do not edit.\n"


def generate() -> dict[str, str]:
    """The CRDs as YAML text, by file name."""
    return {f"{kind.plural}.yaml": _HEADER + _dump(definition(kind)) for kind in (OmniModel, OmniPool, OmniProcess)}


def definition(kind: type[Resource]) -> dict[str, Any]:
    """The CRD of a kind."""
    name = kind.__name__
    subresources: dict[str, Any] = {"status": {}}
    if kind is OmniPool:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/part-of": "omnimodel", SCHEMA_LABEL: str(SCHEMA_VERSION)},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": name,
                "listKind": f"{name}List",
                "plural": kind.plural,
                "singular": name.lower(),
                "shortNames": _SHORT_NAMES[kind],
                "categories": ["omni"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": [
                        {"name": title, "type": form, "jsonPath": path, **({"priority": priority} if priority else {})}
                        for title, form, path, priority in _COLUMNS[kind]
                    ],
                    "schema": {"openAPIV3Schema": _root(kind)},
                }
            ],
        },
    }


def _root(kind: type[Resource]) -> dict[str, Any]:
    known = fields(kind)
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": _field(known["spec"], "spec"),
        "status": _field(known["status"], "status"),
    }
    root: dict[str, Any] = {"type": "object", "description": _text(kind.__doc__), "properties": properties}
    if known["spec"].is_required():
        root["required"] = ["spec"]
    if "observedGeneration" in properties["status"]["properties"]:
        properties["status"]["default"] = {"observedGeneration": -1}  # not done before the operator has seen it
    pattern = LABEL_PATTERN.replace("\\", "\\\\")
    rule = f"self.metadata.name.size() <= 63 && self.metadata.name.matches('{pattern}')"
    cure = "write lower-case letters, digits and hyphens, such as smollm2"
    root["x-kubernetes-validations"] = [cel(rule, "metadata.name is no DNS label", cure)]
    return root


def _field(info: FieldInfo, name: str) -> dict[str, Any]:
    schema = _node(info.annotation, info.metadata, name)
    if info.description:
        schema = {"description": info.description, **schema}
    return schema


def _node(annotation: Any, metadata: Iterable[Any], name: str) -> dict[str, Any]:
    metadata = list(metadata)
    checked = next((item for item in metadata if isinstance(item, Checked)), None)
    if checked is not None:
        return dict(checked.schema)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _node(arguments[0], [*arguments[1:], *metadata], name)
    if origin in (Union, types.UnionType):
        branches = [argument for argument in arguments if argument is not type(None)]
        if len(branches) == 1:
            return {**_node(branches[0], metadata, name), **_nullable(name)}
        return _either([_node(branch, (), name) for branch in branches])
    limits = {
        "least": next((item.min_length for item in metadata if isinstance(item, annotated_types.MinLen)), None),
        "most": next((item.max_length for item in metadata if isinstance(item, annotated_types.MaxLen)), None),
    }
    if origin is list:
        return _list(arguments[0], limits, name)
    if origin is dict:
        return _map(arguments[1], limits)
    if annotation is Any:
        return dict(_PRESERVE)
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return _object(annotation)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean"}[annotation]}


def _nullable(name: str) -> dict[str, Any]:
    """Null says something in a rendered process spec: no handler, no probe, never."""
    return {"nullable": True} if name in ("handler", "probe", "idleAfterSeconds") else {}


def _either(branches: list[dict[str, Any]]) -> dict[str, Any]:
    """A text, or an object: what a schema says of texts applies to texts alone, and of properties to objects alone."""
    schema = dict(_PRESERVE)
    for branch in map(_without_cel, branches):
        kept = ("minLength", "maxLength", "pattern") if branch.get("type") == "string" else ("properties", "required")
        schema |= {key: branch[key] for key in kept if key in branch}
    return schema


def _without_cel(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema where CEL cannot see, below a node without type: the patterns of its texts stand in for their rules."""
    left = {key: value for key, value in schema.items() if key != "x-kubernetes-validations"}
    for rule in schema.get("x-kubernetes-validations", ()):
        match = re.fullmatch(r"self\.matches\('(.*)'\)", rule["rule"])
        if match:
            left["pattern"] = match.group(1).replace("\\\\", "\\")
    if "properties" in left:
        left["properties"] = {name: _without_cel(child) for name, child in left["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(left.get(key), dict):
            left[key] = _without_cel(left[key])
    return left


def _list(item: Any, limits: dict[str, Any], name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "maxItems": limits["most"] or MAX_ITEMS}
    if limits["least"]:
        schema["minItems"] = limits["least"]
    schema["items"] = _node(item, (), "")
    key = _LIST_KEYS.get(name)
    if key and key in schema["items"].get("properties", {}):
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return schema


def _map(value: Any, limits: dict[str, Any]) -> dict[str, Any]:
    if value is Any:
        return {"type": "object", **_PRESERVE}
    return {
        "type": "object",
        "maxProperties": limits["most"] or MAX_PROPERTIES,
        "additionalProperties": _node(value, (), ""),
    }


def _object(part: type[Part]) -> dict[str, Any]:
    known = fields(part)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _field(info, name) for name, info in known.items()},
    }
    required = [name for name, info in known.items() if info.is_required()]
    if required:
        schema["required"] = required
    rules = [
        {**cel(rule.cel, rule.problem, rule.cure), **({"fieldPath": f".{rule.field}"} if rule.field else {})}
        for rule in (*part.rules, *(argument_rules() if part is Runtime else ()))
        if rule.cel
    ]
    if rules:
        schema["x-kubernetes-validations"] = rules
    return schema


def _text(docstring: str | None) -> str:
    return " ".join((docstring or "").split())


class _Dumper(yaml.SafeDumper):
    """Without anchors: the API server's tools print them as if someone had written them."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never an alias."""
        del data
        return True


def _dump(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
