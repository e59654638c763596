"""The example catalogue behind `omni up`, once for all tests of the whole product."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from example_models import EXAMPLES, MODELS, Packages, cache
from omnimodel.cli.bench.swap import comparable
from omnimodel.cli.check import addressed
from omnimodel.cli.client import Answer
from omnimodel.protocol import probe as probes
from running import DEADLINE_SECONDS, Up, until

START_SECONDS = 480.0  # every model is published, on a machine that may be busy


@dataclass
class Catalogue:
    """The running catalogue.

    Args:
        up: its process.
        temporary: what it has for TMPDIR.
        answers: the first answer of each model to its probe, without what differs each time.
        killed: the processes of an earlier system on the same state.
    """

    up: Up
    temporary: Path
    answers: dict[str, bytes] = field(default_factory=dict)
    killed: list[psutil.Process] = field(default_factory=list)

    @property
    def state_dir(self) -> Path:
        return self.up.state_dir

    def ask(self, name: str) -> bytes:
        """The lasting part of a model's answer to its probe, which must be what its manifest expects."""
        probe = MODELS[name]["spec"]["probe"]
        asked = probes.request(addressed(probe, name))
        answer = until(lambda: self._answer(asked), f"an answer of {name} within its own deadline")
        assert probes.failures(probe, answer.status, answer.headers, answer.body) == [], name
        return comparable(answer.body)

    def _answer(self, asked: probes.ProbeRequest) -> Answer | None:
        """None when a busy machine did not make it in time, which an answer says: then one asks again."""
        answer = self.up.client.request(asked.method, asked.path, asked.body, asked.headers, DEADLINE_SECONDS)
        return None if answer.status == 504 else answer

    def status(self, name: str) -> dict[str, Any]:
        """Of a model."""
        return self.up.client.model("default", name)["status"]

    def process(self, name: str) -> dict[str, Any]:
        """The status of the process of a model."""
        found = {item["metadata"]["name"]: item for item in self.up.client.objects("omniprocesses")}
        return found[name]["status"]

    def pool(self) -> dict[str, Any]:
        """The status of the pool."""
        (item,) = self.up.client.objects("omnipools")
        return item["status"]

    def images(self) -> dict[Path, int]:
        """What is published, with what tells whether it was written anew."""
        return {path: path.stat().st_ino for path in (self.state_dir / "store").rglob("image")}

    def kill_and_start_again(self) -> None:
        """SIGKILL for all of it, and a new one on the same state."""
        self.killed += self.up.kill_all()
        self.up = start(self.state_dir, self.temporary)


def start(state_dir: Path, temporary: Path) -> Up:
    """`omni up examples/catalog`; packages are there already, and nothing else is to be downloaded."""
    variables = {"TMPDIR": str(temporary), "PIP_NO_INDEX": "1"}
    return Up(EXAMPLES / "catalog", state_dir, variables=variables, start_seconds=START_SECONDS)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    """The catalogue on a state directory of its own, ready."""
    if os.getuid() != 0:
        pytest.skip("sandboxes with namespaces and control groups need root")
    root = tmp_path_factory.mktemp("system")
    root.chmod(0o755)
    state_dir, temporary = root / "state", root / "temporary"
    temporary.mkdir()
    packages = Packages(cache())

    async def fetch() -> None:
        for name in MODELS:
            await packages.fetched(name, state_dir / "sources")

    asyncio.run(fetch())
    running = Catalogue(start(state_dir, temporary), temporary)
    running.up.ready()
    yield running
    if running.up.process.poll() is None:
        running.up.stop()
