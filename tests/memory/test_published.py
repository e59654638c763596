"""Stores of others: found and checked, never changed, whatever a stranger put there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from memory.test_store import flip, publish
from omnimodel.errors import ImageError
from omnimodel.memory.published import PublishedImages
from omnimodel.memory.store import Store, verify

KEY = "model-float32"


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder, with when it was changed."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        found[str(path)] = status.st_ino, status.st_mtime_ns, status.st_size
    return found


@pytest.fixture
def published(tmp_path):
    publish(Store(tmp_path), KEY)
    return PublishedImages("catalogue", tmp_path)


def folder_of(published) -> Path:
    return next((published.root / "images").iterdir())


def test_an_image_is_found_and_nothing_is_written(published, tmp_path):
    before = tree(tmp_path)
    found = published.lookup(KEY)
    verify(found)
    assert (found.store, found.path) == ("catalogue", folder_of(published))
    assert published.lookup("another-float32") is None
    assert tree(tmp_path) == before


def test_a_store_that_is_not_there_has_nothing(tmp_path):
    assert PublishedImages("catalogue", tmp_path / "none").lookup(KEY) is None
    assert not (tmp_path / "none").exists()


def replace_by_link(path: Path) -> None:
    moved = path.with_name(f"{path.name}.moved")
    path.rename(moved)
    path.symlink_to(moved)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def lead_to(published, value: object) -> None:
    (published.root / "keys" / f"{KEY}.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: shutil.rmtree(folder_of(p)), id="a key alone: half copied"),
        pytest.param(lambda p: (folder_of(p) / "index.json").unlink(), id="no index"),
        pytest.param(lambda p: (folder_of(p) / "image").unlink(), id="no image"),
        pytest.param(lambda p: os.truncate(folder_of(p) / "image", 4096), id="image cut short"),
        pytest.param(lambda p: flip(folder_of(p) / "image", 7), id="one byte of the image"),
        pytest.param(lambda p: flip(folder_of(p) / "assets/config.json", 0), id="one byte of an asset"),
        pytest.param(lambda p: (folder_of(p) / "assets/config.json").unlink(), id="an asset is missing"),
        pytest.param(lambda p: (folder_of(p) / "assets/more").write_text("x"), id="an asset too many"),
        pytest.param(lambda p: os.truncate(folder_of(p) / "assets/config.json", 1 << 42), id="an asset without end"),
        pytest.param(lambda p: (folder_of(p) / "more").mkdir(), id="a folder that does not belong"),
        pytest.param(lambda p: replace_by_link(folder_of(p)), id="the folder is a link"),
        pytest.param(lambda p: replace_by_link(folder_of(p) / "image"), id="the image is a link"),
        pytest.param(lambda p: replace_by_link(folder_of(p) / "assets"), id="the assets are a link"),
        pytest.param(lambda p: replace_by_pipe(folder_of(p) / "image"), id="the image is a pipe"),
        pytest.param(lambda p: replace_by_pipe(folder_of(p) / "index.json"), id="the index is a pipe"),
        pytest.param(lambda p: replace_by_pipe(folder_of(p) / "assets/config.json"), id="an asset is a pipe"),
        pytest.param(lambda p: replace_by_pipe(p.root / "keys" / f"{KEY}.json"), id="the key is a pipe"),
        pytest.param(lambda p: replace_by_link(p.root / "keys" / f"{KEY}.json"), id="the key is a link"),
        pytest.param(lambda p: lead_to(p, {"digest": "../../.."}), id="the key leads out"),
        pytest.param(lambda p: lead_to(p, {"digest": "0" * 64}), id="the key leads to nothing"),
        pytest.param(lambda p: lead_to(p, [1]), id="the key is a list"),
        pytest.param(lambda p: lead_to(p, "x" * (1 << 20)), id="the key is long"),
        pytest.param(lambda p: folder_of(p).rename(p.root / "images" / ("1" * 64)) and lead_to(p, {"digest": "1" * 64}),
                     id="another image under its digest"),
        pytest.param(lambda p: (folder_of(p) / "image").chmod(0o400), id="closed to models"),
    ],
)  # fmt: skip
def test_what_is_not_as_it_was_published_is_refused_and_left_alone(published, tmp_path, damage):
    damage(published)
    before = tree(tmp_path)
    with pytest.raises(ImageError) as caught:
        verify(published.lookup(KEY))
    assert str(tmp_path) in str(caught.value)
    assert tree(tmp_path) == before
