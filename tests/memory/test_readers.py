"""Readers of weight files: good files come back as they were, hostile ones are refused by name."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory.weight_files import (
    GOOD,
    READ,
    ct2_bytes,
    floats,
    good_checkpoint,
    good_npz,
    read_all,
    safetensors_bytes,
)
from omnimodel.errors import ImageError
from omnimodel.memory.readers import checkpoint, ctranslate2, gguf, npz, safetensors

F32 = struct.pack("<4f", 1, 2, 3, 4)


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
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "unhurt"


# safetensors


def header_only(body: object, content: bytes = F32) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(begin: int = 0, end: int = 16, dtype: object = "F32", shape: object = (4,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


HOSTILE_SAFETENSORS = {
    "header larger than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "header of 2^64 - 1 bytes": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "header is no JSON": header_only(b"{"),
    "header is a list": header_only([]),
    "header is nested": header_only(b"[" * 50_000),
    "name twice": header_only(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)),
    "entry is a number": header_only({"a": 1}),
    "more fields": header_only({"a": {**entry(), "more": 1}}),
    "unknown dtype": header_only({"a": entry(dtype="F4")}),
    "dtype is a list": header_only({"a": entry(dtype=["F32"])}),
    "shape larger than its bytes": header_only({"a": entry(shape=(5,))}),
    "shape smaller than its bytes": header_only({"a": entry(shape=(3,))}),
    "shape that overflows": header_only({"a": entry(shape=(1 << 62, 4, 1 << 62))}),
    "shape whose product wraps to 4": header_only({"a": entry(shape=((1 << 64) + 4,))}),
    "negative shape": header_only({"a": entry(shape=(-4, -1))}),
    "shape of floats": header_only({"a": entry(shape=(4.0,))}),
    "shape of true": header_only({"a": entry(shape=(True, 4))}),
    "shape is text": header_only({"a": entry(shape="4")}),
    "a hundred dimensions": header_only({"a": entry(shape=(1,) * 99 + (4,))}),
    "offsets before the start": header_only({"a": entry(-16, 0)}),
    "offsets turned round": header_only({"a": entry(16, 0)}),
    "offsets behind the end": header_only({"a": entry(0, 32, shape=(8,))}),
    "one offset": header_only({"a": {**entry(), "data_offsets": [0]}}),
    "overlapping": header_only({"a": entry(0, 16), "b": entry(8, 24)}, F32 * 2),
    "the same bytes twice": header_only({"a": entry(), "b": entry()}),
    "hole between tensors": header_only({"a": entry(0, 16), "b": entry(20, 36)}, F32 + b"...." + F32),
    "hole before the first": header_only({"a": entry(4, 20)}, b"...." + F32),
    "bytes behind the last": header_only({"a": entry()}, F32 + b"x"),
    "bytes of nobody": header_only({}),
}


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(HOSTILE_SAFETENSORS[name])
    with pytest.raises(ImageError, match=r"model\.safetensors"):
        safetensors.read(tmp_path / "model.safetensors")


def test_safetensors_of_every_dtype_and_at_odd_offsets(tmp_path):
    stored = {"odd": ("U8", [1], b"\7")}
    for name in ["BF16", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "U16", "U32", "U64", "F8_E4M3", "C64"]:
        stored[name] = (name, [2], bytes(2 * {"8": 1, "1": 2, "3": 4, "6": 8}[name.split("_")[0].lstrip("BFIUC")[0]]))
    stored["empty"] = ("F32", [0, 3], b"")
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(stored))
    found = safetensors.read(path)
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {n: s for n, (_, s, _) in stored.items()}
    assert found["BF16"].dtype == torch.bfloat16
    from safetensors import safe_open  # the format's own library agrees that the file is good

    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(stored)


# torch


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


# GGUF


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_file(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    content: bytes = bytes(64),
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs))))
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + content


def gguf_pair(key: bytes, kind: int, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + value


def gguf_tensor(name: bytes = b"a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return gguf_string(name) + dimensions + struct.pack("<IQ", kind, offset)


def nested_array(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 1) + bytes(4)


HOSTILE_GGUF = {
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 1": gguf_file(version=1),
    "version 4": gguf_file(version=4),
    "2^64 - 1 tensors": gguf_file(counts=((1 << 64) - 1, 0)),
    "2^63 pairs": gguf_file(counts=(0, 1 << 63)),
    "a million tensors in 100 bytes": gguf_file(counts=(1_000_000, 0)),
    "key of 2^60 bytes": gguf_file(pairs=[struct.pack("<Q", 1 << 60)]),
    "key is no UTF-8": gguf_file(pairs=[gguf_pair(b"\xff", 4, bytes(4))]),
    "key twice": gguf_file(pairs=[gguf_pair(b"k", 4, bytes(4))] * 2),
    "unknown type": gguf_file(pairs=[gguf_pair(b"k", 99, bytes(4))]),
    "text behind the end": gguf_file(pairs=[gguf_pair(b"k", 8, struct.pack("<Q", 1 << 40))]),
    "array of 2^61 numbers": gguf_file(pairs=[gguf_pair(b"k", 9, struct.pack("<IQ", 10, 1 << 61))]),
    "array of 2^62 texts": gguf_file(pairs=[gguf_pair(b"k", 9, struct.pack("<IQ", 8, 1 << 62))]),
    "array of unknown type": gguf_file(pairs=[gguf_pair(b"k", 9, struct.pack("<IQ", 77, 1) + bytes(8))]),
    "array nested a thousand deep": gguf_file(pairs=[gguf_pair(b"k", 9, nested_array(1000))]),
    "alignment 0": gguf_file(pairs=[gguf_pair(b"general.alignment", 4, struct.pack("<I", 0))]),
    "alignment 33": gguf_file(pairs=[gguf_pair(b"general.alignment", 4, struct.pack("<I", 33))]),
    "alignment is text": gguf_file(pairs=[gguf_pair(b"general.alignment", 8, gguf_string(b"32"))]),
    "tensor twice": gguf_file(tensors=[gguf_tensor(), gguf_tensor(offset=32)]),
    "unknown quantization": gguf_file(tensors=[gguf_tensor(kind=4)]),
    "quantization 2^31": gguf_file(tensors=[gguf_tensor(kind=1 << 31)]),
    "row that is no whole block": gguf_file(tensors=[gguf_tensor(shape=(33,), kind=2)]),
    "behind the end": gguf_file(tensors=[gguf_tensor(offset=64)]),
    "across the end": gguf_file(tensors=[gguf_tensor(shape=(17,))]),
    "offset 2^63": gguf_file(tensors=[gguf_tensor(offset=1 << 63)]),
    "offset not aligned": gguf_file(tensors=[gguf_tensor(offset=4)]),
    "overlapping": gguf_file(tensors=[gguf_tensor(shape=(12,)), gguf_tensor(b"b", offset=32)]),
    "shape that overflows": gguf_file(tensors=[gguf_tensor(shape=(1 << 33, 1 << 33))]),
    "zero times 2^63": gguf_file(tensors=[gguf_tensor(shape=(0, 1 << 63))]),
    "a billion dimensions": gguf_file(tensors=[gguf_string(b"a") + struct.pack("<I", 1 << 30)]),
}


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_gguf(tmp_path, name):
    (tmp_path / "model.gguf").write_bytes(HOSTILE_GGUF[name])
    with pytest.raises(ImageError, match=r"model\.gguf"):
        gguf.read(tmp_path / "model.gguf")


def test_gguf_metadata(tmp_path):
    GOOD["gguf"](tmp_path / "model.gguf")
    metadata = gguf.read(tmp_path / "model.gguf").metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "hello", "wörld"]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.5, 1.5, 2.5]
    assert metadata["good"] is True


def test_gguf_agrees_with_the_package_on_every_quantization(tmp_path):
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize

    kinds = [GGMLQuantizationType[name] for name in ["BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0"]]
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(str(path), "llama")
    for kind in kinds:
        writer.add_tensor(kind.name, quantize(floats(2, 3, 256), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = gguf.read(path)
    for tensor in GGUFReader(path).tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours[tensor.name].numpy(), expected.reshape(2, 3, 256))


def test_unpermute_undoes_what_the_converter_did():
    heads, size = 4, 6
    original = torch.arange(heads * size * 5).view(heads * size, 5)
    # Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py
    permuted = original.reshape(heads, 2, size // 2, 5).swapaxes(1, 2).reshape(original.shape)
    assert not torch.equal(permuted, original)
    assert torch.equal(gguf.unpermute(permuted, heads), original)
    assert torch.equal(gguf.unpermute(permuted[:, 0], heads), original[:, 0])


# npz


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


# CTranslate2


def ct2_variable(kind: int = 0, shape: list[int] | None = None, stored: bytes = F32) -> dict:
    return {"a": (kind, [4] if shape is None else shape, stored)}


HOSTILE_CT2 = {
    "version 4": ct2_bytes(ct2_variable(), {}, version=4),
    "unknown type": ct2_bytes(ct2_variable(kind=9), {}),
    "shape larger than its bytes": ct2_bytes(ct2_variable(shape=[5]), {}),
    "shape that overflows": ct2_bytes(ct2_variable(shape=[(1 << 32) - 1] * 8), {}),
    "two hundred dimensions": ct2_bytes(ct2_variable(shape=[1] * 200), {}),
    "alias to nothing": ct2_bytes(ct2_variable(), {"b": "c"}),
    "alias of a variable's name": ct2_bytes(ct2_variable(), {"a": "a"}),
    "bytes left over": ct2_bytes(ct2_variable(), {}) + b"x",
    "a billion variables": struct.pack("<I", 6) + b"\2\0a\0" + struct.pack("<II", 3, 1 << 30) + bytes(50),
    "name without an end": struct.pack("<I", 6) + b"\2\0ab" + struct.pack("<II", 3, 0) + bytes(4),
    "name behind the end": struct.pack("<I", 6) + b"\xff\xff" + bytes(20),
}


@pytest.mark.parametrize("name", HOSTILE_CT2)
def test_hostile_ctranslate2(tmp_path, name):
    (tmp_path / "model.bin").write_bytes(HOSTILE_CT2[name])
    with pytest.raises(ImageError, match=r"model\.bin"):
        ctranslate2.read(tmp_path / "model.bin")


def test_whisper_weights_get_the_names_of_transformers(tmp_path):
    width = 2
    square = floats(width, width)
    fused, bias = floats(3 * width, width, seed=3), floats(3 * width, seed=4)
    variables = {
        "encoder/layer_0/self_attention/linear_0/weight": (0, [6, 2], fused.tobytes()),
        "encoder/layer_0/self_attention/linear_0/bias": (0, [6], bias.tobytes()),
        "decoder/layer_1/attention/linear_1/weight": (0, [4, 2], fused[:4].tobytes()),
        "decoder/layer_1/attention/layer_norm/gamma": (0, [2], bias[:2].tobytes()),
        "decoder/layer_1/ffn/linear_0/weight": (0, [2, 2], square.tobytes()),
        "encoder/position_encodings/encodings": (0, [2, 2], square.tobytes()),
        "decoder/embeddings/weight": (0, [2, 2], square.tobytes()),
        "decoder/num_heads": (2, [], b"\6\0"),
    }
    path = tmp_path / "model.bin"
    path.write_bytes(ct2_bytes(variables, {"decoder/projection/weight": "decoder/embeddings/weight"}))
    found = ctranslate2.whisper(ctranslate2.read(path))
    assert set(found) == {
        "model.encoder.layers.0.self_attn.q_proj.weight",
        "model.encoder.layers.0.self_attn.k_proj.weight",
        "model.encoder.layers.0.self_attn.v_proj.weight",
        "model.encoder.layers.0.self_attn.q_proj.bias",
        "model.encoder.layers.0.self_attn.v_proj.bias",
        "model.decoder.layers.1.encoder_attn.k_proj.weight",
        "model.decoder.layers.1.encoder_attn.v_proj.weight",
        "model.decoder.layers.1.encoder_attn_layer_norm.weight",
        "model.decoder.layers.1.fc1.weight",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_tokens.weight",
        "proj_out.weight",
    }
    np.testing.assert_array_equal(found["model.encoder.layers.0.self_attn.v_proj.bias"].numpy(), bias[4:])
    np.testing.assert_array_equal(found["model.decoder.layers.1.encoder_attn.k_proj.weight"].numpy(), fused[:2])
    path.write_bytes(ct2_bytes(ct2_variable(), {}, spec="TransformerSpec"))
    with pytest.raises(ImageError, match="no Whisper"):
        ctranslate2.whisper(ctranslate2.read(path))


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
