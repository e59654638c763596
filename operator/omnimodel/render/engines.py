"""What engine and device must agree on: engines that need a GPU, how many, and how much a server of others has."""

from __future__ import annotations

from omnimodel.api import OmniModel, OmniPool
from omnimodel.api.runtime import FOREIGN, ON_GPU_ONLY
from omnimodel.errors import ManifestError, Reason
from omnimodel.quantity import AUTO, parse_bytes

_ELSEWHERE = "assign it to a pool with device.type: cuda, or write engine: transformers, or llamacpp for a GGUF file"


def check_engine(model: OmniModel, pool: OmniPool) -> None:
    """Raise when the engine of a model cannot be run in a pool as the two stand.

    Raises:
        ManifestError: it needs a GPU, or more than there are, or nobody has said how much of the GPU it takes.
    """
    runtime, said = model.spec.runtime, model.spec.resources.device_memory
    device, devices = pool.spec.device, model.spec.resources.devices
    on_gpu = device.type == "cuda"
    if runtime.engine in ON_GPU_ONLY and not on_gpu:
        problem = f"engine {runtime.engine} needs an NVIDIA GPU, and {pool.subject} has device.type: {device.type}"
        raise ManifestError(model.subject, problem, _ELSEWHERE, field="spec.runtime.engine")
    if devices > (device.count if on_gpu else 1):
        has = f"device.count: {device.count}" if on_gpu else f"device.type: {device.type}, which is one"
        raise ManifestError(
            model.subject,
            f"asks for {devices} devices, and {pool.subject} has {has}",
            f"write fewer resources.devices, or assign it to a pool with device: {{type: cuda, count: {devices}}}",
            field="spec.resources.devices",
            reason=Reason.TOO_LARGE,
        )
    if runtime.engine not in FOREIGN or not on_gpu:
        return
    if said == AUTO:
        raise ManifestError(
            model.subject,
            f"engine {runtime.engine} takes its GPU memory itself, and nobody has said how much that is",
            "write the most that its server takes, weights, cache and context, such as deviceMemory: 24Gi",
            field="spec.resources.deviceMemory",
        )
    cache = runtime.options.get("cacheMemory")
    if runtime.engine == "vllm" and cache is not None and parse_bytes(cache) >= parse_bytes(said):
        raise ManifestError(
            model.subject,
            f"its cache of {cache} leaves nothing of resources.deviceMemory {said} for the weights",
            "write less, or raise resources.deviceMemory",
            field="spec.runtime.options.cacheMemory",
        )
