"""All readers of weight files: good files come back as they were, hostile ones are refused by name."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory.weight_files import (
    GOOD,
    READ,
    read_all,
)
from omnimodel.errors import ImageError


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_file_comes_back(tmp_path, kind):
    expected = GOOD[kind](tmp_path / "weights")
    found = READ[kind](tmp_path / "weights")
    assert set(found) == set(expected)
    for name, array in expected.items():
        tolerance = 0.03 if name == "a.weight" else 1e-3 if name == "half" else 0
        np.testing.assert_allclose(found[name].numpy(), array, atol=tolerance, rtol=0)
        assert tuple(found[name].shape) == array.shape


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("content", [b"", b"\0", b"x" * 100, b"\xff" * 4096, b"PK\3\4" + bytes(100)])
def test_what_is_another_format_is_refused(tmp_path, kind, content):
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(ImageError, match="weights"):
        dict(READ[kind](tmp_path / "weights"))


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_no_file_is_refused(tmp_path, kind):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ImageError, match=path.name):
            READ[kind](path)


@pytest.mark.parametrize("kind", GOOD)
def test_every_truncation_is_refused(tmp_path, kind):
    path = tmp_path / "weights"
    GOOD[kind](path)
    content = path.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 150)):
        path.write_bytes(content[:length])
        found = read_all(kind, path)
        # GGUF pads its end; nothing of a tensor is missing there.
        assert found is None or (kind == "gguf" and len(content) - length < 32)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["safetensors", "gguf", "npz", "ctranslate2"]))
def test_mutated_bytes_never_hurt(tmp_path, data, kind):
    path = tmp_path / "weights"
    GOOD[kind](path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["byte", "number", "cut", "insert"])):
            case "byte":
                content[position] = data.draw(st.integers(0, 255))
            case "number":
                number = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**40]))
                content[position : position + 8] = struct.pack("<Q", number)
            case "cut":
                del content[position : position + data.draw(st.integers(1, 40))]
            case "insert":
                content[position:position] = data.draw(st.binary(min_size=1, max_size=20))
        if not content:
            content = bytearray(b"\0")
    path.write_bytes(content)
    found = read_all(kind, path)
    assert found is None or found <= 100 * len(content)  # dequantized and unpacked, but no blow-up


MUTATE_CHECKPOINTS = """
import random, resource, sys
from pathlib import Path
from memory.weight_files import good_checkpoint, read_all
path = Path(sys.argv[1]) / "weights"
good_checkpoint(path, legacy=sys.argv[2] == "legacy")
good = path.read_bytes()
assert read_all("checkpoint", path)
chance = random.Random(int(sys.argv[3]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(300):
    content = bytearray(good)
    for _ in range(chance.randint(1, 5)):
        position = chance.randrange(len(content))
        what = chance.randrange(4)
        if what == 0:
            content[position] = chance.randrange(256)
        elif what == 1:
            content[position:position + 4] = chance.choice([b"\\xff" * 4, b"\\0" * 4, b"\\0\\0\\0\\x80"])
        elif what == 2:
            del content[position:position + chance.randint(1, 40)]
        else:
            content[position:position] = chance.randbytes(chance.randint(1, 20))
    path.write_bytes(content)
    found = read_all("checkpoint", path)
    assert found is None or found <= 2 * len(content), found
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 512 << 10, grown
print("unhurt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_mutated_checkpoints_never_hurt(tmp_path, form):
    """In a process of their own: this parser is not ours."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'operator'}:{root / 'tests'}"}
    command = [sys.executable, "-c", MUTATE_CHECKPOINTS, str(tmp_path), form, "5"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "unhurt"


def test_random_bytes_behind_each_magic(tmp_path):
    chance = random.Random(3)
    starts = {
        "gguf": b"GGUF\3\0\0\0",
        "ctranslate2": b"\6\0\0\0",
        "safetensors": b"\x40" + bytes(7) + b'{"',
        "npz": b"PK\3\4",
    }
    for kind, start in starts.items():
        for _ in range(100):
            path = tmp_path / kind
            path.write_bytes(start + chance.randbytes(200))
            assert read_all(kind, path) is None
