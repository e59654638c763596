"""What `omni up` says where nobody looks at a terminal: lines for people, without a process of its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from cli.conftest import PROBE
from controllers.manifests import write_model, write_pool
from controllers.standin import StandInAgent, until
from omnimodel.cli.aside import Lines
from omnimodel.cli.display import Display
from omnimodel.controllers.local import LocalController
from omnimodel.controllers.local_state import IdentityFile

ADDRESS = "http://127.0.0.1:8080"


async def shown(folder: Path, state: Path) -> tuple[str, str]:
    """What is on standard output and on standard error once the address has been told."""
    agent = StandInAgent()
    controller = LocalController(folder, agent, IdentityFile(state))
    (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
    display = Display(controller, ADDRESS, form=None, out=Lines(out_end), errors=Lines(errors_end))
    tasks = [asyncio.create_task(work) for work in (controller.run(), display._lines())]
    await until(lambda: agent.names, "the models")
    said = b""
    while said.count(b"\n") < 2:
        said += await asyncio.to_thread(os.read, out, 65536)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    os.close(errors_end)
    os.close(out_end)
    with os.fdopen(out, "rb"), os.fdopen(errors, "rb") as messages:
        return said.decode(), messages.read().decode()


async def test_the_address_and_a_line_to_paste_are_all_of_stdout(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    write_pool(tmp_path / "catalog", "default")
    write_model(tmp_path / "catalog", "words", extra=PROBE)
    write_model(tmp_path / "catalog", "lost", extra="pool: none")
    (tmp_path / "catalog" / "broken.yaml").write_text("kind: OmniModel\n")
    said, messages = await shown(tmp_path / "catalog", tmp_path / "objects.json")
    assert said.splitlines() == [f"Ready at {ADDRESS}", f"curl -s {ADDRESS}/v1/models"]
    lines = messages.splitlines()
    assert any(line.startswith("lost: PoolNotFound: ") for line in lines)
    assert any(line.startswith("error: ") and "broken.yaml" in line for line in lines)
    assert any("InvalidManifest" in line and line.endswith("broken.yaml)") for line in lines), "events are lines, too"
