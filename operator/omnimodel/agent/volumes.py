"""Paths in volumes of the pool: no symbolic link in one, whoever made it, leads a model out of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from omnimodel.errors import SourceError


def volume_folder(volume: Mapping[str, Any]) -> str:
    """The real path of a volume itself.

    Args:
        volume: as a process spec has it: its `name`, a `subPath`, and the `path` of that on this machine.
    """
    depth = len(PurePosixPath(volume.get("subPath") or "").parts)
    path = Path(volume["path"])
    return os.path.realpath(path.parents[depth - 1] if depth else path)


def volume_path(subject: str, volume: Mapping[str, Any], field: str) -> Path:
    """The real path of what is named in a volume; links that stay in the volume are followed.

    Args:
        volume: as in `volume_folder`.
        field: of the manifest, for the message.

    Raises:
        SourceError: a link leads out of the volume.
    """
    real = Path(os.path.realpath(volume["path"]))
    if not real.is_relative_to(volume_folder(volume)):
        raise SourceError(
            subject,
            f"{field}: {volume['subPath']!r}: a symbolic link leads out of volume {volume.get('name', '')}",
            "put the files themselves there, or links that stay in the volume",
        )
    return real
