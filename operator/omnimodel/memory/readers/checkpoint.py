"""torch checkpoints (.pt, .pth, .bin), loaded with `weights_only`, so that no code in them runs.

`read` gives what the checkpoint holds; `tensors` finds the mapping of names to tensors in it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from omnimodel.errors import ImageError
from omnimodel.memory.readers.mapped import CURE, reading

_WHAT = "torch checkpoint"
_ENTRIES = 1 << 20
_PICKLE_BYTES = 256 << 20
_NESTING = 64
_VALUES = 1 << 21
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params", "ema")


def read(path: Path | str) -> Any:
    """What a checkpoint holds; tensors stay in the file until they are used.

    Raises:
        ImageError: it is damaged or hostile, holds code, or a tensor that claims more bytes than the file has.
    """
    path = Path(path)
    with reading(path, _WHAT):
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _check_archive(path)
        elif _begins_as_archive(path):
            raise ImageError(str(path), f"is no valid {_WHAT}: a zip archive cut short", CURE)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:
            text = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error).split("\n")[0])
            raise ImageError(str(path), f"cannot be loaded as weights alone: {text[:300]}", CURE) from error
        size_bytes = path.stat().st_size
        for tensor in _tensors_in(path, content):
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
                raise ImageError(str(path), "holds a tensor that is sparse, quantized or without bytes", CURE)
            if tensor.numel() * tensor.element_size() > size_bytes:
                raise ImageError(str(path), f"holds a tensor of {tensor.numel()} elements in {size_bytes} bytes", CURE)
        return content


def tensors(path: Path | str) -> Mapping[str, torch.Tensor]:
    """The mapping of names to tensors in a checkpoint, under whichever of the usual keys.

    Raises:
        ImageError: it is damaged or hostile, or there is no such mapping.
    """
    content = read(path)
    for _ in range(_NESTING):
        if isinstance(content, Mapping):
            found = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
            if found and all(isinstance(name, str) for name in found):
                return found
            inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
            if inner is not None:
                content = inner
                continue
        break
    raise ImageError(str(path), "holds no mapping of names to tensors", "return one from the handler's weights()")


def _begins_as_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _check_archive(path: Path) -> None:
    """Refuse an archive whose entries claim more than the file has: torch stores them uncompressed."""
    size_bytes = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if len(entries) > _ENTRIES:
            raise ImageError(str(path), f"has {len(entries)} entries", CURE)
        if sum(entry.file_size for entry in entries) > size_bytes:
            raise ImageError(str(path), f"unpacks to more than its {size_bytes} bytes", CURE)
        names = [entry.filename for entry in entries]
        if len(set(names)) != len(names):
            raise ImageError(str(path), "has two entries of one name", CURE)
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ImageError(str(path), f"has the compressed entry {entry.filename!r}, torch writes none", CURE)
            if entry.filename.endswith(".pkl") and entry.file_size > _PICKLE_BYTES:
                raise ImageError(str(path), f"has {entry.file_size} bytes of structure", CURE)
            archive.open(entry).close()  # reads the entry's own header, which must agree with the directory


def _tensors_in(path: Path, content: Any) -> Iterator[torch.Tensor]:
    """Every tensor, each container visited once: containers may refer to each other."""
    seen: set[int] = set()
    todo = [content]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple | set):
            if id(value) in seen:
                continue
            seen.add(id(value))
            todo.extend(value.values() if isinstance(value, Mapping) else value)
            if len(todo) > _VALUES:
                raise ImageError(str(path), f"holds more than {_VALUES} values", CURE)
