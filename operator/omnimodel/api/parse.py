"""From a document of YAML or JSON to a resource, or to sentences that say what to write instead."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omnimodel.api.checks import model_violations, pool_violations
from omnimodel.api.fields import REFUSAL
from omnimodel.api.meta import API_VERSION, Part, Resource, Violation
from omnimodel.api.model import OmniModel
from omnimodel.api.names import instead_of, normal
from omnimodel.api.pool import OmniPool
from omnimodel.api.process import OmniProcess
from omnimodel.api.tree import Path, dotted, field_at
from omnimodel.errors import ManifestError
from omnimodel.quantity import shown

KINDS: dict[str, type[Resource]] = {"OmniModel": OmniModel, "OmniPool": OmniPool, "OmniProcess": OmniProcess}
_VALUE_LIMIT = 80


@dataclass(frozen=True)
class Place:
    """Where a document stands.

    Args:
        file: its name; empty for none.
        lines: line of each path in the document; the empty path is its first line.
        texts: how a scalar is written there, where YAML reads it as something else (`0.10` is a number).
    """

    file: str = ""
    lines: Mapping[Path, int] = field(default_factory=dict)
    texts: Mapping[Path, str] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """The line of a path, or of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 0


NOWHERE = Place()


def parse(document: Any, place: Place = NOWHERE) -> Resource:
    """The resource that a document describes.

    Raises:
        ManifestError: it describes none; the first of what `validate` finds.
    """
    resource, errors = validate(document, place)
    if resource is None:
        raise errors[0]
    return resource


def validate(document: Any, place: Place = NOWHERE) -> tuple[Resource | None, tuple[ManifestError, ...]]:
    """The resource that a document describes, or everything that is wrong with it.

    Args:
        document: parsed YAML or JSON.
        place: where it stands, for messages.
    """
    if not isinstance(document, dict):
        error = ManifestError(
            "manifest", "is no mapping", f"begin with apiVersion: {API_VERSION}", file=place.file, line=place.line(())
        )
        return None, (error,)
    subject = subject_of(document)
    kind = KINDS.get(str(document.get("kind")))
    found = list(_head(document, kind))
    if kind is None or found:
        return None, tuple(_error(subject, violation, place) for violation in found)
    try:
        # Snake case is for Python; in a manifest it is an unknown field.
        resource = kind.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as failure:
        violations = [_violation(kind, details, place) for details in failure.errors(include_url=False)]
        return None, tuple(_error(subject, violation, place) for violation in _once(violations))
    violations = list(_nulls(resource.spec, ("spec",)) if hasattr(resource, "spec") else ())
    violations += _not_json(document.get("spec"), ("spec",))
    violations += resource.violations()
    if isinstance(resource, OmniModel):
        violations += model_violations(resource)
    elif isinstance(resource, OmniPool):
        violations += pool_violations(resource)
    if violations:
        return None, tuple(_error(subject, violation, place, document) for violation in _once(violations))
    return resource, ()


def subject_of(document: Mapping[str, Any]) -> str:
    """`Kind namespace/name` of a document, as far as it says."""
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    name = metadata.get("name")
    kind = document.get("kind")
    kind = kind if isinstance(kind, str) and kind else "manifest"
    if not isinstance(name, str) or not name:
        return _plain(kind)
    namespace = metadata.get("namespace")
    namespace = namespace if isinstance(namespace, str) and namespace else "default"
    return f"{_plain(kind)} {_plain(namespace)}/{_plain(name)}"


def _plain(text: str) -> str:
    return text if text.isprintable() and len(text) <= 253 else shown(text)


def _head(document: Mapping[str, Any], kind: type[Resource] | None) -> Iterator[Violation]:
    version = document.get("apiVersion")
    if version != API_VERSION:
        problem = "is missing" if version is None else "is no version of this API"
        yield Violation(("apiVersion",), problem, f"write {API_VERSION}", version)
    if kind is None:
        said = document.get("kind")
        near = {normal(name): name for name in ("OmniModel", "OmniPool")}
        match = difflib.get_close_matches(normal(str(said)), near, 1, 0.5)
        cure = f"write {near[match[0]]}" if match else "write OmniModel or OmniPool"
        yield Violation(("kind",), "is missing" if said is None else "is no kind of this API", cure, said)


