"""Environments: real uv, real small packages; nothing of the interpreter is replaced or installed twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.children import until
from agent.fetching import SmallDisk
from omnimodel.agent.environments import Environments, installed
from omnimodel.errors import OmniError, Reason

SUBJECT = "OmniModel default/tiny"


@pytest.fixture
def environments(tmp_path):
    return Environments(tmp_path / "environments")


def packages(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.glob("*.dist-info")}


def imports(folder: Path, statement: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-B", "-c", statement]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


async def test_a_package_that_is_missing_is_installed_and_nothing_that_is_there(environments):
    lines: list[str] = []
    folder = await environments.build(SUBJECT, ["tiktoken==0.14.0", "numpy>=1", "torch"], lines.append)
    assert "tiktoken" in packages(folder)
    assert (
        not packages(folder)
        & {"numpy", "torch", "requests", "regex"}
        & {name.replace("-", "_") for name in installed()}
    )
    assert not (folder / "torch").exists()
    assert imports(folder, "import tiktoken; print(tiktoken.__version__)") == "0.14.0"
    assert any("tiktoken" in line for line in lines)
    assert list(folder.rglob("tiktoken/__pycache__/*.pyc"))  # the model's process cannot write it


async def test_a_first_build_with_extras_on_a_machine_that_has_cached_nothing(environments, tmp_path, monkeypatch):
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    folder = await environments.build(SUBJECT, ["tabulate[widechars]==0.9.0"])
    assert imports(folder, "import tabulate, wcwidth; print(tabulate.__version__)") == "0.9.0"


async def test_equal_sets_share_one_whatever_their_order(environments):
    first = await environments.build(SUBJECT, ["tiktoken==0.14.0", "numpy"])
    assert await Environments(environments.root).build(SUBJECT, ["numpy", "tiktoken==0.14.0", "numpy"]) == first
    assert await environments.build(SUBJECT, ["tiktoken==0.14.0"]) != first


async def test_builds_of_one_set_at_once_run_once(environments):
    lines: list[list[str]] = [[], [], []]
    folders = await asyncio.gather(
        *(environments.build(SUBJECT, ["tiktoken==0.14.0"], heard.append) for heard in lines)
    )
    assert len(set(folders)) == 1
    heard = sorted((said[1:] for said in lines), key=len)  # the first line is everybody's own
    assert heard[0], "who joins later hears what comes"
    assert all(heard[-1][-len(said) :] == said for said in heard)


async def test_two_agents_build_one_set_at_once(tmp_path):
    root = tmp_path / "environments"
    folders = await asyncio.gather(*(Environments(root).build(SUBJECT, ["tiktoken==0.14.0"]) for _ in range(2)))
    assert len(set(folders)) == 1
    assert not list(root.glob("*.part"))


async def test_nothing_is_missing(environments):
    folder = await environments.build(SUBJECT, ["numpy"])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("requirements", "said"),
    [
        pytest.param(["omnimodel-no-such-package==1.0"], "omnimodel-no-such-package", id="no such package"),
        pytest.param(["tiktoken==999.0"], "tiktoken==999.0", id="no such version"),
        pytest.param(["tiktoken==0.14.0", "tiktoken==0.9.0"], "tiktoken", id="two pins of one package"),
        pytest.param(["numpy==1.26.4"], f"numpy {installed()['numpy']}, which cannot be replaced", id="other version"),
    ],
)
async def test_what_cannot_be_resolved_is_said_in_uvs_own_words(environments, requirements, said):
    with pytest.raises(OmniError) as caught:
        await environments.build(SUBJECT, requirements)
    assert caught.value.reason == Reason.ENVIRONMENT_FAILED
    assert said in str(caught.value)
    assert SUBJECT in str(caught.value)
    assert [path.suffix for path in environments.root.iterdir()] == [".lock"]


@pytest.mark.parametrize("requirement", ["--no-binary=:all:", "-r /etc/passwd", "a\n--pre", "# nothing", " -e ."])
async def test_options_are_no_requirements(environments, requirement):
    with pytest.raises(OmniError, match="no requirement") as caught:
        await environments.build(SUBJECT, [requirement])
    assert caught.value.reason == Reason.INVALID_MANIFEST


async def test_a_build_that_nobody_waits_for_is_stopped_and_leaves_nothing(environments):
    build = asyncio.ensure_future(environments.build(SUBJECT, ["tiktoken==0.14.0"]))
    await until(lambda: any(environments.root.glob("*.part/requirements.txt")))
    build.cancel()
    with pytest.raises(asyncio.CancelledError):
        await build
    assert [path.suffix for path in environments.root.iterdir()] == [".lock"]
    assert "tiktoken" in packages(await environments.build(SUBJECT, ["tiktoken==0.14.0"]))


async def test_what_a_killed_build_left_is_built_anew(environments):
    folder = await environments.build(SUBJECT, ["tiktoken==0.14.0"])
    folder.parent.rename(folder.parent.with_suffix(".part"))
    (folder.parent.with_suffix(".part") / "environment.json").unlink()
    assert imports(await environments.build(SUBJECT, ["tiktoken==0.14.0"]), "import tiktoken; print(1)") == "1"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
async def test_a_full_disk_is_said(tmp_path):
    disk = SmallDisk(tmp_path / "small", 1)
    try:
        with pytest.raises(OmniError, match="disk is full") as caught:
            await Environments(disk.path / "environments").build(SUBJECT, ["tiktoken==0.14.0"])
        assert caught.value.reason == Reason.DISK_FULL
        assert not list(disk.path.rglob("*.part"))
    finally:
        disk.close()


async def test_environments_of_deleted_models_are_collected(environments):
    kept, gone = await environments.build(SUBJECT, ["numpy"]), await environments.build(SUBJECT, ["torch"])
    assert {item.what: item.name for item in environments.stored()} == {
        "numpy": kept.parent.name,
        "torch": gone.parent.name,
    }
    assert environments.keys([["numpy"], []]) == {kept.parent.name}
    environments.remove(gone.parent.name)
    assert kept.exists()
    assert not gone.exists()
