"""Checks across the fields of one manifest that no CEL rule can say."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterator, Sequence

from omnimodel.api.meta import Violation
from omnimodel.api.model import OmniModel
from omnimodel.api.options import violations as option_violations
from omnimodel.api.owned import violations as owned_violations
from omnimodel.api.pool import OmniPool
from omnimodel.api.tree import Path


def model_violations(model: OmniModel) -> Iterator[Violation]:
    """What a model says that its fields one by one cannot show to be wrong."""
    spec = model.spec
    seen = {model.metadata.name}
    for index, item in enumerate(spec.served_names):
        name = item if isinstance(item, str) else item.name
        path: Path = ("spec", "servedNames", index) if isinstance(item, str) else ("spec", "servedNames", index, "name")
        if name == model.metadata.name:
            yield Violation(path, "is the model's own name", "remove it: a model always answers to metadata.name", name)
        elif name in seen:
            yield Violation(path, "is there twice", "remove one", name)
        seen.add(name)
    yield from owned_violations(spec.runtime)
    yield from option_violations(spec.runtime)
    yield from _mount_violations(model)
    yield from _handler_violations(model)


def _clean(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))


def _mount_violations(model: OmniModel) -> Iterator[Violation]:
    names: set[str] = set()
    paths: dict[str, str] = {}
    for index, mount in enumerate(model.spec.mounts):
        path = _clean(mount.path)
        if mount.name in names:
            yield Violation(
                ("spec", "mounts", index, "name"), "is there twice", "give each mount a name of its own", mount.name
            )
        if path in paths:
            problem = f"is the path of mount {paths[path]} as well"
            yield Violation(("spec", "mounts", index, "path"), problem, "give each mount a path of its own", mount.path)
        names.add(mount.name)
        paths.setdefault(path, mount.name)
    runtime = model.spec.runtime
    places: list[tuple[Path, str]] = [
        (("spec", "runtime", "environment", "path", index), path) for index, path in enumerate(runtime.environment.path)
    ]
    if runtime.working_dir is not None:
        places.append((("spec", "runtime", "workingDir"), runtime.working_dir))
    for place, written in places:
        path = _clean(written)
        inside = any(path == mount or path.startswith(f"{mount}/") for mount in paths)
        if not inside and not (place[-1] == "workingDir" and (path in ("/", "/tmp"))):  # noqa: S108
            cure = f"write a path under {' or '.join(paths)}" if paths else "add a mount that has it to spec.mounts"
            yield Violation(place, "is in no mount", cure, written)


def _handler_violations(model: OmniModel) -> Iterator[Violation]:
    handler = model.spec.runtime.handler
    if handler is None:
        return
    path: Path = ("spec", "runtime", "handler")
    for name, code in handler.files.items():
        if name.endswith(".py"):
            try:
                ast.parse(code, name)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                where = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
                message = error.msg if isinstance(error, SyntaxError) else str(error)
                yield Violation(
                    (*path, "files", name), f"is no Python{where}: {message}", "correct the code", secret=True
                )


def pool_violations(pool: OmniPool) -> Iterator[Violation]:
    """What a pool says that its fields one by one cannot show to be wrong."""
    published = pool.spec.store.published if pool.spec.store is not None else []
    yield from _name_violations(("spec", "volumes"), "volume", [volume.name for volume in pool.spec.volumes])
    yield from _name_violations(("spec", "store", "published"), "store", [store.name for store in published])


def _name_violations(path: Path, what: str, names: Sequence[str]) -> Iterator[Violation]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield Violation((*path, index, "name"), "is there twice", f"give each {what} a name of its own", name)
        seen.add(name)
