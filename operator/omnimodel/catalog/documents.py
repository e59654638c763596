"""YAML documents of a file as JSON values, with the line of every field: safe tags only, no duplicate keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from omnimodel.api import Place
from omnimodel.api.tree import dotted
from omnimodel.errors import ManifestError
from omnimodel.quantity import shown

SIZE_LIMIT = 4 << 20  # bytes of one file; the API server takes 1.5 MiB of one object
NODE_LIMIT = 200_000  # values of one file after its aliases: a few lines of nested ones could mean billions
DEPTH_LIMIT = 64
Path = tuple[str | int, ...]
_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_VALUE = "tag:yaml.org,2002:value"
_COLLECTION_TAGS = {"tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}
_DIGITS_LIMIT = 64
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}


class _Loader(yaml.SafeLoader):
    """The safe loader without dates, sexagesimal numbers and `=`, which neither JSON nor Kubernetes knows."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the library's own way
        first: [(tag, expression) for tag, expression in resolvers if tag not in (_TIMESTAMP, _VALUE)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class Document:
    """One document: its value and where everything in it stands."""

    value: Any
    place: Place


class _Refusal(Exception):
    def __init__(self, line: int, path: Path, problem: str, cure: str) -> None:
        super().__init__(problem)
        self.line = line
        self.path = path
        self.problem = problem
        self.cure = cure


def documents(text: str, file: str) -> tuple[list[Document], list[ManifestError]]:
    """The documents of a file, up to the first place where it is no YAML, and what is wrong with it.

    Args:
        text: of the file.
        file: its name, for messages.
    """
    if len(text) > SIZE_LIMIT:
        return [], [ManifestError("file", f"has more than {SIZE_LIMIT >> 20} MiB", "split it", file=file)]
    found: list[Document] = []
    errors: list[ManifestError] = []
    budget = [NODE_LIMIT]
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        for node in _nodes(loader):
            lines: dict[Path, int] = {(): node.start_mark.line + 1}
            texts: dict[Path, str] = {}
            try:
                value = _Builder(loader, lines, texts, budget).build(node, (), ())
            except _Refusal as refused:
                errors.append(_manifest_error(file, refused))
                continue
            if value is not None:
                found.append(Document(value, Place(file, lines, texts)))
    except yaml.MarkedYAMLError as error:
        errors.append(_syntax_error(file, error))
    except yaml.YAMLError as error:
        problem = f"is no YAML: {str(error).splitlines()[0]}"
        errors.append(ManifestError("file", problem, "save it as UTF-8 text", file=file))
    except RecursionError:
        errors.append(ManifestError("file", "is nested too deeply", "write it flatter", file=file))
    finally:
        if loader is not None:
            loader.dispose()
    return found, errors


def _nodes(loader: _Loader) -> Iterator[yaml.Node]:
    while loader.check_node():
        node = loader.get_node()
        if node is not None:
            yield node


def _manifest_error(file: str, refused: _Refusal) -> ManifestError:
    return ManifestError(
        "manifest", refused.problem, refused.cure, field=dotted(refused.path), file=file, line=refused.line
    )


def _syntax_error(file: str, error: yaml.MarkedYAMLError) -> ManifestError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 0
    problem = error.problem or error.context or "cannot be read"
    cure = "correct the line, or the one before it"
    if mark and mark.buffer is not None and "\t" in (mark.get_snippet() or ""):
        cure = "indent with spaces, not with tabs"
    elif "mapping values are not allowed" in problem:
        cure = "put the text in quotes, or correct the indentation"
    elif "could not determine a constructor" in problem:
        cure = "remove the tag"
    elif "undefined alias" in problem:
        cure = "define the anchor (&name) before its use (*name) in the same document"
    return ManifestError("file", f"is no YAML: {problem}", cure, file=file, line=line)


class _Builder:
    """Turns nodes into values and notes lines; aliases are followed within a budget."""

    def __init__(self, loader: _Loader, lines: dict[Path, int], texts: dict[Path, str], budget: list[int]) -> None:
        self._loader = loader
        self._lines = lines
        self._texts = texts
        self._budget = budget

    def build(self, node: yaml.Node, path: Path, around: tuple[int, ...]) -> Any:
        """The value of a node.

        Args:
            node: what the composer made.
            path: of the value in its document.
            around: identities of the nodes it is in, to find one that contains itself.
        """
        line = node.start_mark.line + 1
        self._budget[0] -= 1
        if self._budget[0] < 0:
            raise _Refusal(line, path, "is too much after following its aliases", "write fewer aliases")
        if id(node) in around:
            raise _Refusal(line, path, "contains itself by an alias", "remove the alias")
        if len(around) > DEPTH_LIMIT:
            raise _Refusal(line, path, "is nested too deeply", "write it flatter")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, line)
        if node.tag not in _COLLECTION_TAGS:
            raise _Refusal(line, path, f"has the tag {_short(node.tag)}", "remove the tag")
        within = (*around, id(node))
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self._lines[*path, index] = item.start_mark.line + 1
                items.append(self.build(item, (*path, index), within))
            return items
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, within)
        raise _Refusal(line, path, "cannot be read", "write a mapping, a list or a text")

    def _scalar(self, node: yaml.ScalarNode, path: Path, line: int) -> Any:
        if node.tag not in _PLAIN_TAGS:
            raise _Refusal(line, path, f"has the tag {_short(node.tag)}", "remove the tag")
        if node.tag.endswith(":int") and ":" in node.value:
            return node.value
        if node.tag.endswith((":int", ":float")) and len(node.value) > _DIGITS_LIMIT:
            raise _Refusal(line, path, f"has a number of {len(node.value)} digits", "put it in quotes")
        try:
            value = self._loader.construct_object(node)
        except (ValueError, yaml.YAMLError):
            raise _Refusal(line, path, f"cannot read {shown(node.value)}", "put it in quotes") from None
        if not isinstance(value, str):
            self._texts[path] = node.value
        return value

    def _mapping(self, node: yaml.MappingNode, path: Path, within: tuple[int, ...]) -> dict[str, Any]:
        own: dict[str, int] = {}
        value: dict[str, Any] = {}
        merges: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merges.append(value_node)
                continue
            key = self._key(key_node, path, line)
            if key in own:
                problem = f"is there twice, here and in line {own[key]}"
                raise _Refusal(line, (*path, key), problem, "remove one")
            own[key] = line
            self._lines[*path, key] = line
            value[key] = self.build(value_node, (*path, key), within)
        for merge in merges:
            for part in merge.value if isinstance(merge, yaml.SequenceNode) else [merge]:
                if not isinstance(part, yaml.MappingNode):
                    raise _Refusal(
                        part.start_mark.line + 1, path, "merges (<<) what is no mapping", "write <<: *anchor"
                    )
                self._merge(part, path, value, within)
        return value

    def _merge(self, node: yaml.MappingNode, path: Path, value: dict[str, Any], within: tuple[int, ...]) -> None:
        """Fill in what the mapping does not say itself; the first of several merges wins."""
        lines: dict[Path, int] = {}
        texts: dict[Path, str] = {}
        merged = _Builder(self._loader, lines, texts, self._budget).build(node, path, within)
        for key, item in merged.items():
            if key not in value:
                value[key] = item
                below = (*path, key)
                self._lines.update((there, line) for there, line in lines.items() if there[: len(below)] == below)
                self._texts.update((there, text) for there, text in texts.items() if there[: len(below)] == below)

    def _key(self, node: yaml.Node, path: Path, line: int) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS:
            raise _Refusal(line, path, "has a key that is no text", "write a text as key")
        if node.tag != "tag:yaml.org,2002:str" and not isinstance(node.value, str):
            raise _Refusal(line, path, "has a key that is no text", "put the key in quotes")
        return str(node.value)


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
