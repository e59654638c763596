"""Manifests as a person would write them."""

from __future__ import annotations

from pathlib import Path

MODEL = """\
apiVersion: omnimodel.io/v1alpha1
kind: OmniModel
metadata:
  name: {name}
spec:
{extra}  source:
    package: {{name: wordllama, version: 0.4.0.post1}}
  runtime:
    engine: python
    task: embeddings
    handler:
      entry: words:Words
      files:
        words.py: |
          class Words: ...
    options: {{flavour: {flavour}}}
"""
POOL = """\
apiVersion: omnimodel.io/v1alpha1
kind: OmniPool
metadata:
  name: {name}
spec:
  device: {{type: cpu, memory: {memory}}}
"""


def write_model(folder: Path, name: str, *, flavour: str = "plain", extra: str = "") -> Path:
    """A model's file; `extra` is lines of its spec without indentation."""
    lines = "".join(f"  {line}\n" for line in extra.splitlines())
    path = folder / f"{name}.yaml"
    path.write_text(MODEL.format(name=name, flavour=flavour, extra=lines))
    return path


def write_pool(folder: Path, name: str, memory: str = "1Gi") -> Path:
    """A pool's file."""
    path = folder / f"pool-{name}.yaml"
    path.write_text(POOL.format(name=name, memory=memory))
    return path
