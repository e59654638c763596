"""torch's checkpoints: code in them never runs, tensors are mapped, hostile archives are refused by name."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from memory.weight_files import (
    good_checkpoint,
)
from omnimodel.errors import ImageError
from omnimodel.memory.readers import checkpoint


def save(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


class Payload:
    def __reduce__(self):
        return (os.system, ("touch /tmp/omnimodel-was-here",))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_checkpoint_with_code_is_refused_and_the_code_does_not_run(tmp_path, legacy):
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.zeros(1), "x": Payload()}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ImageError, match=r"model\.pt.*weights alone"):
        checkpoint.read(path)
    assert not Path("/tmp/omnimodel-was-here").exists()


def test_a_pickle_that_is_no_checkpoint(tmp_path):
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ImageError):
        checkpoint.read(tmp_path / "model.pt")


def test_zip_bombs_are_refused_before_they_are_unpacked(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ImageError, match="unpacks to more"):
        checkpoint.read(path)


def test_compressed_and_doubled_entries_are_refused(tmp_path):
    good_checkpoint(tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good:
        entries = {entry.filename: good.read(entry) for entry in good.infolist()}
    with zipfile.ZipFile(tmp_path / "compressed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content + os.urandom(2048))
    with pytest.raises(ImageError, match="compressed"):
        checkpoint.read(tmp_path / "compressed.pt")
    with zipfile.ZipFile(tmp_path / "double.pt", "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(next(iter(entries)), b"x")
    with pytest.raises(ImageError, match="one name"):
        checkpoint.read(tmp_path / "double.pt")


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(1).expand(1 << 40), id="a terabyte by strides of zero"),
        pytest.param(torch.zeros(2, 2).to_sparse(), id="sparse"),
        pytest.param(torch.empty(3, device="meta"), id="meta"),
    ],
)
def test_tensors_without_bytes_of_their_own_are_refused(tmp_path, tensor):
    with pytest.raises(ImageError):
        checkpoint.read(save(tmp_path / "model.pt", {"weight": tensor}))


def test_containers_that_refer_to_each_other_do_not_explode(tmp_path):
    content: dict[str, object] = {"weight": torch.ones(2)}
    for _ in range(60):
        content = {"model": content, "again": content}
    assert torch.equal(checkpoint.tensors(save(tmp_path / "model.pt", content))["weight"], torch.ones(2))


def test_weights_are_found_under_the_usual_keys(tmp_path):
    weight = {"a": torch.ones(2)}
    for number, content in enumerate([weight, {"state_dict": weight, "lr": 1}, {"net": {"model": weight}}]):
        assert set(checkpoint.tensors(save(tmp_path / f"{number}.pt", content))) == {"a"}
    with pytest.raises(ImageError, match="no mapping"):
        checkpoint.tensors(save(tmp_path / "none.pt", {"config": {"layers": 2}}))


def test_a_legacy_checkpoint_is_read_too(tmp_path):
    expected = good_checkpoint(tmp_path / "model.pth", legacy=True)
    np.testing.assert_array_equal(checkpoint.tensors(tmp_path / "model.pth")["a"].numpy(), expected["a"])


def test_a_zip_checkpoint_is_mapped_and_not_copied(tmp_path):
    path = save(tmp_path / "model.pt", {"big": torch.zeros(32 << 20, dtype=torch.uint8)})
    found = checkpoint.read(path)["big"]
    smaps = Path("/proc/self/smaps").read_text()
    assert str(path) in smaps
    assert found.numel() == 32 << 20
