"""ConfigMaps and Secrets of Kubernetes that stand in the same files, for the manifests that refer to them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

from omnimodel.api.parse import Place, subject_of
from omnimodel.catalog.catalog import DEFAULT, ConfigObject
from omnimodel.errors import ManifestError
from omnimodel.quantity import shown

CONFIG_KINDS = ("ConfigMap", "Secret")
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
# Field of each kind -> whether its values are base64.
_FIELDS = {"ConfigMap": {"data": False, "binaryData": True}, "Secret": {"stringData": False, "data": True}}


def read_config(document: dict[str, Any], place: Place) -> tuple[ConfigObject | None, tuple[ManifestError, ...]]:
    """The config map or secret that a document describes, or what is wrong with it; no value stands in a message."""
    errors = list(_errors(document, place))
    if errors:
        return None, tuple(errors)
    metadata = document["metadata"]
    content: dict[str, bytes] = {}
    for name, encoded in _FIELDS[document["kind"]].items():
        for key, value in (document.get(name) or {}).items():
            content[key] = base64.b64decode(value) if encoded else value.encode()
    namespace = metadata.get("namespace") or DEFAULT
    return ConfigObject(document["kind"], namespace, metadata["name"], content), ()


def _errors(document: dict[str, Any], place: Place) -> Iterator[ManifestError]:
    def refuse(field: str, problem: str, cure: str) -> ManifestError:
        path = tuple(field.split("."))
        return ManifestError(subject_of(document), problem, cure, field=field, file=place.file, line=place.line(path))

    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str) or not metadata["name"]:
        yield refuse("metadata.name", "is missing", "write metadata: {name: NAME}")
        return
    if not isinstance(metadata.get("namespace", ""), str):
        yield refuse("metadata.namespace", f"{shown(metadata['namespace'])}: is not text", "put it in quotes")
    for name, encoded in _FIELDS[document["kind"]].items():
        entries = document.get(name)
        if entries is None:
            continue
        if not isinstance(entries, dict):
            yield refuse(name, "is not a mapping", f"write {name}: {{KEY: TEXT}}")
            continue
        for key, value in entries.items():
            field = f"{name}.{key}"
            if not _KEY.fullmatch(key):
                yield refuse(name, f"{shown(key)}: is no key", "write letters, digits, hyphens, dots and _")
            elif not isinstance(value, str):
                yield refuse(field, "is not text", "put it in quotes")
            elif encoded and not _is_base64(value):
                cure = "write it under stringData" if document["kind"] == "Secret" else "write it under data"
                yield refuse(field, "is not base64", f"{cure}, or what `base64 -w0 FILE` prints")


def _is_base64(value: str) -> bool:
    try:
        base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True
