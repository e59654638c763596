"""The documents name what the code can say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from omnimodel.cli import COMMANDS, omni
from omnimodel.cli.exits import ExitCode
from omnimodel.errors import Reason

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


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_is_documented(name: str) -> None:
    assert f"`omni {name}" in (ROOT / "docs/cli.md").read_text("utf-8")


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_documented(code: ExitCode) -> None:
    assert re.search(rf"^\| {int(code)} \|", (ROOT / "docs/cli.md").read_text("utf-8"), re.MULTILINE)


def test_no_registry_is_named() -> None:
    """Whoever installs it chooses where from."""
    names = [b".".join(words) for words in ((b"pypi", b"org"), (b"pythonhosted", b"org"), (b"docker", b"io"))]
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (".ci", "charts", "crds", "docs", "examples", "images", "operator", "tests"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 100
    assert [str(path) for path in files for name in names if name in path.read_bytes()] == []


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
