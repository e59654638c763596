"""Manifest files to write in a test."""

from __future__ import annotations

from pathlib import Path

MODEL = """\
apiVersion: omnimodel.io/v1alpha1
kind: OmniModel
metadata: {{name: {name}}}
spec:
  source: {{path: /srv/models/{name}}}
  runtime: {{engine: transformers, task: {task}}}
"""


def model(name: str, task: str = "embeddings") -> str:
    """A right model."""
    return MODEL.format(name=name, task=task)


def write(folder: Path, name: str, *documents: str) -> Path:
    """Write a file of several documents the way editors do: beside it, then over it."""
    path = folder / name
    part = folder / f".{name}.part"
    part.write_text("---\n".join(documents), encoding="utf-8")
    part.replace(path)
    return path
