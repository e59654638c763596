"""Packed images in stores: what they take, what comes back, and what is checked of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from memory.codec_values import normal
from memory.test_image import HOSTILE, index_body, sealed
from memory.test_store import flip
from omnimodel.errors import ImageError, Reason
from omnimodel.memory import packing
from omnimodel.memory.codec_file import unpack
from omnimodel.memory.image import ImageWriter, parse_index, read_index
from omnimodel.memory.packing import pack_folder
from omnimodel.memory.published import PublishedImages
from omnimodel.memory.store import Store, verify

FRAME = 1 << 20
DIGESTED = 1 << 19
PACKED = {"bytes": 5000, "frameBytes": 1 << 20, "frames": ["2" * 64, "3" * 64]}


def write(folder: Path, *, weights: int = 900_000, floats: int = 100_000) -> bytes:
    """An image of bf16 weights, and of floats that stay as they are; its bytes."""
    with ImageWriter(folder, DIGESTED, dtype="bfloat16") as writer:
        if weights:
            writer.add("weight", "bfloat16", (weights,), normal(weights).tobytes())
        writer.add("scale", "float32", (floats,), np.random.default_rng(1).normal(size=floats).astype("f4").tobytes())
        (writer.assets / "config.json").write_text("{}")
    return (folder / "image").read_bytes()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def publish(store: Store, key: str):
    staging = store.staging()
    write(staging.path)
    pack_folder(staging.path, FRAME)
    return store.commit(staging, key)


def test_a_packed_image_takes_less_and_holds_the_same_bytes(tmp_path, store):
    body = write(tmp_path / "raw")
    raw = read_index(tmp_path / "raw")
    ref = publish(store, "key")
    done: list[tuple[int, int]] = []
    assert pack_folder(tmp_path / "raw", FRAME, progress=lambda *said: done.append(said)) == ref.index
    assert done == sorted(done)
    assert len(done) > 3
    assert done[-1] == (ref.bytes, ref.bytes)
    assert (ref.bytes, ref.index.tensors, ref.index.frames) == (raw.bytes, raw.tensors, raw.frames)
    assert ref.digest != raw.digest
    assert ref.index.stored_bytes == ref.image.stat().st_size < 0.8 * len(body)
    assert sorted(os.listdir(ref.path)) == ["assets", "image.packed", "index.json"]
    assert store.stored()[0].size_bytes < 0.85 * len(body)
    assert b"".join(part.tobytes() for _, part in unpack(str(ref.image))) == body
    verify(ref)
    assert Store(store.root).lookup("key") == ref


def test_an_image_that_would_hardly_get_smaller_stays_as_it_is(tmp_path, monkeypatch):
    for name, parts in {"floats": {"weights": 0}, "mostly floats": {"weights": 70_000, "floats": 600_000}}.items():
        write(tmp_path / name, **parts)
        before = read_index(tmp_path / name)
        monkeypatch.setattr(packing, "pack", lambda *_: pytest.fail("it was packed"))
        assert pack_folder(tmp_path / name, FRAME) == before == read_index(tmp_path / name)
        assert (tmp_path / name / "image").exists()


def test_an_image_without_weights_stays_as_it_is(tmp_path):
    ImageWriter(tmp_path, DIGESTED).close()
    assert pack_folder(tmp_path, FRAME).packed is None


def test_a_damaged_frame_is_named(store):
    ref = publish(store, "key")
    flip(ref.image, DIGESTED + 5)
    with pytest.raises(ImageError, match="frame 1") as caught:
        verify(ref)
    assert caught.value.reason is Reason.DIGEST_MISMATCH


def test_one_that_is_cut_short_or_of_another_image_is_thrown_away(tmp_path, store):
    ref = publish(store, "key")
    os.truncate(ref.image, ref.index.stored_bytes - 4096)
    assert store.lookup("key") is None

    staging = store.staging()  # whole, and packed for other frames than its index says
    write(staging.path)
    pack_folder(staging.path, FRAME)
    index = json.loads((staging.path / "index.json").read_text())
    index["packed"]["frameBytes"] *= 2
    (staging.path / "index.json").write_bytes(sealed(index))
    with pytest.raises(ImageError, match="another image than its index says"):
        store.commit(staging, "key")
    assert store.stored() == []


def test_an_image_is_there_in_one_form_only(tmp_path, store):
    staging = store.staging()
    write(tmp_path / "raw")
    write(staging.path)
    pack_folder(staging.path, FRAME)
    shutil.copy(tmp_path / "raw" / "image", staging.path)
    with pytest.raises(ImageError, match=r"holds assets, image\.packed, index\.json and nothing else"):
        store.commit(staging, "key")


def test_a_store_of_others_is_read_in_both_forms(store):
    ref = publish(store, "key")
    found = PublishedImages("catalogue", store.root).lookup("key")
    assert (found.digest, found.image) == (ref.digest, ref.image)
    verify(found)
    ref.image.with_name("image").write_bytes(b"more")
    with pytest.raises(ImageError, match="none of the image's files"):
        PublishedImages("catalogue", store.root).lookup("key")


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(None, id="nothing"),
        pytest.param({**PACKED, "extra": 1}, id="unknown field"),
        pytest.param({**PACKED, "bytes": -1}, id="negative length"),
        pytest.param({**PACKED, "bytes": 5000.0}, id="length is a float"),
        pytest.param({**PACKED, "frameBytes": True}, id="frame is true"),
        pytest.param({**PACKED, "frames": ["2" * 64]}, id="a digest too few"),
        pytest.param({**PACKED, "frames": ["2" * 64, "../image"]}, id="no digest"),
    ],
)
def test_a_hostile_index_of_one_is_refused(packed):
    assert parse_index(sealed(index_body(packed=PACKED)), "index").stored_bytes == 5000
    with pytest.raises(ImageError, match=r"packed|frames do not cover"):
        parse_index(sealed(index_body(packed=packed)), "index")
    for body in HOSTILE.values():
        with pytest.raises(ImageError):
            parse_index(sealed({**body, "packed": PACKED}), "index")
