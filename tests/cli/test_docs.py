"""The documents name what the code can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from omnimodel.cli import COMMANDS, EPILOG, omni
from omnimodel.cli.exits import ExitCode
from omnimodel.errors import Reason
from omnimodel.gateway import relay
from omnimodel.protocol import dispatch

ROOT = Path(__file__).parents[2]


def sections(path: str) -> dict[str, str]:
    """Heading -> text below it."""
    parts = re.split(r"^#{2,3} (.+)$", (ROOT / path).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_cure(reason: Reason) -> None:
    assert len(sections("docs/troubleshooting.md").get(reason, "").split()) >= 8


def test_no_cure_for_a_reason_that_is_gone() -> None:
    headings = {heading for heading in sections("docs/troubleshooting.md") if " " not in heading}
    assert headings - {"Manifests", "Memory", "Clusters", "Running", "Requests"} == set(Reason)


TELLERS = {"tell", "_tell", "add", "_warn"}  # of events
CONDITIONS = {"Ready", "Reconciling", "Stalled", "NameConflict", "True", "False", "Unknown"}  # types and states
KINDS = {"OmniModel", "OmniPool", "Manifest"}


def words(node: ast.AST) -> set[str]:
    """The texts within a piece of code that are CamelCase words."""
    texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"(?=\w{4})([A-Z][a-z]+)+", text)}


def words_of(source: str, *, conditions: bool) -> set[str]:
    """The words that events, and with `conditions` those too, have in a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = {word for argument in node.args for word in words(argument)}
            if name in TELLERS:
                found |= given - KINDS
            elif name in {"Refusal", "_conditions"}:
                found |= given - CONDITIONS
        elif conditions and isinstance(node, ast.Tuple):
            found |= {word for element in node.elts for word in words(element)} - CONDITIONS - KINDS
    return found


def test_every_word_of_events_and_conditions_is_documented_and_no_other() -> None:
    used: set[str] = set()
    for path in (ROOT / "operator").rglob("*.py"):
        used |= words_of(path.read_text("utf-8"), conditions=path.parent.name == "controllers")
    table = sections("docs/troubleshooting.md")["Words that need nothing"]
    listed = re.findall(r"^\| `(\w+)` \| \w", table, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert used - set(Reason) == set(listed)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_is_documented(name: str) -> None:
    assert f"`omni {name}" in (ROOT / "docs/cli.md").read_text("utf-8")


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_documented(code: ExitCode) -> None:
    assert re.search(rf"^\| {int(code)} \|", (ROOT / "docs/cli.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("code", list(ExitCode))
def test_the_help_tells_every_exit_code(code: ExitCode) -> None:
    assert re.search(rf"\b{int(code)} \w", EPILOG)


IN_PODS = {"operator", "agent", "gateway"}  # started by the chart


def options(command: click.Command, *names: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The name of each command below one, and the ways to write each of its options."""
    context = click.Context(command)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield " ".join(names), tuple(parameter.opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options(found, *names, name)


@pytest.mark.parametrize(
    ("command", "ways"),
    [(command, ways) for command, ways in options(omni) if command not in IN_PODS],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_every_option_is_documented_where_its_command_is(command: str, ways: tuple[str, ...]) -> None:
    """In its section, or above all of them when many commands have it."""
    head, *parts = re.split(r"^## .+$", (ROOT / "docs/cli.md").read_text("utf-8"), flags=re.MULTILINE)
    text = head + "".join(part for part in parts if f"`omni {command.partition(' ')[0]}" in part)
    assert any(re.search(rf"(?<![\w-]){way}(?![\w-])", text) for way in ways)


HEADERS = [value for room in (dispatch, relay) for name, value in vars(room).items() if name.endswith("_HEADER")]


@pytest.mark.parametrize("header", sorted(set(HEADERS)))
def test_every_header_is_documented(header: str) -> None:
    assert f"`{header}`" in sections("docs/cli.md")["Requests"]


def test_no_registry_is_named() -> None:
    """Whoever installs it chooses where from."""
    names = [b".".join(words) for words in ((b"pypi", b"org"), (b"pythonhosted", b"org"), (b"docker", b"io"))]
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (".ci", "charts", "crds", "docs", "examples", "images", "operator", "tests"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 100
    assert [str(path) for path in files for name in names if name in path.read_bytes()] == []


def test_every_target_that_tests_is_documented() -> None:
    made, told = ((ROOT / name).read_text("utf-8") for name in ("Makefile", "README.md"))
    targets = re.findall(r"^(test[a-z-]*):.*## ", made, re.MULTILINE)
    assert [target for target in targets if f"`make {target}`" not in told] == []
    assert "OMNI_TEST_BUILD=1 " in made, "what is skipped without it has a target"


def yaml_blocks() -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_manifests_of_the_readme_are_valid(tmp_path: Path) -> None:
    whole, runtime = yaml_blocks()
    (tmp_path / "whole.yaml").write_text(whole)
    head = whole.split("spec:")[0].replace("minilm", "linear")
    (tmp_path / "handler.yaml").write_text(f"{head}spec:\n  source: {{path: /srv/linear}}\n{runtime}")
    done = CliRunner().invoke(omni, ["validate", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert "2 models" in done.stderr
