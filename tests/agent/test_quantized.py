"""A quantized model in an agent: its image is what is stored, woken and accounted for."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from agent.world import HANDLER, MIB, World
from omnimodel.errors import Reason
from omnimodel.memory.ledger import Kind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

WIDE = 1024
LAYERS = 6
QUANTIZED = """
import torch
from omnimodel.runtime.sdk import Model

class Handler(Model):
    def build(self):
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)))

    def predict(self, command: str) -> dict[str, float]:
        x = torch.randn(1, 1024, generator=torch.Generator().manual_seed(len(command)))
        return {"norm": float(self.module(x).norm())}
"""


@pytest.fixture
def layers(tmp_path):
    """A checkpoint of layers, 24 MiB in float32."""
    torch.manual_seed(2)
    values = {f"{number}.weight": torch.nn.Linear(WIDE, WIDE).weight.detach() for number in range(LAYERS)}
    tmp_path.chmod(0o755)
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").chmod(0o644)
    return tmp_path


def manifest(world: World, name: str, source, quantization: str, handler: str = QUANTIZED) -> dict:
    found = world.manifest(
        name,
        working_mib=112,  # the library that quantizes takes some 50 of it
        source={"path": str(source)},
        runtime={
            "handler": {"entry": "handler:Handler", "files": {"handler.py": handler}},
            "quantization": quantization,
        },
    )
    found["spec"]["probe"]["expect"] = [{"at": "/outputs/0/name", "equals": "norm"}]
    return found


SIZES = {  # values, and scales of 4 bytes with zero points of one: of a row, or of every 32
    "int8": (LAYERS * WIDE * WIDE, LAYERS * WIDE * (4 + 1)),
    "int4": (LAYERS * WIDE * WIDE // 2, LAYERS * WIDE * WIDE // 32 * (4 + 1)),
}


@pytest.mark.parametrize(("form", "error"), [("int8", 0.02), ("int4", 0.05)])
async def test_an_image_of_fewer_bits_is_stored_woken_and_accounted_for(world, layers, form, error):
    await world.apply(manifest(world, "dense", layers, "none"), manifest(world, "small", layers, form))
    reports = {name: world.report(name) for name in ("dense", "small")}
    assert all(report.ready for report in reports.values()), reports
    instances = {name: world.instance(name) for name in reports}
    assert instances["dense"].prepared.image.path != instances["small"].prepared.image.path
    assert reports["dense"].weights_bytes == LAYERS * WIDE * WIDE * 4
    values, scales = SIZES[form]
    assert values + scales <= reports["small"].weights_bytes < values + scales + 4096
    said = await world.ask("small")
    assert said == pytest.approx(await world.ask("dense"), rel=error)
    for _ in range(3):
        await world.agent.evict("default", "small", 60)
        assert world.report("small").tier != "resident"
        assert await world.ask("small") == said
        held = world.ledger.device.held_bytes("default/small", Kind.FRAMES)
        assert held == -(-(values + scales) // (4 * MIB)) * 4 * MIB
        world.check_ledger()


async def test_a_model_with_nothing_to_quantize_says_so_in_its_condition(world, layers):
    await world.apply(world.manifest("sums", runtime={"quantization": "fp8"}))
    report = world.report("sums")
    assert (report.phase, report.reason) == ("failed", Reason.INVALID_MANIFEST), report
    assert "nothing to quantize" in report.message
    assert "remove runtime.quantization" in report.message
    await world.apply(world.manifest("sums", handler=HANDLER))
    assert await world.ask("sums") == pytest.approx(world.answer(8, 1))