def _violation(kind: type[Resource], details: ErrorDetails, place: Place) -> Violation:
    path = tuple(element for element in details["loc"] if not str(element).startswith("~") and element != "[key]")
    value, what = details["input"], details["type"]
    context = details.get("ctx", {})
    if value is None and what not in ("missing", "extra_forbidden"):
        return Violation(path, "has no value", "write one, or remove the line")
    if what == REFUSAL:
        written = place.texts.get(path)
        cure = context["cure"]
        if written is not None and cure.startswith("write it in quotes"):
            cure = f'write it in quotes: "{written}"'
        return Violation(path, context["problem"], cure, value, secret="secret" in context)
    if what == "missing":
        return Violation(path, "is missing", _example(kind, path))
    if what == "extra_forbidden":
        return Violation(path, "is an unknown field", instead_of(kind, path))
    if what == "model_type" and path == ("spec", "runtime", "handler") and isinstance(value, str):
        return Violation(path, "is not a mapping", f"write handler: {{entry: {value}}}", value)
    if what in ("model_type", "dict_type", "model_attributes_type"):
        return Violation(path, "is not a mapping", _example(kind, path), value)
    if what == "list_type":
        return Violation(path, "is not a list", _example(kind, path), value)
    if what in ("too_long", "too_short"):
        limit = context.get("max_length", context.get("min_length"))
        word = "more" if what == "too_long" else "fewer"
        return Violation(
            path, f"has {word} than {limit} entries", f"write {limit} at {'most' if what == 'too_long' else 'least'}"
        )
    return Violation(path, details["msg"][:1].lower() + details["msg"][1:], _example(kind, path), value)


def _example(kind: type[Part], path: Path) -> str:
    info = field_at(kind, path)
    name = next((str(element) for element in reversed(path) if isinstance(element, str)), "")
    if path in (("metadata",), ("metadata", "name")):
        return "write metadata: {name: smollm2}" if len(path) == 1 else "write name: smollm2"
    if name == "sha256":
        return "write sha256: and the 64 digits that `sha256sum FILE` prints"
    if info is None or not info.examples:
        return f"write a value for {name}"
    return f"write {name}: {flow(info.examples[0])}"


def flow(value: Any) -> str:
    """A value as one line of YAML."""
    text: str = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    # JSON is YAML, and never needs a second line.
    return text.strip()[1:-1] if "\n" not in text.strip() else json.dumps(value, ensure_ascii=False)


def _error(
    subject: str, violation: Violation, place: Place, document: Mapping[str, Any] | None = None
) -> ManifestError:
    value = violation.value
    if value is None and document is not None and not violation.secret:
        value = _value_at(document, violation.path)
    problem = violation.problem
    if not violation.secret and isinstance(value, (str, int, float, bool)):
        text = str(place.texts.get(violation.path, "")) if isinstance(value, float) else ""
        problem = f"{text or shown(value)}: {problem}"
    elif not violation.secret and isinstance(value, (list, dict)) and value and len(flow(value)) <= _VALUE_LIMIT:
        problem = f"{flow(value)}: {problem}" if violation.value is not None else problem
    return ManifestError(
        subject,
        problem,
        violation.cure,
        field=dotted(violation.path),
        file=place.file,
        line=place.line(violation.path),
    )


def _value_at(document: Any, path: Path) -> Any:
    for element in path:
        try:
            document = document[element]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def _once(violations: list[Violation]) -> Iterator[Violation]:
    seen: set[tuple[Path, str]] = set()
    for violation in violations:
        if (violation.path, violation.problem) not in seen:
            seen.add((violation.path, violation.problem))
            yield violation


def _not_json(value: Any, path: Path) -> Iterator[Violation]:
    if isinstance(value, float) and not math.isfinite(value):
        yield Violation(path, "is no number that JSON knows", "write a finite number, or put it in quotes", value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_json(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(item, (*path, index))


def _nulls(part: Part, path: Path) -> Iterator[Violation]:
    for name, info in type(part).model_fields.items():
        value = getattr(part, name)
        here = (*path, info.alias or name)
        if value is None and name in part.model_fields_set and info.default is None and name not in ("equals", "near"):
            yield Violation(here, "has no value", "write one, or remove the line")
        elif isinstance(value, Part):
            yield from _nulls(value, here)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Part):
                    yield from _nulls(item, (*here, index))


__all__ = ["KINDS", "NOWHERE", "Place", "flow", "parse", "subject_of", "validate"]
