"""The image format: what is written comes back, and no index out of a model's process can hurt its reader."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnimodel.errors import ImageError
from omnimodel.memory.image import ITEM_BYTES, ImageWriter, digest_of, parse_index, read_index

FRAME = 8192


def write(folder, tensors=None, frame_bytes=FRAME, **options):
    writer = ImageWriter(folder, frame_bytes, dtype="float32", metadata={"engine": "python"}, **options)
    for names, dtype, shape, content in tensors or [
        (["a.weight", "tied"], "float32", (2, 3), bytes(range(24))),
        (["b"], "bfloat16", (5000,), b"\x07" * 10000),
        (["empty"], "int64", (0, 4), b""),
        (["scalar"], "bool", (), b"\x01"),
    ]:
        writer.add(names, dtype, shape, content)
    (writer.assets / "deep").mkdir(exist_ok=True)
    (writer.assets / "deep" / "tokenizer.json").write_text("{}")
    return writer.close()


def test_what_was_written_comes_back(tmp_path):
    index = write(tmp_path / "image")
    assert read_index(tmp_path / "image") == index
    assert [tensor.names for tensor in index.tensors] == [("a.weight", "tied"), ("b",), ("empty",), ("scalar",)]
    image = (tmp_path / "image" / "image").read_bytes()
    assert len(image) == index.bytes == 12288
    for tensor in index.tensors:
        assert tensor.offset % 64 == 0
    b = index.tensors[1]
    assert image[b.offset : b.offset + b.bytes] == b"\x07" * 10000
    assert index.frames == tuple(
        hashlib.sha256(image[start : start + FRAME]).hexdigest() for start in range(0, len(image), FRAME)
    )
    assert index.assets[0].path == "deep/tokenizer.json"
    assert index.weights_bytes == 24 + 10000 + 1


def test_an_image_without_weights_has_no_frames(tmp_path):
    writer = ImageWriter(tmp_path, FRAME)
    writer.close()
    index = read_index(tmp_path)
    assert (index.bytes, index.frames) == (0, ())


def test_the_digest_covers_weights_names_and_assets(tmp_path):
    digests = {write(tmp_path / "one").digest, write(tmp_path / "same").digest}
    assert len(digests) == 1
    digests.add(write(tmp_path / "weights", [(["a"], "uint8", (1,), b"\x00")]).digest)
    digests.add(write(tmp_path / "other", [(["a"], "uint8", (1,), b"\x01")]).digest)
    digests.add(write(tmp_path / "name", [(["b"], "uint8", (1,), b"\x01")]).digest)
    writer = ImageWriter(tmp_path / "asset", FRAME, dtype="float32", metadata={"engine": "python"})
    writer.add("b", "uint8", (1,), b"\x01")
    digests.add(writer.close().digest)
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("names", "dtype", "shape", "content"),
    [
        pytest.param(["a"], "float32", (2,), b"1234567", id="too few bytes"),
        pytest.param(["a"], "float33", (2,), b"12345678", id="unknown dtype"),
        pytest.param(["a"], "float32", (-2,), b"", id="negative size"),
        pytest.param([], "uint8", (1,), b"1", id="no name"),
        pytest.param([""], "uint8", (1,), b"1", id="empty name"),
        pytest.param(["a", "a"], "uint8", (1,), b"1", id="one name twice"),
    ],
)
def test_the_writer_refuses_what_a_reader_would(tmp_path, names, dtype, shape, content):
    writer = ImageWriter(tmp_path, FRAME)
    with pytest.raises(ImageError):
        writer.add(names, dtype, shape, content)
    writer.abort()


def test_the_writer_refuses_a_name_of_another_tensor(tmp_path):
    writer = ImageWriter(tmp_path, FRAME)
    writer.add("a", "uint8", (1,), b"1")
    with pytest.raises(ImageError, match="twice"):
        writer.add(["b", "a"], "uint8", (1,), b"1")
    writer.abort()


def test_leaving_with_an_error_leaves_no_index(tmp_path):
    with pytest.raises(ImageError), ImageWriter(tmp_path, FRAME) as writer:
        writer.add("a", "uint8", (2,), b"1")
    with pytest.raises(ImageError):
        read_index(tmp_path)


def test_assets_may_not_lead_out_of_the_image(tmp_path):
    writer = ImageWriter(tmp_path, FRAME)
    (writer.assets / "shadow").symlink_to("/etc/shadow")
    with pytest.raises(ImageError, match="plain files"):
        writer.close()


def sealed(body: dict) -> bytes:
    """The index with a digest that fits: what a hostile publisher would write."""
    body = {**body, "digest": ""}
    text = json.dumps(
        {key: value for key, value in body.items() if key != "digest"}, sort_keys=True, separators=(",", ":")
    )
    return json.dumps({**body, "digest": hashlib.sha256(text.encode()).hexdigest()}).encode()


def tensor(**changes) -> dict:
    return {"names": ["a"], "dtype": "uint8", "shape": [4096], "offset": 0, "bytes": 4096, **changes}


def index_body(**changes) -> dict:
    return {
        "format": 1,
        "bytes": 8192,
        "frameBytes": 4096,
        "dtype": "float32",
        "tensors": [tensor(), tensor(names=["b"], offset=4096)],
        "frames": ["0" * 64, "1" * 64],
        "assets": [],
        "metadata": {},
        **changes,
    }


def test_the_table_of_hostile_indices_starts_from_a_good_one():
    index = parse_index(sealed(index_body()), "index")
    assert digest_of(index) == index.digest


HOSTILE = {
    "other format": index_body(format=2),
    "format is true": index_body(format=True),
    "unknown field": index_body(extra=1),
    "negative length": index_body(bytes=-4096),
    "length of no whole page": index_body(bytes=8193),
    "length is a float": index_body(bytes=8192.0),
    "petabytes": index_body(bytes=1 << 60),
    "frames of zero bytes": index_body(frameBytes=0),
    "frames of no whole page": index_body(frameBytes=4095),
    "a frame too few": index_body(frames=["0" * 64]),
    "a frame too many": index_body(frames=["0" * 64] * 3),
    "a frame that is no digest": index_body(frames=["0" * 64, "../../etc/passwd"]),
    "a digest in capitals": index_body(frames=["0" * 64, "A" * 64]),
    "tensors overlap": index_body(tensors=[tensor(), tensor(names=["b"], offset=4032)]),
    "tensors in another order": index_body(tensors=[tensor(offset=4096), tensor(names=["b"])]),
    "behind the end": index_body(tensors=[tensor(offset=8192)]),
    "across the end": index_body(tensors=[tensor(offset=4160)]),
    "negative offset": index_body(tensors=[tensor(offset=-64)]),
    "not aligned": index_body(tensors=[tensor(offset=4)]),
    "more bytes than the shape": index_body(tensors=[tensor(bytes=4095)]),
    "negative size": index_body(tensors=[tensor(shape=[-1], bytes=-1)]),
    "two negative sizes": index_body(tensors=[tensor(shape=[-64, -64])]),
    "size that overflows 64 bits": index_body(tensors=[tensor(shape=[1 << 40] * 15)]),
    "a thousand dimensions": index_body(tensors=[tensor(shape=[1] * 1000)]),
    "unknown dtype": index_body(tensors=[tensor(dtype="object")]),
    "no name": index_body(tensors=[tensor(names=[])]),
    "name is a number": index_body(tensors=[tensor(names=[1])]),
    "name of a megabyte": index_body(tensors=[tensor(names=["x" * (1 << 20)])]),
    "name with a newline": index_body(tensors=[tensor(names=["a\nb"])]),
    "one name twice": index_body(tensors=[tensor(), tensor(offset=4096)]),
    "tensors is an object": index_body(tensors={}),
    "metadata is a list": index_body(metadata=[]),
    "asset above the folder": index_body(assets=[{"path": "../x", "bytes": 1, "sha256": "0" * 64}]),
    "asset at the root": index_body(assets=[{"path": "/etc/passwd", "bytes": 1, "sha256": "0" * 64}]),
    "asset twice": index_body(assets=[{"path": "x", "bytes": 1, "sha256": "0" * 64}] * 2),
    "not a field": {key: value for key, value in index_body().items() if key != "frames"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_index(name):
    with pytest.raises(ImageError, match=r"store/index\.json"):
        parse_index(sealed(HOSTILE[name]), "store/index.json")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"[" * 200_000, id="nested a hundred thousand deep"),
        pytest.param(b'{"bytes": ' + b"9" * 100_000 + b"}", id="number of a hundred thousand digits"),
        pytest.param(b'{"bytes": NaN}', id="NaN"),
        pytest.param(b'{"bytes": 1e999}', id="infinity"),
        pytest.param(b'{"bytes": 1, "bytes": 2}', id="a key twice"),
        pytest.param(json.dumps({**index_body(), "digest": "0" * 64}).encode(), id="digest of something else"),
    ],
)
def test_text_that_is_no_index(text):
    with pytest.raises(ImageError, match=r"store/index\.json"):
        parse_index(text, "store/index.json")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_index_is_refused(data):
    text = bytearray(sealed(index_body(metadata={"task": "infer"})))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(text) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                text[position] = data.draw(st.integers(0, 255))
            case "cut":
                del text[position : position + data.draw(st.integers(1, 50))]
            case "insert":
                text[position:position] = data.draw(st.binary(min_size=1, max_size=20))
        if not text:
            break
    try:
        index = parse_index(bytes(text), "index")
    except ImageError:
        return
    assert index == parse_index(sealed(index_body(metadata={"task": "infer"})), "index")  # only spaces changed


def test_every_truncation_is_refused(tmp_path):
    text = sealed(index_body())
    for length in range(0, len(text) - 1, 7):
        with pytest.raises(ImageError):
            parse_index(text[:length], "index")


def test_image_shorter_than_its_index_says(tmp_path):
    write(tmp_path)
    os.truncate(tmp_path / "image", 4096)
    with pytest.raises(ImageError, match="4096 bytes"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", ["image", "index.json"])
def test_links_and_pipes_are_no_image(tmp_path, name):
    write(tmp_path / "image")
    path = tmp_path / "image" / name
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(ImageError):
        read_index(tmp_path / "image")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ImageError):  # and does not wait for a writer
        read_index(tmp_path / "image")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4)), max_size=12
    ),
    frame_pages=st.integers(1, 3),
)
def test_any_tensors_come_back(tmp_path_factory, tensors, frame_pages):
    folder = tmp_path_factory.mktemp("image")
    writer = ImageWriter(folder, frame_pages * 4096)
    contents = []
    for number, (dtype, shape) in enumerate(tensors):
        size_bytes = ITEM_BYTES[dtype]
        for size in shape:
            size_bytes *= size
        contents.append(os.urandom(size_bytes))
        writer.add(f"t{number}", dtype, shape, contents[-1])
    index = writer.close()
    assert read_index(folder) == index
    image = (folder / "image").read_bytes()
    for entry, content in zip(index.tensors, contents, strict=True):
        assert image[entry.offset : entry.offset + entry.bytes] == content
