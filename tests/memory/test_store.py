"""The store: whole images or none, whoever is killed and however full the disk is."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omnimodel.errors import ImageError, OmniError, Reason
from omnimodel.memory.image import ImageWriter
from omnimodel.memory.store import Store, verify

FRAME = 1 << 20
OPERATOR = str(Path(__file__).parents[2] / "operator")


def write(folder, fill=1, frames=2, asset="{}"):
    with ImageWriter(folder, FRAME, dtype="float32") as writer:
        writer.add("weight", "uint8", (frames * FRAME,), bytes([fill]) * (frames * FRAME))
        (writer.assets / "config.json").write_text(asset)


def publish(store, key, **options):
    staging = store.staging()
    write(staging.path, **options)
    return store.commit(staging, key)


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {"lock"}


def test_a_published_image_is_found_by_its_key(tmp_path):
    store = Store(tmp_path)
    assert store.lookup("model-float32") is None
    ref = publish(store, "model-float32")
    assert store.lookup("model-float32") == ref
    assert Store(tmp_path).lookup("model-float32") == ref
    assert ref.path == tmp_path / "images" / ref.digest
    assert ref.image.stat().st_size == ref.bytes == 2 * FRAME
    assert (ref.assets / "config.json").read_text() == "{}"
    assert ref.image.stat().st_mode & 0o222 == 0
    assert not list((tmp_path / "staging").iterdir())


def test_one_image_for_keys_with_the_same_content(tmp_path):
    store = Store(tmp_path)
    first, second = publish(store, "one"), publish(store, "two")
    assert first == second
    assert len(store.images()) == 1
    assert not list((tmp_path / "staging").iterdir())


def test_staging_left_without_a_commit_is_gone(tmp_path):
    store = Store(tmp_path)
    with store.staging() as staging:
        write(staging.path)
    assert everything(tmp_path) == set()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda p: os.truncate(p / "image", FRAME), Reason.BAD_ARTIFACT, id="image cut short"),
        pytest.param(lambda p: flip(p / "image", FRAME + 5), Reason.DIGEST_MISMATCH, id="one byte of the image"),
        pytest.param(lambda p: flip(p / "index.json", 30), Reason.BAD_ARTIFACT, id="one byte of the index"),
        pytest.param(lambda p: (p / "index.json").unlink(), Reason.BAD_ARTIFACT, id="no index: its writer was killed"),
        pytest.param(lambda p: flip(p / "assets/config.json", 0), Reason.DIGEST_MISMATCH, id="asset changed"),
        pytest.param(lambda p: (p / "assets/late").write_text("x"), Reason.DIGEST_MISMATCH, id="asset too late"),
        pytest.param(lambda p: (p / "assets/link").symlink_to("/etc/passwd"), Reason.BAD_ARTIFACT, id="link"),
        pytest.param(lambda p: os.link(p / "image", p / "assets/twin"), Reason.BAD_ARTIFACT, id="hard link"),
        pytest.param(lambda p: os.mkfifo(p / "assets/pipe"), Reason.BAD_ARTIFACT, id="pipe"),
        pytest.param(lambda p: (p / "more").write_text("x"), Reason.BAD_ARTIFACT, id="a file that does not belong"),
    ],
)
def test_what_is_not_what_its_index_says_is_not_committed(tmp_path, damage, reason):
    store = Store(tmp_path / "store")
    staging = store.staging()
    write(staging.path)
    damage(staging.path)
    with pytest.raises(ImageError) as caught:
        store.commit(staging, "key")
    assert caught.value.reason == reason
    assert everything(tmp_path / "store") == set()


def flip(path: Path, position: int) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_verification_names_the_frame(tmp_path):
    ref = publish(Store(tmp_path), "key", frames=3)
    verify(ref)
    flip(ref.image, FRAME + 17)
    with pytest.raises(ImageError, match="frame 1 ") as caught:
        verify(ref)
    assert caught.value.reason == Reason.DIGEST_MISMATCH


def test_verification_in_the_background_can_be_stopped(tmp_path):
    ref = publish(Store(tmp_path), "key")
    flip(ref.image, 1)
    stop = threading.Event()
    stop.set()
    verify(ref, stop=stop)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: os.truncate(p / "image", 4096), id="image cut short"),
        pytest.param(lambda p: (p / "image").unlink(), id="image gone"),
        pytest.param(lambda p: flip(p / "index.json", 40), id="index damaged"),
    ],
)
def test_a_damaged_image_counts_as_not_published_and_can_be_published_again(tmp_path, damage):
    store = Store(tmp_path)
    ref = publish(store, "key")
    (ref.path / "image").chmod(0o644)
    damage(ref.path)
    assert Store(tmp_path).lookup("key") is None
    assert publish(store, "key") == ref
    verify(ref)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": "../../.."}', '{"digest": 7}'])
def test_a_damaged_key_leads_nowhere(tmp_path, text):
    store = Store(tmp_path)
    publish(store, "key")
    (tmp_path / "keys" / "key.json").write_text(text)
    assert store.lookup("key") is None
    publish(store, "key")
    assert store.lookup("key") is not None


@pytest.mark.parametrize("key", ["", "..", "../x", "a/b", ".hidden", "x" * 300, "a\n"])
def test_keys_cannot_lead_out_of_the_store(tmp_path, key):
    with pytest.raises(OmniError, match="no key"):
        Store(tmp_path).lookup(key)


def test_an_image_goes_with_the_keys_that_lead_to_it(tmp_path):
    store = Store(tmp_path)
    kept, old = publish(store, "a", fill=1), publish(store, "b", fill=2)
    publish(store, "c", fill=2)
    assert {image.digest: image.keys for image in store.stored()} == {kept.digest: {"a"}, old.digest: {"b", "c"}}
    assert store.remove(old.digest, kept_keys={"c"}) == 0
    assert store.lookup("b") == old
    assert store.remove(old.digest, kept_keys={"a"}) >= old.bytes
    assert store.lookup("b") is None
    assert store.lookup("a") == kept
    assert everything(tmp_path) == {name for name in everything(tmp_path) if kept.digest in name} | {"keys/a.json"}


def test_what_is_stored_says_whose_it_is_and_when_it_was_used(tmp_path):
    store = Store(tmp_path)
    staging = store.staging()
    write(staging.path)
    store.commit(staging, "key", "default/tiny (float32)")
    os.utime(tmp_path / "keys" / "key.json", (1000, 1000))
    (image,) = store.stored()
    assert (image.what, image.used_seconds) == ("default/tiny (float32)", 1000)
    assert image.size_bytes >= 2 * FRAME
    store.lookup("key")
    assert store.stored()[0].used_seconds > 1000


PUBLISHER = """
import sys
from omnimodel.memory.image import ImageWriter
from omnimodel.memory.store import Store
store = Store(sys.argv[1])
staging = store.staging()
with ImageWriter(staging.path, 1 << 20) as writer:
    print("go", flush=True)
    for number in range(8):
        writer.add(f"t{number}", "uint8", (1 << 19,), bytes([number]) * (1 << 19))
