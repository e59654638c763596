"""Foreign servers of the catalogue: started, asked, stopped, started again."""

import sys

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
        async with child.session.post(request.path, json={"inputs": []}) as response:
            assert response.status == 400
        await child.command(Evict())
        async with child.session.post(request.path, data=request.body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "not_resident")
