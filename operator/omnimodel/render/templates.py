"""Texts of a manifest with values of the model in them: `{{ options.contextTokens }}`, `{{ port }}`, `{port}`.

Port and socket are known to the agent only, so both spellings of them come out as `{port}` and `{socket}`. Jinja does
the rest, confined to looking values up: no loops, calls or arithmetic, for a manifest is not to be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omnimodel.errors import ManifestError

_ALLOWED = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Name,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Const,
    nodes.Filter,
)
_FILTERS = ("default", "lower", "upper", "int", "string", "basename")


def _basename(value: object) -> str:
    return str(value).rstrip("/").rpartition("/")[2]


_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
_ENVIRONMENT.filters = {**{name: _ENVIRONMENT.filters[name] for name in _FILTERS[:-1]}, "basename": _basename}
_ENVIRONMENT.globals.clear()


def expand(text: str, values: Mapping[str, Any], *, subject: str, field: str) -> str:
    """A text with its expressions replaced.

    Args:
        text: as in the manifest.
        values: what expressions can name, besides port and socket.
        subject: the object, for errors.
        field: the field, for errors.

    Raises:
        ManifestError: an expression is none, or names what is not there.
    """
    if "{{" not in text and "{%" not in text and "{#" not in text:
        return text
    names = {**values, "port": "{port}", "socket": "{socket}"}
    try:
        tree = _ENVIRONMENT.parse(text)
        for node in _all(tree):
            if not isinstance(node, _ALLOWED) or (isinstance(node, nodes.Filter) and node.name not in _FILTERS):
                raise ManifestError(
                    subject,
                    f"{text!r}: has more than values in its {{{{ }}}}",
                    "write {{ port }}, {{ options.contextTokens }} or another name; text with braces of its own "
                    "belongs in a file of a mount",
                    field=field,
                )
        return _ENVIRONMENT.from_string(tree).render(names)
    except jinja2.UndefinedError:
        raise ManifestError(
            subject, f"{text!r}: names what is not there", f"possible are {', '.join(sorted(names))}", field=field
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise ManifestError(
            subject,
            f"{text!r}: is no template ({error.message})",
            "close {{ with }}; put text with braces of its own in a file of a mount",
            field=field,
        ) from None
    except jinja2.TemplateError:
        raise ManifestError(subject, f"{text!r}: cannot be filled in", "write plain names", field=field) from None


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _all(child)
