"""Weight-only quantization: weights of linear layers in fewer bits, in the image, in the frames and on the way to both.

The torchao library makes such a weight one tensor of several plain ones: values of few bits, and scales. An image holds
these parts as tensors of their own, `NAME#PART`, and its metadata say which weights are quantized, how, and in which
dtype their layer computes. To serve it, the library tells on the meta device what the parts of such a weight must be,
and puts it together from views of them: nothing but values comes out of an image. Weights of four bits are put together
by `four_bits` instead.

The library is imported when a model needs it, in that model's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from omnimodel.errors import ImageError
from omnimodel.runtime.four_bits import GROUP, PackedWeight, fits

if TYPE_CHECKING:
    from omnimodel.memory.image import Index

FORMATS = ("int8", "fp8", "int4")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009  (its stubs do not have it)
_KEY = "quantization"  # in an index's metadata
_MARK = "#"  # between the name of a weight and that of its part
_LEAST_COLUMNS = 16  # a shorter row hardly gets smaller with its scale, and one of a single weight the library cannot
_CURE = "publish the model again"


@dataclass(frozen=True)
class Quantization:
    """What an image says of its quantized weights.

    Args:
        format: one of `FORMATS`; empty when nothing is quantized.
        weights: their names, and the dtypes that their layers compute in.
    """

    format: str
    weights: Mapping[str, torch.dtype]

    def to_metadata(self) -> dict[str, Any]:
        """As it stands in an index's metadata."""
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in self.weights.items()}
        return {_KEY: {"format": self.format, "weights": dtypes}}

    @classmethod
    def of(cls, subject: str, index: Index) -> Quantization:
        """Read and check it.

        Raises:
            ImageError: the metadata say something else.
        """
        found = index.metadata.get(_KEY)
        if found is None:
            return cls("", {})
        match found:
            case {"format": str(form), "weights": dict(dtypes)} if form in FORMATS and len(found) == 2:
                if all(isinstance(dtype, str) and dtype in _DTYPES for dtype in dtypes.values()):
                    return cls(form, {name: _DTYPES[dtype] for name, dtype in dtypes.items()})
        raise ImageError(subject, "its image does not say how its weights are quantized", _CURE)

    def joined(
        self,
        subject: str,
        tensors: Iterable[tuple[tuple[str, ...], torch.Tensor]],
        built: Mapping[str, torch.Tensor],
    ) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """The tensors of an image, with quantized weights in the place of their parts.

        Args:
            subject: the model, for messages.
            tensors: names and values, which are not read.
            built: parameters of the module by name, for their shapes.

        Raises:
            ImageError: parts are missing, or are not those of such a weight.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.weights}
        for names, values in tensors:
            name, _, part = names[0].rpartition(_MARK)
            if name in parts:
                parts[name][part] = values
            else:
                yield names, values
        for name, dtype in self.weights.items():
            if name not in built:
                raise ImageError(subject, f"its image has a weight {name}, but build() makes none", _CURE)
            like = _empty(built[name].shape, dtype, self.format)
            if like is None or _kinds(parts[name]) != _kinds(split(like)):
                raise ImageError(subject, f"its image has other parts of {name} than {self.format} needs", _CURE)
            _, how = like.__tensor_flatten__()
            yield (name,), type(like).__tensor_unflatten__(parts[name], how, like.shape, like.stride())


def suits(layer: torch.nn.Module, weight: torch.Tensor, form: str) -> bool:
    """Whether a module's `weight` can be quantized: a plain linear layer's; what is derived may use it otherwise."""
    if type(layer) is not torch.nn.Linear or weight.dtype not in _DTYPES.values():
        return False
    rows, columns = weight.shape
    return fits(weight.shape) if form == "int4" else rows > 0 and columns >= _LEAST_COLUMNS


def quantized(weight: torch.Tensor, form: str) -> torch.Tensor:
    """A linear layer's weight, quantized row by row, or in groups of a row.

    Args:
        weight: as the layer has it; on the meta device only the shapes of the parts are worked out.
        form: one of `FORMATS`.
    """
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, config(form))
    made: Any = layer.weight
    return PackedWeight.packed(made.qdata, made.scale, made.zero_point) if form == "int4" else made


def config(form: str) -> Any:
    """What the library is told of a format."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
    )

    if form == "int4":
        return IntxWeightOnlyConfig(_INT4, PerGroup(GROUP), MappingType.ASYMMETRIC)
    made = Int8WeightOnlyConfig if form == "int8" else Float8WeightOnlyConfig
    return made(set_inductor_config=False)  # which would change how precisely all others compute, too


def split(weight: Any) -> dict[str, torch.Tensor]:
    """The plain tensors that a quantized weight is made of, by the library's names for them."""
    parts, _ = weight.__tensor_flatten__()
    return {part: getattr(weight, part) for part in parts}


def scaled(parts: Mapping[str, torch.Tensor]) -> bool:
    """Whether all got a scale: a row of fp8 has none for (almost) zeros, nothing for infinity: both become NaN."""
    scale = parts["scale"]
    return bool((scale.isfinite() & (scale > 0)).all())


def part_name(name: str, part: str) -> str:
    """The name that a part of a weight has in an image."""
    return f"{name}{_MARK}{part}"


@cache
def _empty(shape: torch.Size, dtype: torch.dtype, form: str) -> Any:
    """A quantized weight without values, None where the format has none of that shape.

    Layers of one size share it, for to work it out takes milliseconds.
    """
    if form == "int4":
        return PackedWeight.empty(shape, dtype) if fits(shape) else None
    return quantized(torch.empty(shape, dtype=dtype, device="meta"), form)


def _kinds(parts: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()}