print(store.commit(staging, sys.argv[2]).digest, flush=True)
"""


def publisher(root: Path, key: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": OPERATOR}
    command = [sys.executable, "-c", PUBLISHER, str(root), key]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def test_two_processes_publish_the_same_at_once(tmp_path):
    store = Store(tmp_path)
    children = [publisher(tmp_path, "key") for _ in range(3)]
    digests = set()
    for child in children:
        output, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
        digests.add(output.split()[-1])
    assert digests == {store.lookup("key").digest}
    verify(store.lookup("key"))
    assert not list((tmp_path / "staging").iterdir())


def test_a_living_publisher_is_not_swept_by_another(tmp_path):
    store = Store(tmp_path)
    staging = store.staging()
    child = publisher(tmp_path, "other")
    assert child.communicate(timeout=60)[0]
    write(staging.path)
    assert store.commit(staging, "key")


def test_publishers_killed_at_random_moments_leave_nothing(tmp_path):
    chance = random.Random(7)
    whole = 0
    for _ in range(20):
        child = publisher(tmp_path, "key")
        assert child.stdout.readline() == "go\n"
        # Killed at a random byte: when its files together have that many.
        goal_bytes = chance.randrange(5 << 20)
        while child.poll() is None:
            if sum(size_of(path) for path in (tmp_path / "staging").glob("*/image")) >= goal_bytes:
                child.kill()
                break
        child.wait(30)
        child.stdout.close()
        child.stderr.close()
        store = Store(tmp_path)  # the next start
        assert not list((tmp_path / "staging").iterdir())
        ref = store.lookup("key")
        if ref is not None:
            verify(ref)
            whole += 1
            (image,) = store.stored()
            store.remove(image.digest)
    assert whole < 20


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_killed_between_image_and_key_is_published_again(tmp_path):
    store = Store(tmp_path)
    ref = publish(store, "key")
    (tmp_path / "keys" / "key.json").unlink()
    assert store.lookup("key") is None
    assert publish(store, "key") == ref


FILLING = """
import sys, resource, signal
from omnimodel.errors import OmniError
from omnimodel.memory.image import ImageWriter
from omnimodel.memory.store import Store
store = Store(sys.argv[1])
limit = int(sys.argv[2])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with store.staging() as staging:
        with ImageWriter(staging.path, 1 << 20) as writer:
            for number in range(16):
                writer.add(f"t{number}", "uint8", (1 << 20,), bytes(1 << 20))
        store.commit(staging, "key")
except OmniError as error:
    print(error.reason, error)
"""


def test_a_file_over_the_limit_is_a_full_disk_and_leaves_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": OPERATOR}
    command = [sys.executable, "-c", FILLING, str(tmp_path), str(3 << 20)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert result.stdout.startswith("DiskFull")
    assert everything(tmp_path) == set()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("size_kib", [64, 5 << 10, 16 << 10, (16 << 10) + 4])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, size_kib):
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(mount)], check=True)
    try:
        environment = {**os.environ, "PYTHONPATH": OPERATOR}
        command = [sys.executable, "-c", FILLING, str(mount), "0"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
        assert result.stdout.startswith("DiskFull"), result.stdout
        assert str(mount) in result.stdout
        assert everything(mount) == set()
        assert not list((mount / "staging").iterdir())
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_index_of_a_hostile_publisher_is_owned_by_the_agent_afterwards(tmp_path):
    store = Store(tmp_path)
    staging = store.staging()
    write(staging.path)
    if os.geteuid() == 0:
        for path in [staging.path, *staging.path.rglob("*")]:
            os.chown(path, 12345, 12345)
    ref = store.commit(staging, "key")
    for path in [ref.path, *ref.path.rglob("*")]:
        assert path.stat().st_uid == os.geteuid()
    assert json.loads((ref.path / "index.json").read_text())["digest"] == ref.digest
