"""A GGUF file that is cut off, for an engine that reads it by itself."""

import pytest

from omnimodel.errors import Reason
from runtime.test_llama_gguf import write

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]


async def test_it_is_named_before_the_server_of_llamacpp_is_started(world):
    folder = world.folder / "cut"
    folder.mkdir()
    path = write(folder / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-64])
    path.chmod(0o644)
    runtime = {"engine": "llamacpp", "task": "text-generation"}
    spec = {"source": {"path": str(folder)}, "runtime": runtime, "resources": {"deviceMemory": "64Mi"}}
    await world.apply({"metadata": {"name": "cut"}, "spec": spec})
    report = world.report("cut")
    assert (report.ready, report.reason) == (False, Reason.BAD_ARTIFACT), report
    assert "tiny.gguf: is no valid GGUF file" in report.message
    assert report.wakes == 0
