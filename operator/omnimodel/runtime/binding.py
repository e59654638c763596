"""Binds a module to its image: every parameter and every buffer lies in the window, and nowhere else.

But for buffers that a forward pass writes to, which are memory of the process.

The module is built on the meta device, without memory. Then each of its tensors is replaced by a view of the window
at the offset that the index gives, a quantized weight by one that is made of such views; what is mapped there may
change with each wake, the addresses never do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from omnimodel.errors import ImageError
from omnimodel.runtime.handlers import HandlerError
from omnimodel.runtime.quantization import Quantization

if TYPE_CHECKING:
    from omnimodel.memory.devices import Window
    from omnimodel.memory.image import Index, TensorEntry

_NAMED_AT_MOST = 5


def tensors_in_order(module: torch.nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Every parameter and buffer (persistent or not) in the order of the modules, tied ones once with all names."""
    found: dict[Any, tuple[list[str], torch.Tensor]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for leaf, tensor in [*part._parameters.items(), *part._buffers.items()]:  # noqa: SLF001 named_* skips None only
            if tensor is not None:
                name = f"{prefix}.{leaf}" if prefix else leaf
                found.setdefault(_identity(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in found.values()]


def _identity(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "meta" or tensor.numel() == 0 or not tensor.data_ptr():
        return id(tensor)  # it has no address: not even a quantized one, only its parts have
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def plain_tensors(module: torch.nn.Module) -> list[str]:
    """Names of tensors that are neither parameters nor buffers, nor one of these under a second name.

    No index covers them, so that they would stay without values when the model is served.
    """
    registered = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    found = []
    for prefix, part in module.named_modules():
        computed = {name.rsplit("_", 1)[0] for name in part._parameters if name.endswith(("_g", "_orig"))}  # noqa: SLF001
        for leaf, value in vars(part).items():
            if leaf in ("_parameters", "_buffers", "_modules") or leaf in computed:
                continue  # weight_norm and spectral_norm compute such an attribute anew in each forward pass
            if any(id(tensor) not in registered for tensor in _tensors_in(value)):
                found.append(f"{prefix}.{leaf}" if prefix else leaf)
    return found


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)


Own = tuple[torch.Tensor, torch.Tensor]  # memory of the process, and what was published, in the window


def bind(
    subject: str, module: torch.nn.Module, index: Index, window: Window | None, mutable: Collection[str] = ()
) -> list[Own]:
    """Replace every tensor of `module` by a view of `window`.

    Args:
        subject: the model, for messages.
        module: built on the meta device.
        index: of the image that will be mapped.
        window: at least as large as the image; None when the image is empty.
        mutable: names of buffers that a forward pass writes to.

    Returns:
        Of each of these its memory, which has no values yet.

    Raises:
        ImageError: module and index do not fit, or something would stay without values.
        HandlerError: a name in `mutable` is that of no buffer.
    """
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if strange := next((name for name in mutable if name not in buffers), ""):
        raise HandlerError(subject, f"mutable names {strange}, which is no buffer", "correct it, or build()")
    own: list[Own] = []
    parts = dict(module.named_modules(remove_duplicate=False))
    built = {name: tensor for names, tensor in tensors_in_order(module) for name in names}
    views = ((entry.names, _view(entry, window)) for entry in index.tensors)
    for names, published in Quantization.of(subject, index).joined(subject, views, built):
        values = published
        shared: torch.nn.Parameter | None = None
        if any(name in mutable for name in names):
            values = torch.empty_like(published)
            own.append((values, published))
        for name in names:
            prefix, _, leaf = name.rpartition(".")
            part = parts.get(prefix)
            old = None if part is None else part._parameters.get(leaf, part._buffers.get(leaf))  # noqa: SLF001
            if part is None or old is None:
                raise _mismatch(subject, f"its image has a tensor {name}, the module that build() makes does not")
            if old.shape != values.shape:
                raise _mismatch(
                    subject, f"{name} has the shape {list(values.shape)} in its image and {list(old.shape)} in build()"
                )
            if leaf in part._parameters:  # noqa: SLF001
                shared = torch.nn.Parameter(values, requires_grad=False) if shared is None else shared
                setattr(part, leaf, shared)  # not past __setattr__: recurrent layers keep a list of their weights
            else:
                setattr(part, leaf, values)
            _follow(part, old, shared if leaf in part._parameters else values)  # noqa: SLF001
    left = [names[0] for names, tensor in tensors_in_order(module) if tensor.device.type == "meta"]
    left += [name for name in plain_tensors(module) if any(t.is_meta for t in _tensors_in(_attribute(module, name)))]
    if left:
        more = f" and {len(left) - _NAMED_AT_MOST} more" if len(left) > _NAMED_AT_MOST else ""
        raise _mismatch(subject, f"its image has no values for {', '.join(left[:_NAMED_AT_MOST])}{more}")
    return own


def _view(entry: TensorEntry, window: Window | None) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if entry.bytes and window is not None:
        return window.tensor(entry.offset, entry.bytes).view(dtype).view(entry.shape)
    return torch.empty(entry.shape, dtype=dtype, device="cpu")


def _follow(part: torch.nn.Module, old: torch.Tensor, new: torch.Tensor | None) -> None:
    """Let plain attributes that were the old tensor under a second name be the new one."""
    for name, value in list(vars(part).items()):
        if value is old:
            vars(part)[name] = new


def _attribute(module: torch.nn.Module, name: str) -> Any:
    value: Any = module
    for leaf in name.split("."):
        value = getattr(value, leaf)
    return value


def _mismatch(subject: str, problem: str) -> ImageError:
    return ImageError(subject, problem, "build() must make the same module each time; publish the model again")
