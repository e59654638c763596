"""Finds the handler that a manifest names, and calls it so that whatever it does wrong ends in a sentence.

A handler comes inline in the manifest, from a package of its environment, or from a mounted folder. Inline files are
imported from memory: nothing is written, and tracebacks still show their lines.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from omnimodel.errors import OmniError, Reason
from omnimodel.runtime.requests import RequestError
from omnimodel.runtime.sdk import Model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

DETAIL_LINES = 30


class HandlerError(OmniError):
    """The handler's own fault."""

    reason = Reason.HANDLER_FAILED


def load_class(subject: str, entry: str, files: Mapping[str, str], paths: Sequence[str]) -> type[Model]:
    """Import the class that `entry` names.

    Args:
        subject: the model, for messages.
        entry: `module:Class`.
        files: inline files by their paths; only Python files are importable, the others are `Model.files`.
        paths: folders that are searched for modules after everything that is installed.

    Raises:
        HandlerError: it does not import, has no such class, or the class is no Model.
    """
    module_name, _, class_name = entry.partition(":")
    if not module_name or not class_name:
        raise HandlerError(subject, f"the handler {entry!r} is not of the form module:Class", "write handler:Handler")
    sys.path.extend(path for path in paths if path not in sys.path)
    if files:
        sys.meta_path.insert(0, _InlineFinder(files))
    with calling(subject, f"importing the handler's module {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                cure = f"add the package that has {error.name} to runtime.environment.requirements"
                raise HandlerError(subject, f"the handler's module {module_name} needs {error.name}", cure) from error
            have = ", ".join(sorted(files)) or "none"
            raise HandlerError(
                subject,
                f"there is no module {module_name} to take the handler from; inline files: {have}",
                "name a module that is inline, mounted under runtime.environment.path, or installed",
            ) from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = [name for name, value in vars(module).items() if _is_handler(value)]
        has = f"it has {', '.join(classes)}" if classes else "it has no Model at all"
        raise HandlerError(subject, f"the module {module_name} has no class {class_name}", has)
    if not _is_handler(found):
        raise HandlerError(
            subject,
            f"{entry} is {'the SDK itself' if found is Model else 'no omnimodel.runtime.sdk.Model'}",
            f"write class {class_name}(Model)",
        )
    handler: type[Model] = found
    return handler


def _is_handler(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Model) and value is not Model


@contextmanager
def calling(subject: str, doing: str) -> Iterator[None]:
    """Turn whatever a handler raises, a `sys.exit` included, into a HandlerError that says what it was doing."""
    try:
        yield
    except (OmniError, RequestError):
        raise
    except MemoryError as error:
        raise OmniError(
            subject, f"{doing} ran out of memory", "raise resources.hostMemory", reason=Reason.OUT_OF_MEMORY
        ) from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a device; torch need not be there
            cure = "raise resources.deviceMemory, or ask for less at once"
            problem = f"{doing} raised {_sentence(error)}"
            raise OmniError(subject, problem, cure, reason=Reason.OUT_OF_MEMORY) from error
        raise HandlerError(subject, f"{doing} raised {_sentence(error)}", "correct the handler") from error
    except SystemExit as error:
        raise HandlerError(subject, f"{doing} ended the process (sys.exit)", "correct the handler") from error


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def call(subject: str, doing: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a handler's function; see `calling`."""
    with calling(subject, doing):
        return function(*arguments)


def detail_of(error: BaseException) -> str:
    """The last lines of the traceback of what lies behind an error, without this product's own frames."""
    cause = error.__cause__ or error
    if isinstance(cause, OmniError) and cause.__cause__ is None:
        return ""
    lines = "".join(traceback.format_exception(cause, chain=False)).splitlines()
    return "\n".join(lines[-DETAIL_LINES:])


class _InlineFinder(importlib.abc.MetaPathFinder):
    """Finds modules and packages among the inline files of a manifest."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._texts: dict[str, tuple[str, str, bool]] = {}
        for name, text in files.items():
            path = PurePosixPath(name)
            if path.suffix != ".py":
                continue
            package = path.name == "__init__.py"
            parts = path.parent.parts if package else (*path.parent.parts, path.stem)
            self._texts[".".join(parts)] = (name, text, package)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 the interface
        target: ModuleType | None = None,  # noqa: ARG002 the interface
    ) -> importlib.machinery.ModuleSpec | None:
        found = self._texts.get(fullname)
        if found is None:
            return None
        name, text, package = found
        loader = _InlineLoader(fullname, name, text)
        return importlib.machinery.ModuleSpec(fullname, loader, origin=f"<manifest>/{name}", is_package=package)


class _InlineLoader(importlib.abc.InspectLoader):
    def __init__(self, fullname: str, name: str, text: str) -> None:
        self._fullname, self._name, self._text = fullname, name, text

    def get_source(self, fullname: str) -> str:  # noqa: ARG002 the interface
        return self._text

    def is_package(self, fullname: str) -> bool:  # noqa: ARG002 the interface
        return self._name.endswith("__init__.py")

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = f"<manifest>/{self._name}"
        exec(compile(self._text, module.__file__, "exec", dont_inherit=True), vars(module))  # noqa: S102 it is the user's handler
