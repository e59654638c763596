"""What engine and device must agree on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from omnimodel.api import OmniModel, OmniPool, parse
from omnimodel.errors import ManifestError, Reason
from omnimodel.render import render
from render import manifests

DOCUMENT = Path(__file__).parents[2] / "docs/gpu.md"
GPU = manifests.pool(device={"type": "cuda"})


@pytest.mark.parametrize("engine", ["VLLM", "SGLANG"])
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_an_engine_that_needs_a_gpu_is_refused_elsewhere(engine: str, device: str) -> None:
    pool = manifests.pool(device={"type": device})
    with pytest.raises(ManifestError) as caught:
        render(manifests.model(getattr(manifests, engine)), pool)
    assert caught.value.field == "spec.runtime.engine"
    assert caught.value.problem == (
        f"engine {engine.lower()} needs an NVIDIA GPU, and OmniPool default/default has device.type: {device}"
    )
    assert "device.type: cuda" in caught.value.cure


@pytest.mark.parametrize("engine", ["VLLM", "SGLANG", "COMMAND"])
def test_nobody_guesses_what_a_server_takes_of_a_gpu(engine: str) -> None:
    document = getattr(manifests, engine)
    with pytest.raises(ManifestError, match="takes its GPU memory itself, and nobody has said how much") as caught:
        render(manifests.model(document, resources={"deviceMemory": "auto"}), GPU, manifests.CONFIG)
    assert caught.value.field == "spec.resources.deviceMemory"
    found = render(manifests.model(document, resources={"deviceMemory": "28Gi"}), GPU, manifests.CONFIG)
    assert found.spec.device_memory_bytes == 28 << 30


def test_a_cache_that_leaves_nothing_for_the_weights_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"its cache of 8Gi leaves nothing of resources\.deviceMemory 8Gi"):
        render(manifests.model(manifests.VLLM, resources={"deviceMemory": "8Gi"}), GPU)


@pytest.mark.parametrize(
    ("device", "has"),
    [
        ({"type": "cuda", "count": 2}, "device.count: 2"),
        ({"type": "cuda"}, "device.count: 1"),
        ({"type": "cpu", "count": 4}, "device.type: cpu, which is one"),
        ({}, "device.type: auto, which is one"),
    ],
)
def test_more_devices_than_a_pod_has_are_refused_with_both_numbers(device: dict[str, object], has: str) -> None:
    asking = manifests.model(manifests.COMMAND, resources={"deviceMemory": "28Gi", "devices": 4})
    with pytest.raises(ManifestError) as caught:
        render(asking, manifests.pool(device=device), manifests.CONFIG)
    assert caught.value.field == "spec.resources.devices"
    assert caught.value.reason is Reason.TOO_LARGE
    assert caught.value.problem == f"asks for 4 devices, and OmniPool default/default has {has}"
    assert "device: {type: cuda, count: 4}" in caught.value.cure
    large = manifests.pool(device={"type": "cuda", "count": 4})
    assert render(asking, large, manifests.CONFIG).spec.devices == 4


def test_models_of_frames_and_programs_on_a_processor_need_say_nothing() -> None:
    render(manifests.model(manifests.TRANSFORMERS), GPU)
    render(manifests.model(manifests.COMMAND), manifests.pool(), manifests.CONFIG)


def test_the_servers_of_the_document_are_right() -> None:
    section = DOCUMENT.read_text().partition("\n## Servers of others\n")[2]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    models = [parse(document) for document in yaml.safe_load_all(block[1])]
    assert [model.spec.runtime.engine for model in models if isinstance(model, OmniModel)] == [
        "vllm",
        "sglang",
        "llamacpp",
        "command",
    ]
    for model in models:
        assert isinstance(model, OmniModel)
        render(model, GPU)


def test_the_model_over_several_gpus_of_the_document_is_right() -> None:
    section = DOCUMENT.read_text().partition("\n### Over several GPUs\n")[2]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    pool, model = (parse(document) for document in yaml.safe_load_all(block[1]))
    assert isinstance(pool, OmniPool)
    assert isinstance(model, OmniModel)
    assert render(model, pool).spec.devices == 2
