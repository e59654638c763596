"""The llamacpp engine with the real llama.cpp, as examples/llamacpp has it; compiles it when it must."""

import asyncio
import json
import os

import pytest

from agent.world import MIB, World, pool
from example_models import manifests
from omnimodel.protocol import probe as probes
from omnimodel.protocol.dispatch import InferenceRequest
from omnimodel.runtime.engines.llamacpp import CALLS, FIELDS

BUILD = "OMNI_TEST_BUILD"
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.root]


@pytest.fixture(scope="module")
def manifest():
    """The example; skips unless its package may be compiled."""
    (found,) = manifests(folder="llamacpp").values()
    if not os.environ.get(BUILD):
        requirement = found["spec"]["runtime"]["environment"]["requirements"][0]
        pytest.skip(f"compiling {requirement} can take minutes; make test-llamacpp does it ({BUILD}=1)")
    return found


async def test_llamacpp_answers_streams_leaves_and_comes_back(manifest, tmp_path):
    world = World(tmp_path)
    world.pool = pool(640 * MIB)
    await world.agent.start()
    try:
        await world.apply(manifest, wait=False)
        name = manifest["metadata"]["name"]
        await world.until(lambda: world.report(name).phase in {"serving", "idle", "failed"}, name, 1800)
        assert world.report(name).ready, world.report(name)
        text = await answer(world, name)
        assert "Paris" in text
        events = (await ask(world, name, stream=True)).split("\n\n")
        assert events[-2] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text

        assert "max_completion_tokens" in await ask(world, name, status=400, max_completion_tokens=8)
        check_fields(json.loads(await sent(world, name, "GET", "/openapi.json")))

        engine = world.instance(name).process
        assert 0 < engine.private_bytes() <= world.report(name).device_bytes  # what it was granted
        await world.agent.evict("default", name, 30)
        assert engine.private_bytes() < 64 * MIB
        report = world.report(name)
        assert (report.tier, report.device_bytes) == ("warm", 0)
        assert len(engine.group.pids()) == 1  # the engine itself has ended
        assert await asyncio.gather(*(answer(world, name) for _ in range(4))) == [text] * 4
        assert world.report(name).wakes == 2
        world.check_ledger()
    finally:
        await world.agent.stop(5.0)


def check_fields(schema):
    """The fields that we let pass are those that the server has, but for the ones that it has and passes over."""
    for path, fields in FIELDS.items():
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        known = set(schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"])
        assert fields <= known, path
        assert known - fields <= {"n", "best_of", *CALLS}, path


async def sent(world, name, method, path, headers=None, body=b"", status=200):
    """The whole body of the answer to a request."""
    async with world.agent.open(InferenceRequest(name, method, path, headers or {}, body, None)) as response:
        answer = b"".join([chunk async for chunk in response.body]).decode()
        assert response.status == status, answer
        return answer


async def ask(world, name, status=200, **more):
    """What the example's probe asks."""
    request = probes.request(world.manifests[name]["spec"]["probe"])
    body = json.dumps({**json.loads(request.body), **more}).encode()
    return await sent(world, name, request.method, request.path, dict(request.headers), body, status)


async def answer(world, name):
    return json.loads(await ask(world, name))["choices"][0]["message"]["content"]
