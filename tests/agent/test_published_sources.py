"""Sources that others fetched and sealed: taken from there, or told and fetched anew; nothing there is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.fetching import SUBJECT, wheel
from agent.package_index import PackageIndex
from memory.test_published import replace_by_link, replace_by_pipe, tree
from memory.test_store import flip
from omnimodel.agent.origins import Origins
from omnimodel.agent.sources import Sources
from omnimodel.api import PoolSources

SOURCE = {"package": {"name": "tiny-weights", "version": "1.0", "path": "tiny_weights"}}
KEY = Sources.key(SOURCE)


@pytest.fixture
def index(tmp_path):
    wheel(tmp_path / "shelf")
    with PackageIndex(tmp_path / "shelf") as found:
        yield found


def origins(index) -> Origins:
    found = Origins()
    found.follow(PoolSources(package_index=f"{index.url}/simple"))
    return found


def content(published: Path) -> Path:
    return published / "fetched" / KEY / "content" / "tiny_weights" / "__init__.py"


def mark(published: Path, **changes: object) -> None:
    marker = published / "fetched" / KEY / "fetched.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **changes}))


async def test_what_is_sealed_is_taken_from_there_and_what_is_not_is_fetched(tmp_path, index):
    published, told = tmp_path / "published", []
    await Sources(published, origins(index)).fetch(SUBJECT, SOURCE)
    asked = len(index.asked)
    own = await Sources(tmp_path / "first", origins(index), [published], told.append).fetch(SUBJECT, SOURCE)
    assert own.is_relative_to(tmp_path / "first")
    assert len(index.asked) > asked
    assert Sources(published).seal(KEY) == Sources(published).seal(KEY)
    asked, before = len(index.asked), tree(published)
    found = await Sources(tmp_path / "second", origins(index), [tmp_path / "none", published], told.append).fetch(
        SUBJECT, SOURCE
    )
    assert found == content(published).parent
    assert (len(index.asked), tree(published), told) == (asked, before, [])
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: flip(content(p), 0), id="one byte"),
        pytest.param(lambda p: content(p).unlink(), id="a file is missing"),
        pytest.param(lambda p: content(p).with_name("more").write_text("x"), id="a file too many"),
        pytest.param(lambda p: replace_by_link(content(p)), id="a link"),
        pytest.param(lambda p: replace_by_pipe(content(p)), id="a pipe"),
        pytest.param(lambda p: replace_by_link(content(p).parent), id="a folder that is a link"),
        pytest.param(lambda p: mark(p, inside="../../../../etc"), id="it leads out"),
        pytest.param(lambda p: mark(p, inside="/etc"), id="it leads elsewhere"),
        pytest.param(lambda p: mark(p, inside=7), id="it leads nowhere"),
        pytest.param(lambda p: (p / "fetched" / KEY / "fetched.json").write_text("{"), id="a torn marker"),
        pytest.param(lambda p: os.truncate(p / "fetched" / KEY / "fetched.json", 1 << 40), id="a marker without end"),
    ],
)
async def test_what_is_not_as_it_was_sealed_is_told_and_fetched_anew(
    tmp_path, index, damage: Callable[[Path], object]
) -> None:
    published, told = tmp_path / "published", []
    await Sources(published, origins(index)).fetch(SUBJECT, SOURCE)
    Sources(published).seal(KEY)
    damage(published)
    before = tree(published)
    found = await Sources(tmp_path / "own", origins(index), [published], told.append).fetch(SUBJECT, SOURCE)
    assert found.is_relative_to(tmp_path / "own")
    assert str(published) in str(told[0])
    assert "fetched into the agent's own store" in told[0].cure
    assert tree(published) == before
