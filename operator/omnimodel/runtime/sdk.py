"""What a handler is written with: a `Model` that builds a module, says where its weights come from, and predicts."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnimodel.errors import SourceError
from omnimodel.runtime.requests import RequestError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor as Weights  # Source.torch hides the module's name

__all__ = ["Audio", "Model", "RequestError", "Source", "Tensor"]

_TORCH_FILES = ("*.pt", "*.pth", "*.bin", "*.ckpt")


@dataclass(frozen=True)
class Audio:
    """Sound: mono float32 `samples` between -1 and 1, `rate` of them a second. What comes in has 16,000."""

    samples: np.ndarray[Any, Any]
    rate: int = 16_000


@dataclass(frozen=True)
class Tensor:
    """Datatype and shape of an array in a signature: `Annotated[np.ndarray, Tensor("FP32", (-1, 224, 224, 3))]`.

    Args:
        datatype: of the Open Inference Protocol: BOOL, INT8 … INT64, UINT8 … UINT64, FP16, FP32, FP64, BYTES.
        shape: -1 stands for any length.
    """

    datatype: str
    shape: tuple[int, ...]


class Source:
    """The files that a model is published from; read-only.

    Args:
        path: the file or folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def files(self, *patterns: str) -> list[Path]:
        """Every file whose path below the source, or whose name, matches one of the patterns; in order of path."""
        if self.path.is_file():
            return [self.path] if any(fnmatch.fnmatch(self.path.name, pattern) for pattern in patterns) else []
        found = []
        for folder, _, names in os.walk(self.path):
            for name in names:
                file = Path(folder, name)
                relative = str(file.relative_to(self.path))
                if any(fnmatch.fnmatch(relative, pattern) or fnmatch.fnmatch(name, pattern) for pattern in patterns):
                    found.append(file)
        return sorted(found)

    def file(self, *patterns: str) -> Path:
        """The one file that matches.

        Raises:
            SourceError: none does, or several do.
        """
        found = self.files(*patterns)
        if len(found) == 1:
            return found[0]
        wanted = " or ".join(patterns)
        if not found:
            raise SourceError(f"source {self.path.name}", f"it has no file {wanted}", "correct `source` or the handler")
        names = ", ".join(str(file.relative_to(self.path)) for file in found[:5])
        raise SourceError(
            f"source {self.path.name}", f"{len(found)} files match {wanted}: {names}", "give a narrower pattern"
        )

    def safetensors(self, *patterns: str) -> Mapping[str, Weights]:
        """Tensors of a safetensors file; without a pattern, of all there are, as shards of one checkpoint."""
        from omnimodel.memory.readers import safetensors

        if patterns:
            return safetensors.read(self.file(*patterns))
        shards = self.files("*.safetensors") or [self.file("*.safetensors")]
        merged: dict[str, Weights] = {}
        for shard in shards:
            merged.update(safetensors.read(shard))
        return merged

    def torch(self, *patterns: str) -> Any:
        """What a torch checkpoint holds, loaded with `weights_only`, so that no code in it runs."""
        from omnimodel.memory.readers import checkpoint

        return checkpoint.read(self.file(*(patterns or _TORCH_FILES)))

    def state_dict(self, *patterns: str) -> Mapping[str, Weights]:
        """The names and tensors of a torch checkpoint, also when it keeps them under a key such as `state_dict`."""
        from omnimodel.memory.readers import checkpoint

        return checkpoint.tensors(self.file(*(patterns or _TORCH_FILES)))

    def gguf(self, *patterns: str) -> Mapping[str, Weights]:
        """Tensors of a GGUF file under their GGUF names, quantized ones as float32."""
        from omnimodel.memory.readers import gguf

        return gguf.read(self.file(*(patterns or ("*.gguf",))))

    def npz(self, *patterns: str) -> Mapping[str, Weights]:
        """Arrays of a numpy archive, as tensors."""
        from omnimodel.memory.readers import npz

        return npz.read(self.file(*(patterns or ("*.npz",))))

    def ctranslate2(self, *patterns: str) -> Mapping[str, Weights]:
        """Variables of a CTranslate2 model; those of a Whisper model under the names of the transformers library."""
        from omnimodel.memory.readers import ctranslate2

        tensors = ctranslate2.read(self.file(*(patterns or ("model.bin",))))
        return ctranslate2.whisper(tensors) if tensors.spec == "WhisperSpec" else tensors

    def weights(self) -> Mapping[str, Weights]:
        """The tensors of the only checkpoint in the source, whatever its format.

        Raises:
            SourceError: there is none, or there are several.
        """
        for pattern, read in (("*.safetensors", self.safetensors), ("*.gguf", self.gguf), ("*.npz", self.npz)):
            if self.files(pattern):
                return read()
        return self.state_dict()


class Model:
    """A model: subclass it, say how it is built and what it answers.

    Attributes:
        options: `runtime.options` of the manifest.
        files: the inline files of the manifest, by name.
        assets: folder of small files published with the weights (tokenizer, configuration). `weights()` may write
            into it; everything after that reads it.
        dtype: torch dtype of the floating-point weights, as the manifest and the machine decide.
        device: where the module runs; what `predict` is given is on the CPU, and what it returns may be on either.
        module: the module, once there is one.
        mutable: names of buffers that a forward pass writes to, such as a counter: they are memory of the process,
            which begins with what was published and keeps what was written over an evict. Others can only be read.
    """

    options: Mapping[str, Any]
    files: Mapping[str, str]
    assets: Path
    dtype: torch.dtype
    device: str
    module: Any = None
    mutable: Collection[str] = ()

    def build(self) -> torch.nn.Module | None:
        """Make the module without weights. Called under `torch.device("meta")` when serving, on the CPU to publish.

        Everything that a forward pass reads must be a parameter or a buffer. None means that the model keeps its
        weights in the process (they count as its private memory, and no evict takes them away).
        """
        raise NotImplementedError

    def weights(self, source: Source) -> Mapping[str, Any]:
        """Publish only: the values of the module's parameters and persistent buffers by name (tensors or arrays)."""
        return source.weights()

    def publish(self, source: Source) -> torch.nn.Module | None:
        """Publish only: the module with its weights, on the CPU. Override it when `weights` does not fit."""
        from omnimodel.runtime.publishing import ordinary

        return ordinary(self, source)

    def load(self) -> None:
        """Serving only, once, when the module is bound: tokenizers and the like. Weights cannot be read yet."""

    def working_bytes(self) -> int:
        """Serving only: memory that requests may come to need beyond what a first small one takes; 0 when unknown."""
        return 0
