"""Foreign servers of the catalogue: started, asked, stopped, started again."""

import base64
import copy
import json
import sys
from contextlib import asynccontextmanager

import pytest

from catalog_models.catalogue import FOREIGN, process_spec
from example_models import MODELS
from omnimodel.protocol import probe as probes
from omnimodel.protocol.process import Evict, Start, Wake

pytestmark = [pytest.mark.models]


async def outside(name, packages, folder):
    """The process spec of a model whose mounts are plain folders here, without a sandbox around it."""
    model = MODELS[name]["spec"]
    places = {}
    for mount in model["mounts"]:
        if mount["source"] is True:
            places[mount["path"]] = str(await packages.source(name))
            continue
        target = folder / mount["name"]
        target.mkdir()
        for file, text in mount["source"]["files"].items():
            (target / file).write_text(text)
        places[mount["path"]] = str(target)
    command = []
    for word in model["runtime"]["command"]:
        inside = next((path for path in places if word.startswith(path)), None)
        command.append(word if inside is None else places[inside] + word.removeprefix(inside))
    if command[0] == "python":
        command[0] = sys.executable
    spec = await process_spec(name, packages, healthPath=model["runtime"]["healthPath"])
    spec["command"] = ["env", f"PYTHONPATH={':'.join(spec['environment']['paths'])}", *command]
    return spec


@asynccontextmanager
async def awake(name, packages, new_child, folder):
    """A server that runs, and the request of its probe."""
    child = new_child()
    await child.command(Start(await outside(name, packages, folder), "", 0, 4 << 20, "host", 1))
    child.connect()
    await child.command(Wake([]))
    yield child, probes.request(MODELS[name]["spec"]["probe"])
    await child.command(Evict())


@pytest.mark.parametrize("name", FOREIGN)
async def test_answers_its_probe_after_every_start(name, packages, new_child, tmp_path):
    spec = await outside(name, packages, tmp_path)
    probe = MODELS[name]["spec"]["probe"]
    child = new_child()
    await child.command(Start(spec, "", 0, 4 << 20, "host", 1))
    child.connect()
    request = probes.request(probe)
    for _ in range(2):
        await child.command(Wake([]))
        async with child.session.post(request.path, data=request.body, headers=dict(request.headers)) as response:
            assert probes.failures(probe, response.status, response.headers, await response.read()) == []
        closing = {"Connection": "close"}  # the server ends, and with it what it keeps open
        async with child.session.post(request.path, json={"inputs": []}, headers=closing) as response:
            assert response.status == 400
            assert "one input of BYTES" in (await response.json())["error"]
        await child.command(Evict())
        async with child.session.post(request.path, data=request.body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "not_resident")


async def test_the_file_type_server_refuses_what_it_does_not_follow_by_its_name(packages, new_child, tmp_path):
    changes = {
        "parameters": lambda body: body.update(parameters={"threshold": 0.5}),
        "outputs": lambda body: body.update(outputs=[{"name": "label"}]),
        "inputs.files.name": lambda body: body["inputs"][0].update(name="file"),
        "inputs.files.datatype": lambda body: body["inputs"][0].update(datatype="FP32"),
        "inputs.files.shape": lambda body: body["inputs"][0].update(shape=[2]),
        "inputs.files.offset": lambda body: body["inputs"][0].update(offset=3),
        "inputs.files.parameters.content_type": lambda body: body["inputs"][0].update(
            parameters={"content_type": "hex"}
        ),
        "inputs.files.parameters.encoding": lambda body: body["inputs"][0].update(parameters={"encoding": "utf-8"}),
    }
    async with awake("magika", packages, new_child, tmp_path) as (child, request):
        for param, change in changes.items():
            body = json.loads(request.body)
            change(body)
            status, answer = await child.post(request.path, body)
            assert (status, answer["param"], answer["code"]) == (400, param, "unsupported_parameter")
        asked = json.loads(request.body)
        encoded = copy.deepcopy(asked)
        encoded["inputs"][0] |= {
            "data": [base64.b64encode(asked["inputs"][0]["data"][0].encode()).decode()],
            "parameters": {"content_type": "base64"},
        }
        answers = [await child.post(request.path, {**body, "id": "7"}) for body in (asked, encoded)]
    assert [(status, answer["id"], answer["outputs"][0]["data"]) for status, answer in answers] == [
        (200, "7", ["python"])
    ] * 2
