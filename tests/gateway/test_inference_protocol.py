"""The Open Inference Protocol v2, with names that hold slashes and colons."""

from __future__ import annotations

import json

import pytest

from gateway.world import World

BODY = b'{"inputs": [{"name": "image", "shape": [1, 3], "datatype": "FP32", "data": [1,  2, 3]}]}'
NAMES = ["resnet", "org/resnet:50", "a/versions/b", "weird/infer", "has space"]


@pytest.fixture
def named(world: World) -> World:
    world.agent.change("resnet", served_names=tuple(NAMES))
    return world


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_a_request_reaches_the_model_byte_for_byte(named: World, name: str, version: str) -> None:
    response = await named.post(f"/v2/models/{name}{version}/infer", data=BODY)

    assert response.status == 200, await response.text()
    assert await response.json() == {"model_name": "resnet", "outputs": []}
    assert named.process.bodies == [BODY]


async def test_a_name_in_percent_signs_is_the_same(named: World) -> None:
    response = await named.session.post(named.url + "/v2/models/org%2Fresnet%3A50/infer", data=BODY)

    assert response.status == 200


@pytest.mark.parametrize("name", NAMES)
async def test_metadata_and_readiness_wake_nobody(named: World, name: str) -> None:
    metadata = await (await named.get(f"/v2/models/{name}")).json()

    assert metadata == {
        "name": "resnet",
        "versions": ["1"],
        "platform": "omnimodel_infer",
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [],
    }
    assert (await named.get(f"/v2/models/{name}/versions/1")).status == 200
    assert (await (await named.get(f"/v2/models/{name}/ready")).json()) == {"name": "resnet", "ready": True}
    assert not named.agent.requests


async def test_a_model_that_is_not_ready_says_so(named: World) -> None:
    named.agent.change("resnet", ready=False)

    assert (await named.get("/v2/models/resnet/ready")).status == 503


async def test_the_server_says_what_it_is(world: World) -> None:
    assert (await (await world.get("/v2")).json())["name"] == "omnimodel"
    assert (await (await world.get("/v2/health/live")).json()) == {"live": True}
    assert (await (await world.get("/v2/health/ready")).json()) == {"ready": True}


REFUSED = {
    "a typo": ("/v2/models/resnt/infer", BODY, 404, 'model "resnt" does not exist; did you mean resnet'),
    "a version that is not there": ("/v2/models/resnet/versions/2/infer", BODY, 404, 'model "resnet" has no version 2'),
    "a text generator": ("/v2/models/smollm2/infer", BODY, 400, "send it to POST /v1/chat/completions"),
    "no verb": ("/v2/models/resnet", BODY, 404, "use POST /v2/models/resnet/infer"),
    "no JSON": ("/v2/models/resnet/infer", b"image", 400, "the body is not JSON"),
    "a list": ("/v2/models/resnet/infer", b" [1]", 400, "the body is a list"),
    "empty": ("/v2/models/resnet/infer", b"", 400, "the body is empty"),
    "too large": ("/v2/models/resnet/infer", b"{" + b" " * 2000, 413, "the limit is 1000 bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_refused_in_the_manner_of_the_protocol(world: World, what: str) -> None:
    world.agent.change("resnet", request_bytes=1000)
    path, body, status, message = REFUSED[what]
    response = await world.post(path, data=body)
    answer = await response.json()

    assert response.status == status
    assert set(answer) == {"error"}
    assert message in answer["error"]
    assert not world.agent.requests


async def test_infer_by_get_is_told_to_post(named: World) -> None:
    response = await named.get("/v2/models/resnet/infer")

    assert response.status == 405
    assert (await response.json())["error"] == "infer is asked for with GET; use POST"


async def test_an_alias_sets_what_the_request_does_not(named: World) -> None:
    named.agent.change("resnet", defaults={"org/resnet:50": {"parameters": {"top": 5}}})
    await named.post("/v2/models/org/resnet:50/infer", data=BODY)

    assert json.loads(named.process.bodies[0]) == {**json.loads(BODY), "parameters": {"top": 5}}


async def test_an_alias_sets_fields_before_binary_tensors(named: World) -> None:
    named.agent.change("resnet", defaults={"org/resnet:50": {"parameters": {"top": 5}}})
    tensors = bytes(range(256))
    headers = {"Inference-Header-Content-Length": str(len(BODY))}
    response = await named.post("/v2/models/org/resnet:50/infer", data=BODY + tensors, headers=headers)
    assert response.status == 200, await response.text()
    sent, length = named.process.bodies[0], int(named.process.headers[0]["Inference-Header-Content-Length"])
    assert json.loads(sent[:length]) == {**json.loads(BODY), "parameters": {"top": 5}}
    assert sent[length:] == tensors


@pytest.mark.parametrize("length", ["many", "-1", "100000"])
async def test_a_length_that_makes_no_sense_is_refused(named: World, length: str) -> None:
    named.agent.change("resnet", defaults={"org/resnet:50": {"parameters": {"top": 5}}})
    headers = {"Inference-Header-Content-Length": length}
    response = await named.post("/v2/models/org/resnet:50/infer", data=BODY, headers=headers)
    assert response.status == 400
    assert f'Inference-Header-Content-Length is "{length}"' in (await response.json())["error"]


async def test_embedders_answer_here_too(world: World) -> None:
    assert (await world.post("/v2/models/minilm/infer", data=BODY)).status == 200
