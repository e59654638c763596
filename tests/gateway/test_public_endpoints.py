"""What clients of models get where they are others than the people who run the system."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from gateway.world import World
from omnimodel.gateway.app import create_app, create_public_app, serve
from omnimodel.protocol.admin import ADMIN_PATH, OBJECTS_PATH
from omnimodel.protocol.ingress import EXCHANGES_PATH, INGRESS_PATH, REPORT_PATH, Told

CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hello"}]}
MODEL = ADMIN_PATH + "/models/default/smollm2"


@pytest.fixture
async def public(world: World) -> AsyncIterator[str]:
    """Address of the endpoints for clients of an agent that tells everything elsewhere."""
    reporting = Told(lambda: pytest.fail("it was asked"), lambda: pytest.fail("it was asked"))
    whole = create_app(world.agent, world.system, settings=world.gateway.settings, reporting=reporting)
    listening = await serve(create_public_app(whole), "127.0.0.1", 0)
    yield listening.address
    await listening.close()


STEERING = [
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", OBJECTS_PATH + "/omnimodels"),
    ("GET", OBJECTS_PATH + "/omnimodels/default/smollm2"),
    ("POST", MODEL + "/wake"),
    ("POST", MODEL + "/evict"),
    ("GET", MODEL + "/logs"),
    ("GET", ADMIN_PATH + "/events"),
    ("GET", ADMIN_PATH + "/status"),
    ("GET", REPORT_PATH),
    ("GET", EXCHANGES_PATH + "/x"),
    ("POST", INGRESS_PATH + "/default/smollm2/v1/chat/completions"),
]


@pytest.mark.parametrize(("method", "path"), STEERING, ids=[path for _, path in STEERING])
async def test_nothing_that_steers_or_tells_is_there(world: World, public: str, method: str, path: str) -> None:
    async with world.session.request(method, public + path) as response:
        assert response.status == 404
        message = (await response.json())["error"]["message"]
    assert ("--admin-listen" in message) == (path != "/")
    assert not world.system.calls


async def test_no_path_of_the_admin_api_is_public(world: World, public: str) -> None:
    """Those that will be added, too."""
    reporting = Told(lambda: pytest.fail("it was asked"), lambda: pytest.fail("it was asked"))
    whole = create_app(world.agent, world.system, reporting=reporting)
    open_to_all = {(route.method, route.resource.canonical) for route in create_public_app(whole).router.routes()}
    steering = [route for route in whole.router.routes() if (route.method, route.resource.canonical) not in open_to_all]
    assert len(steering) >= len(STEERING)
    for route in steering:
        path = re.sub(r"\{[^}]*\}", "x", route.resource.canonical)
        async with world.session.request("GET" if route.method == "*" else route.method, public + path) as response:
            assert response.status == 404, path
    assert {path for _, path in open_to_all if not path.startswith(("/v1/", "/v2"))} == {"/healthz", "/readyz"}


async def test_models_answer_and_probes_are_answered(world: World, public: str) -> None:
    async with world.session.post(public + "/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
    for path in ("/v1/models", "/v2/models/resnet", "/healthz", "/readyz"):
        async with world.session.get(public + path) as response:
            assert response.status == 200


async def test_what_clients_ask_is_counted_for_those_who_look(world: World) -> None:
    whole = create_app(world.agent, world.system)
    for_clients = await serve(create_public_app(whole), "127.0.0.1", 0)
    for_people = await serve(whole, "127.0.0.1", 0)
    async with world.session.post(for_clients.address + "/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
    async with world.session.get(for_people.address + "/metrics") as response:
        assert 'omni_requests_total{model="smollm2",outcome="ok"} 1.0' in await response.text()
    await for_clients.close()
    async with world.session.get(for_people.address + "/readyz") as response:
        assert response.status == 503
    await for_people.close()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("GET", "/v2/models/resnet/infer", "POST"),
    ],
)
async def test_another_method_is_told_which_one(
    world: World, public: str, method: str, path: str, allowed: str
) -> None:
    async with world.session.request(method, public + path) as response:
        assert response.status == 405
        assert response.headers["Allow"] == allowed
