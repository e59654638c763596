"""The recipe of the images: its commands run here as they stand in it, on an interpreter with pip, as a base image has.

What takes a builder of images is not tried: the instructions themselves, and copies between stages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREFIX = "/opt/omnimodel"
REACHING = ("PIP_", "UV_", "SSL_", "REQUESTS_", "HTTP", "http", "NO_PROXY", "no_proxy")  # how packages are reached

pytestmark = [pytest.mark.slow]


def commands(stage: str) -> list[str]:
    """The RUN instructions of a stage."""
    text = re.sub(r"^#.*\n", "", (ROOT / "images/Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    stages = {part.split()[2]: part for part in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]}
    return re.findall(r"^RUN (.*)$", stages[stage], flags=re.MULTILINE)


def copied(stage: str) -> list[str]:
    """What a stage copies of the repository."""
    text = (ROOT / "images/Containerfile").read_text()
    part = text.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0]
    return [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", part, flags=re.MULTILINE) for name in line.split()
    ]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    """The stage `build`, done in a folder; runs a further command there."""
    folder = tmp_path_factory.mktemp("image")
    source, target = folder / "src", folder / "opt"
    subprocess.run([Path(sys.prefix, "bin/uv"), "venv", "--quiet", "--seed", folder / "base"], check=True)
    source.mkdir()
    for name in copied("build"):
        place = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(place, source / name, ignore=ignore) if place.is_dir() else shutil.copy(place, source / name)
    base = {name: value for name, value in os.environ.items() if name.startswith(REACHING)}
    environment = {**base, "PATH": f"{folder}/base/bin:/usr/bin:/bin", "HOME": str(folder), "UV_LINK_MODE": "copy"}

    def run(command: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", command.replace(PREFIX, str(target))],
            check=False, cwd=source, env=environment, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    for command in commands("build"):
        run(command)
    return run


def test_the_operators_image_has_the_command_with_what_it_needs_and_no_torch(build):
    assert "operator" in build(f"{PREFIX}/bin/omni --help")
    found = build(f"{PREFIX}/bin/python -c 'import kopf, kubernetes, omnimodel.controllers.kubernetes'")
    assert found == ""
    named = build(f"uv pip list --python {PREFIX} --format freeze")
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE))
    have = dict(line.split("==") for line in named.splitlines() if "==" in line)
    assert "torch" not in have
    assert {name: version for name, version in have.items() if name in pins} == {
        name: pins[name] for name in have if name in pins
    }
    assert set(have) - set(pins) == {"omnimodel"}


def test_the_agents_image_gets_the_pinned_versions(build):
    (command,) = commands("build-agent")
    would = build(command.replace("${EXTRAS}", "agent,cuda").replace("uv pip install", "uv pip install --dry-run"))
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE))
    added = dict(re.findall(r"^ \+ ([a-z0-9-]+)==(\S+)", would, flags=re.MULTILINE))
    assert {"torch", "transformers", "cuda-bindings"} <= set(added)
    assert {name: version for name, version in added.items() if pins.get(name) != version} == {}
