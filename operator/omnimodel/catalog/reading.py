"""Reading manifests: from folders and files to checked objects, each with its line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnimodel.api import GROUP, Place, Resource, validate
from omnimodel.catalog.catalog import ConfigObject, Key, key_of
from omnimodel.catalog.configs import CONFIG_KINDS, read_config
from omnimodel.catalog.documents import SIZE_LIMIT, Document, documents
from omnimodel.errors import ManifestError

SUFFIXES = (".yaml", ".yml", ".json")
_USER_KINDS = {"omnimodel": "OmniModel", "omnipool": "OmniPool"}
# What the API server keeps in metadata; it comes along when someone saves `kubectl get -o yaml`.
_SERVER_FIELDS = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "selfLink",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
)


@dataclass
class Reading:
    """What one file says.

    Args:
        objects: with the line each stands in.
        errors: what is wrong.
        notes: what was left out.
    """

    objects: dict[Key, tuple[Resource | ConfigObject, int]] = field(default_factory=dict)
    errors: list[ManifestError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def files_of(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], errors: list[ManifestError]
) -> Iterator[str]:
    """The manifest files at these paths, each once, in the order of their names."""
    seen: set[str] = set()
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        root = Path(path)
        if root.is_dir():
            found: Iterable[Path] = sorted(_walk(root, errors))
        elif root.exists():
            found = [root]
        else:
            errors.append(ManifestError("file", "does not exist", "give a file or a folder", file=str(root)))
            continue
        for file in found:
            if str(file) not in seen:
                seen.add(str(file))
                yield str(file)


def _walk(root: Path, errors: list[ManifestError]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        errors.append(ManifestError("folder", f"cannot be read: {error.strerror}", "", file=str(error.filename)))

    for folder, children, names in os.walk(root, onerror=unreadable):
        children[:] = [child for child in children if not child.startswith(".")]
        for name in names:
            if name.endswith(SUFFIXES) and not name.startswith("."):
                yield Path(folder, name)


def read_text(name: str, errors: list[ManifestError]) -> str | None:
    """The text of a file; None, with an error added, when it has none."""
    try:
        path = Path(name)
        if not path.is_file():
            errors.append(ManifestError("file", "is no regular file", "remove it from the folder", file=name))
            return None
        with path.open("rb") as stream:
            raw = stream.read(SIZE_LIMIT + 1)
    except OSError as error:
        cure = "let the user that runs omni read it" if isinstance(error, PermissionError) else "look at the disk"
        errors.append(ManifestError("file", f"cannot be read: {error.strerror}", cure, file=name))
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        errors.append(ManifestError("file", "is not UTF-8 text", "save it as UTF-8", file=name, line=line))
        return None


def read_manifests(text: str, name: str) -> Reading:
    """Every object of a file, and everything that is wrong in it."""
    result = Reading()
    found, errors = documents(text, name)
    result.errors += errors
    for document in found:
        for item in _unfold(document):
            _take(item, result)
    return result


def _unfold(document: Document) -> Iterator[Document]:
    """The items of a List, or the document itself."""
    value = document.value
    is_list = (
        isinstance(value, dict) and str(value.get("kind", "")).endswith("List") and isinstance(value.get("items"), list)
    )
    if not is_list:
        yield document
        return
    place = document.place
    for index, item in enumerate(value["items"]):
        prefix = ("items", index)
        lines = {path[2:]: line for path, line in place.lines.items() if path[:2] == prefix}
        texts = {path[2:]: text for path, text in place.texts.items() if path[:2] == prefix}
        yield from _unfold(Document(item, Place(place.file, lines, texts)))


def _take(document: Document, result: Reading) -> None:
    value, place = document.value, document.place
    line = place.line(())
    if isinstance(value, dict) and not _is_ours(value):
        if value.get("kind") in CONFIG_KINDS and value.get("apiVersion") == "v1":
            config, errors = read_config(value, place)
            result.errors += errors
            if config is not None:
                _put(result, (config.kind, config.namespace, config.name), config, place.file, line)
        else:
            kind = f"{value.get('apiVersion', '')}/{value.get('kind', '')}".strip("/")
            result.notes.append(f"{place.file}:{line}: {kind or 'a document without kind'} is left out")
        return
    before = len(result.errors)
    if isinstance(value, dict):
        value = _as_written(value, place, result)
    resource, errors = validate(value, place)
    result.errors += errors
    if resource is not None and len(result.errors) == before:
        _put(result, key_of(resource), resource, place.file, line)


def _put(result: Reading, key: Key, item: Resource | ConfigObject, file: str, line: int) -> None:
    if key in result.objects:
        result.errors.append(twice(key, file, line, f"{file}:{result.objects[key][1]}"))
        return
    result.objects[key] = (item, line)


def twice(key: Key, file: str, line: int, other: str) -> ManifestError:
    """The error of an object that another place has too."""
    subject = f"{key[0]} {key[1]}/{key[2]}"
    return ManifestError(
        subject,
        f"is there twice, here and in {other}",
        "rename one, or remove it",
        field="metadata.name",
        file=file,
        line=line,
    )


def _is_ours(value: dict[str, Any]) -> bool:
    """Whether a document is meant for this API, however misspelt."""
    version = value.get("apiVersion")
    kind = str(value.get("kind", ""))
    if isinstance(version, str) and version.split("/")[0] == GROUP:
        return True
    near = difflib.get_close_matches(kind.lower().replace("-", ""), _USER_KINDS, 1, 0.85)
    other_group = isinstance(version, str) and "/" in version and "omni" not in version
    if near and not other_group:
        return True
    # Nothing of Kubernetes lacks both, so it is a manifest whose head was forgotten.
    return "kind" not in value and "apiVersion" not in value


def _as_written(value: dict[str, Any], place: Place, result: Reading) -> dict[str, Any]:
    """The document without what the API server adds; what a person should not write is an error."""
    value = {key: item for key, item in value.items() if key != "status"}
    metadata = value.get("metadata")
    if isinstance(metadata, dict):
        if metadata.get("finalizers"):
            result.errors.append(
                ManifestError(
                    f"{value.get('kind')} {metadata.get('namespace') or 'default'}/{metadata.get('name')}",
                    "is written by hand, and would keep the object from ever being deleted",
                    "remove it",
                    field="metadata.finalizers",
                    file=place.file,
                    line=place.line(("metadata", "finalizers")),
                )
            )
        left = {key: item for key, item in metadata.items() if key not in _SERVER_FIELDS}
        value["metadata"] = {key: item for key, item in left.items() if item is not None or key == "name"}
    return value
