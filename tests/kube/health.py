"""What GitOps tools say of objects, by the code that they run: kstatus (kubectl, Flux) and Argo CD's interpreter of Lua."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODULE = Path(__file__).parent / "gitops"  # pins the versions, and their checksums
GUIDE = ROOT / "docs/kubernetes.md"
KEY = "resource.customizations.health.omnimodel.io_"


class Health:
    """Says what tools take an object for.

    Args:
        program: built from the module.
        scripts: of Argo CD by kind, as files.
    """

    def __init__(self, program: Path, scripts: Mapping[str, Path]) -> None:
        self._program = program
        self.scripts = scripts

    def flux(self, item: Mapping[str, Any]) -> str:
        """InProgress, Current, Failed or Terminating, as kstatus says."""
        return self._ask(item)["status"]

    def argo(self, item: Mapping[str, Any]) -> tuple[str, str]:
        """Healthy, Progressing, Degraded or Suspended, as the script in the guide says, and its message."""
        said = self._ask(item, str(self.scripts[item["kind"]]))
        return said["status"], said["message"]

    def of(self, item: Mapping[str, Any] | None) -> tuple[str, str]:
        """What both say."""
        assert item is not None
        return self.flux(item), self.argo(item)[0]

    def _ask(self, item: Mapping[str, Any], *arguments: str) -> dict[str, str]:
        command = [str(self._program), *arguments]
        done = subprocess.run(command, input=json.dumps(item), capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout)
        return found


def scripts_in_guide() -> dict[str, str]:
    """Argo CD's health checks by kind, from the ConfigMap in the guide."""
    blocks = GUIDE.read_text().split("```yaml\n")[1:]
    (block,) = [block.partition("```")[0] for block in blocks if KEY in block]
    settings = yaml.safe_load(block)["data"]
    return {key.removeprefix(KEY): script for key, script in settings.items() if key.startswith(KEY)}


def built(folder: Path) -> Iterator[Health]:
    """The program, built here; what of it Go has compiled before, for the cluster or an earlier run, is fast."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go to build kstatus and Argo CD's interpreter with: install Go")
    program = folder / "health"
    options = ["-mod=readonly", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w"]
    environment = {**os.environ, "GOFLAGS": "", "GOWORK": "off", "CGO_ENABLED": "0"}
    command = [go, "build", *options, "-o", str(program), "."]
    done = subprocess.run(command, cwd=MODULE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scripts = {}
    for kind, script in scripts_in_guide().items():
        scripts[kind] = folder / f"{kind}.lua"
        scripts[kind].write_text(script)
    yield Health(program, scripts)
