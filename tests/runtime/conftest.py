import os
from collections.abc import AsyncIterator

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
