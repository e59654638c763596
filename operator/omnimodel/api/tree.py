"""The fields of a kind as a tree: what is known at a path, and every path there is."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from omnimodel.api.meta import Part

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Shape:
    """What a value of a field can be.

    Args:
        parts: classes of objects, or of the items of `container`.
        container: `list` or `map` when the parts or values are items of one; empty otherwise.
        free: any JSON is possible below it.
    """

    parts: tuple[type[Part], ...] = ()
    container: str = ""
    free: bool = False


def shape(annotation: Any) -> Shape:
    """The shape of a field with this annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return shape(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        shapes = [shape(argument) for argument in get_args(annotation) if argument is not type(None)]
        parts = tuple(part for item in shapes for part in item.parts)
        container = next((item.container for item in shapes if item.container), "")
        return Shape(parts, container, any(item.free for item in shapes))
    if origin is list:
        item = shape(get_args(annotation)[0])
        return Shape(item.parts, "list", item.free)
    if origin is dict:
        item = shape(get_args(annotation)[1])
        return Shape(item.parts, "map", item.free)
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return Shape((annotation,))
    return Shape(free=annotation is Any)


def fields(part: type[Part]) -> dict[str, FieldInfo]:
    """The fields of a part by their names in YAML."""
    return {info.alias or name: info for name, info in part.model_fields.items()}


def field_at(kind: type[Part], path: Path) -> FieldInfo | None:
    """The field at a path; None for an unknown one or one inside free JSON."""
    info, _ = _walk(kind, path)
    return info


def part_at(kind: type[Part], path: Path) -> tuple[type[Part], ...]:
    """The classes that the object at a path can be."""
    _, current = _walk(kind, path)
    return current.parts if not current.container else ()


def _walk(kind: type[Part], path: Path) -> tuple[FieldInfo | None, Shape]:
    current = Shape((kind,))
    info: FieldInfo | None = None
    for element in path:
        if current.container:
            current = Shape(current.parts, free=current.free)
            info = None
            continue
        found = next((fields(part)[str(element)] for part in current.parts if str(element) in fields(part)), None)
        if found is None:
            return None, Shape(free=current.free)
        info, current = found, shape(found.annotation)
    return info, current


@cache
def paths(kind: type[Part]) -> tuple[tuple[str, ...], ...]:
    """Every path of a kind that a person writes, shallow ones first; items of lists and maps are left out."""
    found = list(_paths(kind, ()))
    return tuple(sorted((path for path in found if path[0] == "spec"), key=len))


def _paths(part: type[Part], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, info in fields(part).items():
        here = (*path, name)
        yield here
        for child in shape(info.annotation).parts:
            yield from _paths(child, here)


def dotted(path: Path) -> str:
    """A path as people write it: `spec.mounts[0].path`."""
    text = ""
    for element in path:
        name = element if isinstance(element, int) or element.isprintable() else repr(element)
        text += f"[{name}]" if isinstance(name, int) else f".{name}" if text else name
    return text
