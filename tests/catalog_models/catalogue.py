"""Process specs of the models of the example catalogue, and the same models with ordinary weights."""

from example_models import MODELS
from runtime.children import spec

OWN = [name for name, model in MODELS.items() if model["spec"]["runtime"]["engine"] in ("python", "transformers")]
FOREIGN = [name for name in MODELS if name not in OWN]


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
