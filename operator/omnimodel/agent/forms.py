"""In which forms a pool's agent looks for the image of a model, and in which one it publishes it.

An image is stored as it is, or packed for a GPU with frames of one size, each under a key of its own; so stores that
several pools read may hold both. What is packed serves nobody who cannot decode it, and what is not serves everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnimodel.memory.devices.processor import computes_bfloat16


@dataclass(frozen=True)
class Forms:
    """See the module.

    Args:
        auto_dtype: that dtype `auto` stands for; as this machine computes when it is empty.
        packed_frame_bytes: of the frames that images are packed for; 0 where they are stored as they are.
    """

    auto_dtype: str = ""
    packed_frame_bytes: int = 0

    def dtype(self, spec: Mapping[str, Any]) -> str:
        """The dtype of a model: what its spec says, else what `auto` stands for here.

        That is bfloat16 where the processor computes in it, else float32, unless something else is said.
        """
        if spec["dtype"] != "auto":
            return str(spec["dtype"])
        return self.auto_dtype or ("bfloat16" if computes_bfloat16() else "float32")

    def keys(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        """The store's keys of a model's image, the best form first, and last the one that serves everybody."""
        raw = image_key(spec, self.dtype(spec))
        return (f"{raw}.packed{self.packed_frame_bytes}", raw) if self.packed_frame_bytes else (raw,)


def image_key(spec: Mapping[str, Any], dtype: str) -> str:
    """The key of an image that is stored as it is: what it is published from, and the dtype."""
    return f"{spec['publishHash'][:40]}-{dtype}"
