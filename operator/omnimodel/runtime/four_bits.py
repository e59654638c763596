"""Weights of four bits: two in a byte, and a scale and a zero point for each group of a row.

Of the torchao library's stable layouts of four bits none can be made, or computed with, on a processor. So the values
that it chooses are packed here, and unpacked by plain operations of torch when a layer computes: an image is the same
for each machine and device, and who serves it does without the library.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils import _pytree

GROUP = 32  # weights of a row that share a scale and a zero point


class PackedWeight(torch.Tensor):
    """A linear layer's weight. Whatever is not `linear` computes with it as it is when it is unpacked.

    Args:
        qdata: int8, half as many columns: two's complements, those of a row's second half in the upper bits.
        scale: of each group of `GROUP` columns, in the dtype that the layer computes in.
        zero_point: int8, of each group: the value that stands for zero.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> Self:
        """Put its parts together."""
        rows, half = qdata.shape
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        made: Self = make(cls, (rows, 2 * half), dtype=scale.dtype, device=qdata.device)
        made.qdata, made.scale, made.zero_point = qdata, scale, zero_point
        return made

    @classmethod
    def packed(cls, values: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> Self:
        """Pack values from -8 to 7, one in an int8."""
        low, high = values.chunk(2, dim=1)
        return cls((high << 4) | (low & 0xF), scale, zero_point)

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype) -> Self:
        """One without values, on the meta device."""
        rows, columns = shape
        qdata = torch.empty(rows, columns // 2, dtype=torch.int8, device="meta")
        groups = qdata.new_empty(rows, columns // GROUP)
        return cls(qdata, groups.to(dtype), groups)

    def unpacked(self) -> torch.Tensor:
        """As the layer computes with it."""
        values = torch.cat((self.qdata << 4 >> 4, self.qdata >> 4), dim=1).view(*self.scale.shape, GROUP)
        return (values.sub_(self.zero_point.unsqueeze(-1)) * self.scale.unsqueeze(-1)).flatten(1)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale", "zero_point"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Self:
        return cls(parts["qdata"], parts["scale"], parts["zero_point"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return func(*_unpacked(args), **_unpacked(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale, args[0].zero_point)
        if func._schema.is_mutable:  # noqa: SLF001
            raise NotImplementedError(f"{func} of a weight of four bits, which cannot be changed")
        return func(*_unpacked(args), **_unpacked(kwargs or {}))


def fits(shape: torch.Size) -> bool:
    """Whether a weight of this shape can be packed: its rows are cut into whole groups."""
    return len(shape) == 2 and shape[0] > 0 and shape[1] > 0 and shape[1] % GROUP == 0


def _unpacked(arguments: Any) -> Any:
    return _pytree.tree_map_only(PackedWeight, PackedWeight.unpacked, arguments)
