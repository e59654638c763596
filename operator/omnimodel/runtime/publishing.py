"""Publishes a model: loads it once the ordinary way, from untrusted files, and writes its image.

Memory stays bounded by the weights themselves: parameters are built without values, checkpoints are mapped and
assigned, and tensors are cast, quantized and written one at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnimodel.errors import ImageError, OmniError, Reason
from omnimodel.memory.devices.processor import computes_bfloat16
from omnimodel.memory.image import ImageWriter, Index
from omnimodel.runtime.binding import plain_tensors, tensors_in_order
from omnimodel.runtime.four_bits import GROUP
from omnimodel.runtime.handlers import HandlerError, calling
from omnimodel.runtime.quantization import Quantization, part_name, quantized, scaled, split, suits
from omnimodel.runtime.sdk import Model, Source

DIGEST_BYTES = 16 << 20  # the host device's frame: a digest per frame lets partial residency be checked
_NAMED_AT_MOST = 8


def publish(
    subject: str,
    model: Model,
    source: Source,
    output: Path,
    *,
    cast: torch.dtype | None,
    quantization: str = "",
    metadata: Mapping[str, Any],
    progress: Callable[[str, int, int], None],
) -> Index:
    """Load `model` from `source` and write its image and assets into `output`.

    Args:
        subject: the model, for messages.
        model: with options, dtype and device set; `assets` is set here.
        source: its files.
        output: an existing folder without an image.
        cast: dtype that every floating-point tensor gets; None keeps what `build` and the files say.
        quantization: format that weights of linear layers get, one of `quantization.FORMATS`; empty for none.
        metadata: goes into the index.
        progress: called with a stage, and how much of how much is done.

    Raises:
        OmniError: the source or the handler is at fault, or the disk is full.
    """
    with ImageWriter(output, DIGEST_BYTES, dtype=_name(model.dtype), metadata=dict(metadata)) as writer:
        model.assets = writer.assets
        progress("loading", 0, 0)
        with calling(subject, "loading the model for publishing"), torch.no_grad():
            module = model.publish(source)
        if module is None and quantization:
            raise _nothing_to_quantize(subject, quantization, "build() makes no module")
        if module is not None:
            if not isinstance(module, torch.nn.Module):
                raise HandlerError(subject, f"build() returned {_kind(module)}", "return a torch.nn.Module or None")
            module.eval()
            check_covered(subject, module)
            _pack(subject, module, writer, cast, quantization, progress)
        return writer.close()


def check_covered(subject: str, module: torch.nn.Module) -> None:
    """Raise when the module holds tensors that no image can cover, or that have no values.

    Raises:
        HandlerError: naming them.
    """
    plain = plain_tensors(module)
    if plain:
        raise HandlerError(
            subject,
            f"the module holds tensors that are neither parameters nor buffers: {_some(plain)}",
            "register them with register_buffer(name, tensor, persistent=False)",
        )
    empty = [names[0] for names, tensor in tensors_in_order(module) if tensor.is_meta]
    if empty:
        raise ImageError(subject, f"the source has no values for {_some(empty)}", "return them from weights()")


def _pack(
    subject: str,
    module: torch.nn.Module,
    writer: ImageWriter,
    cast: torch.dtype | None,
    form: str,
    progress: Callable[[str, int, int], None],
) -> None:
    # Buffers first: they are small, and rotary frequencies are read before the layers that lie in front of them.
    tensors = sorted(tensors_in_order(module), key=lambda named: isinstance(named[1], torch.nn.Parameter))
    total_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    done_bytes = 0
    weights: dict[str, torch.dtype] = {}  # that were quantized
    for names, tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise HandlerError(subject, f"{names[0]} is sparse or quantized, which an image cannot hold")
        values = tensor.detach().cpu()
        if cast is not None and values.is_floating_point() and values.dtype != cast:
            values = values.to(cast)
        parts = _quantized(module, names, values, form) if form else {}
        for part, inner in parts.items():
            _write(writer, (part_name(names[0], part),), inner)
        if parts:
            weights[names[0]] = values.dtype
        else:
            _write(writer, names, values)
        done_bytes += tensor.numel() * tensor.element_size()
        progress("packing", done_bytes, total_bytes)
    if weights:
        writer.metadata |= Quantization(form, weights).to_metadata()
    elif form:
        needs = f" (int4 needs rows of a multiple of {GROUP})" if form == "int4" else ""
        raise _nothing_to_quantize(subject, form, f"no linear layer has a weight of its own that suits it{needs}")


def _quantized(
    module: torch.nn.Module, names: tuple[str, ...], values: torch.Tensor, form: str
) -> dict[str, torch.Tensor]:
    """The parts of a linear layer's weight that no other part of the module uses; nothing of what stays as it is."""
    prefix, _, leaf = names[0].rpartition(".")
    if len(names) > 1 or leaf != "weight" or not suits(module.get_submodule(prefix), values, form):
        return {}
    parts = split(quantized(values, form))
    return parts if scaled(parts) else {}


