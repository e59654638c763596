import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

os.environ.setdefault("OMP_NUM_THREADS", "1")

from catalog_models.catalogue import Packages, dtype_of, process_spec
from runtime.children import Child, ForkServer, Frames


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    return Packages(tmp_path_factory.mktemp("packages"))


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


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Folder of published images: each model is published once."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def serve(packages, images, new_child, frames):
    """Wake a model in a process of its own."""

    async def serve(name):
        spec = await process_spec(name, packages)
        image = images / name
        if not image.exists():
            await new_child().publish(spec, await packages.source(name), image, dtype_of(name))
        child = new_child()
        await child.start(spec, image)
        child.frames = await frames.wake(child)
        return child

    return serve
