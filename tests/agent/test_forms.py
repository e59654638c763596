"""In which form the image of a model is found, kept and published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from memory.test_packing import FRAME, publish, write
from omnimodel.agent.forms import Forms
from omnimodel.agent.layout import Layout
from omnimodel.agent.needed import needs_of
from omnimodel.agent.preparation import Preparation
from omnimodel.agent.supply import forms_elsewhere
from omnimodel.api import OmniPool
from omnimodel.memory.store import Store

SPEC = {
    "publishHash": "0" * 64,
    "dtype": "auto",
    "engine": "python",
    "environment": {"requirements": []},
    "mounts": [],
    "threads": 1,
    "source": {"path": "/nowhere"},
}
PACKING = Forms("bfloat16", FRAME)
PACKED_KEY, RAW_KEY = PACKING.keys(SPEC)


def test_the_best_form_is_looked_for_first_and_the_one_for_everybody_last():
    assert (f"{'0' * 40}-bfloat16.packed1048576", f"{'0' * 40}-bfloat16") == (PACKED_KEY, RAW_KEY)
    assert Forms("bfloat16").keys(SPEC) == (RAW_KEY,)
    assert Forms("float16").dtype(SPEC) == "float16"
    assert Forms("float16").dtype({"dtype": "float32"}) == "float32"


def test_what_a_pool_may_be_served_from_is_needed_also_where_its_dtype_is_not_the_processors():
    assert needs_of([], [SPEC], [], PACKING).image_keys == {PACKED_KEY, RAW_KEY}


def fill(store: Store, *forms: str) -> dict[str, str]:
    """Publish in these forms; digests by form."""
    found = {}
    if "packed" in forms:
        found["packed"] = publish(store, PACKED_KEY).digest
    if "raw" in forms:
        staging = store.staging()
        write(staging.path)
        found["raw"] = store.commit(staging, RAW_KEY).digest
    return found


@pytest.mark.parametrize(
    ("theirs", "own", "forms", "wanted"),
    [
        pytest.param(["packed", "raw"], [], PACKING, ("theirs", "packed"), id="the better one of a store of others"),
        pytest.param(["raw"], ["packed"], PACKING, ("theirs", "raw"), id="a store of others has the raw one only"),
        pytest.param([], ["packed", "raw"], PACKING, ("own", "packed"), id="the better one of its own"),
        pytest.param([], ["raw"], PACKING, ("own", "raw"), id="its own has the raw one only"),
        pytest.param(["packed"], ["raw"], Forms("bfloat16"), ("own", "raw"), id="one who cannot decode"),
    ],
)
async def test_the_best_form_that_is_there_is_woken(tmp_path, theirs, own, forms, wanted):
    others, layout = Layout(tmp_path / "others"), Layout(tmp_path / "own")
    layout.make_kept()
    digests = {"theirs": fill(Store(others.store), *theirs), "own": fill(Store(layout.store), *own)}
    spawner = SimpleNamespace()  # nothing is published
    published: dict[str, Path] = {"catalogue": others.root}
    preparation = Preparation(layout, spawner, "cuda:0", FRAME, 1, published=published, forms=lambda: forms)
    prepared = await preparation.prepare("OmniModel default/tiny", SPEC, lambda _phase, _share: None)
    where, form = wanted
    assert prepared.image.digest == digests[where][form]
    assert prepared.image.store == ("catalogue" if where == "theirs" else "")
    assert (prepared.image.index.packed is not None) == (form == "packed")


@pytest.mark.parametrize(
    ("device", "dtype", "wanted"),
    [
        pytest.param({"type": "cpu"}, "float16", Forms("float16"), id="a pool of processors"),
        pytest.param({"type": "cuda"}, "", Forms("bfloat16", 64 << 20), id="a pool of GPUs"),
        pytest.param({"type": "cuda", "frameSize": "16Mi"}, "float16", Forms("float16", 16 << 20), id="its own frames"),
        pytest.param({"type": "cuda", "frameSize": "6Mi"}, "", Forms("bfloat16"), id="frames nothing is packed for"),
    ],
)
def test_a_pool_that_is_elsewhere_is_published_for(device, dtype, wanted):
    pool = OmniPool.model_validate({"metadata": {"name": "default"}, "spec": {"device": device}})
    assert forms_elsewhere(pool, dtype) == wanted
