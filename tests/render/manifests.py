"""Models and pools for rendering, and what their namespaces have."""

from __future__ import annotations

from typing import Any

from api.builders import API_VERSION, changed
from omnimodel.api import OmniModel, OmniPool, parse

CONFIG = {
    "configmaps": {
        "settings": {"language": b"en"},
        "handler": {"handler.py": b"class Handler: ...\n", "table.bin": b"\xff\x00"},
    },
    "secrets": {"hub": {"token": b"hunter2", "other": b"x"}},
}
METADATA = {"name": "tiny", "namespace": "search", "uid": "0d9f5a1c-3f9e-4e55-9a0e-1b8f1a6f1d2b", "generation": 3}
PYTHON: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "OmniModel",
    "metadata": METADATA,
    "spec": {
        "servedNames": ["Tiny/Model:1b", {"name": "tiny:brief", "defaults": {"max_tokens": 8}, "listed": False}],
        "capabilities": ["infer"],
        "metadata": {"owner": "search"},
        "source": {"package": {"name": "tiny-weights", "version": "1.0.2", "sha256": "a" * 64, "path": "tiny/model.safetensors"}},
        "runtime": {
            "engine": "python",
            "task": "infer",
            "handler": {"entry": "handler:Handler", "files": {"handler.py": "class Handler: ...\n"}},
            "environment": {"requirements": ["tiktoken==0.11.0", "numpy==2.3.1"]},
            "env": {
                "LANGUAGE": {"configMapKeyRef": {"name": "settings", "key": "language"}},
                "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
                "MODE": "fast",
            },
            "dtype": "float32",
            "options": {"depth": 4},
        },
        "resources": {"deviceMemory": "600Mi", "hostMemory": "1Gi", "cpu": 1.5},
        "residency": {"priority": "high", "minResident": "30s", "idleAfter": "15m", "idleTier": "cold", "preload": True},
        "mounts": [
            {"name": "weights", "source": True, "path": "/model/"},
            {"name": "voices", "source": {"volume": {"name": "models", "subPath": "voices/en"}}, "path": "/voices"},
            {"name": "code", "source": {"configMap": {"name": "handler"}}, "path": "/code"},
            {"name": "hub", "source": {"secret": {"name": "hub"}}, "path": "/secrets/hub"},
            {"name": "scratch", "source": {"empty": {"size": "64Mi"}}, "path": "/scratch"},
            {"name": "labels", "source": {"files": {"labels.txt": "cat\n"}}, "path": "/labels"},
        ],
        "limits": {"queue": 0, "deadline": "2m", "requestBytes": "1Mi"},
        "probe": {"path": "/v2/models/tiny/infer", "json": {"inputs": []}, "expect": [{"at": "/outputs/0/data/0", "near": 1, "within": 0.1}]},
    },
}  # fmt: skip
COMMAND: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "OmniModel",
    "metadata": {**METADATA, "name": "server", "namespace": "default"},
    "spec": {
        "source": {"volume": {"name": "models", "subPath": "server/model.bin"}},
        "runtime": {
            "engine": "command",
            "command": ["serve", "--listen", "127.0.0.1:{{ port }}", "--socket={socket}", "--model", "{{ mounts.weights }}/model.bin"],
            "args": ["--threads={{ threads }}", "--context", "{{ options.contextTokens }}"],
            "env": {"PORT": "{port}", "TITLE": "{{ namespace }}/{{ name | upper }}"},
            "options": {"contextTokens": 4096},
            "threads": 2,
            "healthPath": "/healthz",
            "allowNetwork": True,
        },
        "mounts": [{"name": "weights", "source": True, "path": "/weights"}],
        "suspend": True,
    },
}  # fmt: skip
TRANSFORMERS: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "OmniModel",
    "metadata": {"name": "smollm2"},
    "spec": {
        "source": {"huggingFace": {"repo": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "7e27bd9f"}},
        "runtime": {"engine": "transformers", "task": "text-generation", "options": {"contextTokens": 8192}},
        "residency": {"keepResident": True},
    },
}
VLLM: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "OmniModel",
    "metadata": {"name": "qwen3"},
    "spec": {
        "source": {"huggingFace": {"repo": "Qwen/Qwen3-8B", "revision": "b968826d"}},
        "runtime": {
            "engine": "vllm",
            "environment": {"requirements": ["vllm==0.31.0"]},
            "options": {"cacheMemory": "8Gi", "contextTokens": 16384},
            "args": ["--reasoning-parser", "qwen3"],
        },
        "resources": {"deviceMemory": "28Gi", "hostMemory": "48Gi"},
    },
}
SGLANG: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "OmniModel",
    "metadata": {"name": "llama"},
    "spec": {
        "source": {"huggingFace": {"repo": "meta-llama/Llama-3.1-8B-Instruct", "revision": "0e9e39f2"}},
        "runtime": {
            "engine": "sglang",
            "environment": {"requirements": ["sglang==0.5.16"]},
            "options": {"cacheTokens": 65536},
        },
        "resources": {"deviceMemory": "28Gi"},
    },
}
POOL: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "OmniPool",
    "metadata": {"name": "default"},
    "spec": {"volumes": [{"name": "models", "path": "/srv/models"}], "isolation": {"level": "landlock"}},
}


def model(document: dict[str, Any], **changes: Any) -> OmniModel:
    """A model, with fields of its spec changed."""
    resource = parse(changed(document, **changes))
    assert isinstance(resource, OmniModel)
    return resource


def pool(**changes: Any) -> OmniPool:
    """The pool, with fields of its spec changed."""
    resource = parse(changed(POOL, **changes))
    assert isinstance(resource, OmniPool)
    return resource
