"""The example catalogue as the tests need it: its manifests, what they are published from, their process specs."""

from pathlib import Path

import yaml

from omnimodel.agent.environments import Environments
from omnimodel.agent.sources import Sources
from runtime.children import spec

CATALOG = Path(__file__).parents[2] / "examples" / "catalog"


def manifests(kind="OmniModel", folder="catalog"):
    """Every manifest of a kind by its name."""
    found = {}
    for file in sorted((CATALOG.parent / folder).glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            if document["kind"] == kind:
                found[document["metadata"]["name"]] = document
    return found


MODELS = manifests()
OWN = [name for name, model in MODELS.items() if model["spec"]["runtime"]["engine"] in ("python", "transformers")]
FOREIGN = [name for name in MODELS if name not in OWN]


class Packages:
    """What the agent fetches and builds for the models of the catalogue, each once a session."""

    def __init__(self, folder: Path) -> None:
        self._sources = Sources(folder / "sources")
        self._environments = Environments(folder / "environments")

    async def source(self, name) -> Path:
        """The file or folder that a model is published from."""
        return await self._sources.fetch(name, MODELS[name]["spec"]["source"])

    async def environment(self, name) -> list[str]:
        """Folders to search for the packages that a model asks for beside those that are there."""
        requirements = (MODELS[name]["spec"]["runtime"].get("environment") or {}).get("requirements")
        return [str(await self._environments.build(name, requirements))] if requirements else []


async def process_spec(name, packages, **more):
    """The process spec of a model."""
    model = MODELS[name]["spec"]
    runtime = model["runtime"]
    return spec(
        name,
        engine=runtime["engine"],
        task=runtime["task"],
        dtype=dtype_of(name),
        handler=runtime.get("handler"),
        options=dict(runtime.get("options") or {}),
        environment={"requirements": [], "paths": await packages.environment(name)},
        limits={"concurrency": model["limits"]["concurrency"], "requestBytes": 64 << 20},
        **more,
    )


def dtype_of(name):
    return MODELS[name]["spec"]["runtime"].get("dtype", "auto")


# Serves the same handler with weights that were loaded the ordinary way, into the process's own memory.
ORDINARY = """
import torch
from {module} import {name} as Handler
from omnimodel.runtime.sdk import Source


class Ordinary(Handler):
    loading = False

    def build(self):
        return super().build() if self.loading else None

    def publish(self, source):
        return super().publish(source) if self.loading else None

    def load(self):
        self.loading = True
        self.module = self.publish(Source(self.options["source"]))
        if self.module is not None:
            self.module = self.module.to(self.dtype).eval()
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)  # as a copying load does
        super().load()
"""
BUILT_IN = {
    "text-generation": "omnimodel.runtime.engines.transformers:TextGeneration",
    "embeddings": "omnimodel.runtime.engines.transformers:Embeddings",
}


async def ordinary_spec(name, packages, source):
    """The spec of a process without frames: what a model's answers are compared with."""
    found = await process_spec(name, packages)
    handler = found["handler"] or {"entry": BUILT_IN[found["task"]], "files": {}}
    module, _, class_name = handler["entry"].partition(":")
    text = ORDINARY.format(module=module, name=class_name)
    found["handler"] = {"entry": "ordinary:Ordinary", "files": {**handler["files"], "ordinary.py": text}}
    found["options"]["source"] = str(source)
    return found