def _nothing_to_quantize(subject: str, form: str, why: str) -> OmniError:
    problem = f"runtime.quantization is {form}, and there is nothing to quantize: {why}"
    return OmniError(subject, problem, "remove runtime.quantization", reason=Reason.INVALID_MANIFEST)


def _write(writer: ImageWriter, names: tuple[str, ...], values: torch.Tensor) -> None:
    flat = values.contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    writer.add(names, _name(values.dtype), tuple(values.shape), content)


def ordinary(model: Model, source: Source) -> torch.nn.Module | None:
    """Build a handler's module on the CPU and give it the values that its `weights` returns.

    Raises:
        HandlerError: build or weights return something else than they should.
        ImageError: the values do not fit the module.
    """
    subject = f"handler {type(model).__name__}"
    module = build(subject, model)
    found = model.weights(source)
    if module is None:
        return None
    if not isinstance(found, Mapping):
        raise HandlerError(subject, f"weights() returned {_kind(found)}", "return a mapping of names to tensors")
    values = {str(name): _tensor(subject, str(name), value) for name, value in found.items()}
    assign(subject, module, values)
    return module


def build(subject: str, model: Model) -> torch.nn.Module | None:
    """Call a handler's `build` on the CPU; its parameters get no values.

    Raises:
        HandlerError: it returned something else than a module or None.
    """
    with calling(subject, "build()"):
        try:
            with without_values():
                module = model.build()
        except Exception:  # build() may read the values it makes; then it gets them
            module = model.build()
    if module is not None and not isinstance(module, torch.nn.Module):
        raise HandlerError(subject, f"build() returned {_kind(module)}", "return a torch.nn.Module or None")
    return module


def assign(subject: str, module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a module's parameters and persistent buffers their values; tied ones need one name only.

    Raises:
        ImageError: naming what is missing, unexpected, or of another shape.
    """
    built = {name: tensor.dtype for names, tensor in tensors_in_order(module) for name in names}
    tied = [names for names, tensor in tensors_in_order(module) if len(names) > 1]
    cast = {name: value.to(built[name]) if name in built else value for name, value in values.items()}
    try:
        result = module.load_state_dict(cast, strict=False, assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split(":", 1)[-1].split())
        raise ImageError(subject, f"the weights do not fit the module: {problem[:600]}", "correct build()") from error
    missing = set(result.missing_keys)
    for names in tied:
        loaded = [name for name in names if name in values]
        if loaded:
            _tie(module, names, loaded[0])
            missing.difference_update(names)
    # Checkpoints from before torch 0.4.1 do not have this counter, and nothing reads it when serving.
    missing = {name for name in missing if not name.endswith("num_batches_tracked")}
    if missing or result.unexpected_keys:
        said = []
        if missing:
            said.append(f"no values for {_some(sorted(missing))}")
        if result.unexpected_keys:
            said.append(f"values for {_some(list(result.unexpected_keys))}, which the module does not have")
        raise ImageError(subject, f"the source has {' and '.join(said)}", "make build() and weights() fit each other")


def _tie(module: torch.nn.Module, names: tuple[str, ...], loaded: str) -> None:
    prefix, _, leaf = loaded.rpartition(".")
    value = getattr(module.get_submodule(prefix), leaf)
    for name in names:
        prefix, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(prefix), leaf, value)


@contextmanager
def without_values() -> Iterator[None]:
    """Keep every parameter that is registered meanwhile on the meta device; buffers get their values."""
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _tensor(subject: str, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a mapped array cannot be written; nobody writes it
            try:
                return torch.from_numpy(value)
            except (TypeError, ValueError) as error:
                raise HandlerError(subject, f"weights() has {name} as an array of {value.dtype}") from error
    raise HandlerError(subject, f"weights() has {name} as {_kind(value)}", "return tensors or numpy arrays")


def torch_dtype(subject: str, name: str) -> torch.dtype:
    """The torch dtype of a manifest's `dtype`; `auto` is bfloat16 where the processor computes in it, else float32.

    Raises:
        OmniError: there is no such dtype.
    """
    if name == "auto":
        name = "bfloat16" if computes_bfloat16() else "float32"
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        problem = f"runtime.dtype is {name!r}"
        raise OmniError(subject, problem, "write auto, float32, bfloat16 or float16", reason=Reason.INVALID_MANIFEST)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(names[:_NAMED_AT_MOST]) + more
