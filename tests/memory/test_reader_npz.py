"""numpy's archives: good ones come back, hostile ones are refused by name."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from memory.weight_files import (
    F32,
    good_npz,
)
from omnimodel.errors import ImageError
from omnimodel.memory.readers import npz


def npz_file(path: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(header: str, content: bytes = F32, version: bytes = b"\1\0") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + content


HOSTILE_NPY = {
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (4,), }"),
    "shape larger than its bytes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }"),
    "terabytes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1024), }"),
    "negative shape": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,), }"),
    "two negative sizes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -2), }"),
    "text": npy("{'descr': '<U1', 'fortran_order': False, 'shape': (4,), }"),
    "records": npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }"),
    "items of no bytes": npy("{'descr': '|V0', 'fortran_order': False, 'shape': (4,), }"),
    "code in the header": npy("__import__('os').system('true')"),
    "version 9": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", version=b"\x09\0"),
    "no magic": b"x" * 200,
    "big-endian": npy("{'descr': '>f4', 'fortran_order': False, 'shape': (4,), }"),
}


@pytest.mark.parametrize("name", HOSTILE_NPY)
def test_hostile_npz(tmp_path, name):
    with pytest.raises(ImageError, match=r"model\.npz"):
        dict(npz.read(npz_file(tmp_path / "model.npz", a=HOSTILE_NPY[name])))


def test_an_archive_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path):
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (67108864,), }"
    path = npz_file(tmp_path / "model.npz", a=npy(header, bytes(64 << 20)))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ImageError, match="unpacks to more"):
        npz.read(path)


def test_a_compressed_archive_is_read(tmp_path):
    expected = good_npz(tmp_path / "model.npz", compressed=True)
    found = npz.read(tmp_path / "model.npz")
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), array)
