"""Every model of the catalogue, for real: published from its package, bound to frames, asked, evicted, woken elsewhere."""

import json

import pytest

from catalog_models.catalogue import OWN, dtype_of, ordinary_spec
from example_models import MODELS
from omnimodel.memory.image import read_index
from omnimodel.protocol import probe as probes

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.timeout(600)]


async def ask(child, name):
    """The answer to the model's probe: status, headers, body."""
    request = probes.request(MODELS[name]["spec"]["probe"])
    headers = dict(request.headers)
    async with child.session.request(request.method, request.path, data=request.body, headers=headers) as response:
        return response.status, dict(response.headers), await response.read()


def lasting(body: bytes):
    """What of an answer is the same each time."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    return {key: value for key, value in answer.items() if key not in ("id", "created", "model", "model_name")}


@pytest.mark.parametrize("name", OWN)
async def test_answers_its_probe_with_the_same_bits_in_any_frames_as_with_ordinary_weights(
    name, serve, packages, new_child, frames, tmp_path
):
    child = await serve(name)
    status, headers, body = await ask(child, name)
    assert probes.failures(MODELS[name]["spec"]["probe"], status, headers, body) == []

    for _ in range(2):
        old = child.frames
        child.frames = frames.fill(child.image)  # made before the old ones go: none can be the same
        reply = await frames.evict(child, old)
        assert reply.values["frozen"] == 0
        await frames.wake(child, child.frames)
        assert lasting((await ask(child, name))[2]) == lasting(body)

    source = await packages.source(name)
    ordinary = new_child()
    empty = tmp_path / "empty"
    spec = await ordinary_spec(name, packages, source)
    await new_child().publish(spec, source, empty, dtype_of(name))
    assert read_index(empty).bytes == 0
    await ordinary.start(spec, empty)
    await frames.wake(ordinary, [])
    assert lasting((await ask(ordinary, name))[2]) == lasting(body)
