"""Lets a model compute behind the copy of its image: each part of it waits for its own bytes.

Wrong bytes must never be computed with, so that a part is waited for alone only in architectures whose code was read
for it: every weight is used by the module that has it, and by none before that one is called. All others begin when
the whole image is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from omnimodel.memory.devices import Window
    from omnimodel.memory.image import Index

# Source: transformers/models/*/modeling_*.py; an embedding, layers, a norm and a head, called one after the other.
LAYERED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Arcee", "Cohere", "Cohere2", "Exaone4", "Gemma", "Gemma3", "Glm", "Glm4", "Granite", "Helium", "Llama",
        "Ministral", "Mistral", "Mixtral", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Phi", "Phi3", "Qwen2", "Qwen2Moe",
        "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2",
    )
)  # fmt: skip


def wait_before_use(module: torch.nn.Module, index: Index, window: Window) -> None:
    """Have every forward pass wait for the bytes that it is about to read.

    Args:
        module: bound to the window.
        index: of the image.
        window: into which it is being copied when the model computes.
    """
    kind = type(module)
    if kind.__name__ not in LAYERED or not kind.__module__.startswith("transformers.models."):
        module.register_forward_pre_hook(lambda *_: window.settle())
        return
    parts = dict(_parts(module))
    ends = dict.fromkeys(parts, 0)
    for entry in index.tensors:
        for name in entry.names:
            owner = max((path for path in parts if name.startswith(path and f"{path}.")), key=len)
            ends[owner] = max(ends[owner], entry.offset + entry.bytes)
    for path, part in parts.items():
        part.register_forward_pre_hook(partial(_wait, window, ends[path]))


def _wait(window: Window, end_offset: int, *_: Any) -> None:
    window.wait(end_offset)


def _parts(module: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers, what lies beside them, and the whole, which waits for what is of none of these."""
    layers = [f"model.layers.{number}" for number in range(len(module.model.layers))]
    yield from ((path, module.get_submodule(path)) for path in layers)
    for path, part in module.named_modules():
        if not any(part.children()) and not path.startswith("model.layers."):
            yield path, part
    yield "", module
