"""Manifests to start from: one that is right, and the same with something changed."""

from __future__ import annotations

import copy
from typing import Any

API_VERSION = "omnimodel.io/v1alpha1"
ABSENT = object()

MODEL: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "OmniModel",
    "metadata": {"name": "tiny"},
    "spec": {
        "source": {"package": {"name": "tiny-weights", "version": "1.0.2", "path": "tiny/model.safetensors"}},
        "runtime": {
            "engine": "python",
            "task": "infer",
            "handler": {"entry": "handler:Handler", "files": {"handler.py": "class Handler: ...\n"}},
        },
    },
}
TRANSFORMERS = {"engine": "transformers", "task": "text-generation"}
COMMAND = {"engine": "command", "command": ["serve", "--port", "{port}"]}
LLAMACPP = {"engine": "llamacpp"}
VLLM = {"engine": "vllm", "options": {"cacheMemory": "8Gi"}}
SGLANG = {"engine": "sglang", "options": {"cacheTokens": 65536}}
POOL: dict[str, Any] = {"apiVersion": API_VERSION, "kind": "OmniPool", "metadata": {"name": "default"}, "spec": {}}


def changed(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with fields of its spec set; names have __ where YAML has a level, and ABSENT removes."""
    result = copy.deepcopy(manifest)
    for path, value in changes.items():
        put(result["spec"], path.split("__"), value)
    return result


def put(target: Any, path: list[str], value: Any) -> None:
    """Set or remove a field below a mapping."""
    for name in path[:-1]:
        target = target.setdefault(name, {})
    if value is ABSENT:
        target.pop(path[-1], None)
    else:
        target[path[-1]] = value


def model(**changes: Any) -> dict[str, Any]:
    """The right model with something changed."""
    return changed(MODEL, **changes)


def pool(**changes: Any) -> dict[str, Any]:
    """The right pool with something changed."""
    return changed(POOL, **changes)
