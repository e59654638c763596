"""An agent that asks for a token: who is let in, and how agents and gateways go over to another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from gateway.standin import System
from gateway.world import until
from gateway_remote.world import PATH, Cluster, Pod, chat, start_pod
from omnimodel.errors import DispatchError
from omnimodel.gateway.app import create_app, serve
from omnimodel.gateway.gateway import GATEWAY
from omnimodel.gateway.remote_admin import AgentsAdmin
from omnimodel.gateway.routing import RoutingBackend
from omnimodel.gateway.settings import Settings
from omnimodel.gateway.tokens import BEFORE_SECONDS, LOOK_SECONDS, Tokens, bearer
from omnimodel.protocol.ingress import INGRESS_PATH

OPEN = {"/healthz", "/readyz", "/metrics"}
OLD, NEW = "o" * 64, "n" * 64


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(OLD + "\n")
    return path


@pytest.fixture
async def pod(tmp_path: Path, file: Path, clock: Clock) -> AsyncIterator[Pod]:
    """A pod whose agent asks for the token in the file."""
    pod = await start_pod(tmp_path, "pod-0", tokens=Tokens(file, clock))
    pod.add("m", tier="resident")
    yield pod
    await pod.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def cluster(pod: Pod, session: aiohttp.ClientSession) -> AsyncIterator[Cluster]:
    """A gateway before that pod; it knows the token."""
    async with AsyncExitStack() as stack:
        backend = RoutingBackend()
        stack.push_async_callback(backend.close)
        app = create_app(backend, System(), settings=Settings(drain_seconds=2.0))
        listening = await serve(app, "127.0.0.1", 0)
        stack.push_async_callback(listening.close)
        found = Cluster([pod], backend, listening.address, app[GATEWAY], session)
        hand(found, OLD)
        await found.known(pods=1)
        yield found


def hand(cluster: Cluster, *tokens: str) -> None:
    """What a gateway does when it hears of other tokens."""
    cluster.backend.set_agents([replace(cluster.pods[0].address, tokens=tokens)])


def change(file: Path) -> None:
    """What a kubelet does when it hears of another token."""
    file.write_text(NEW)


# -- the file --


def test_the_token_before_is_good_for_a_while(file: Path, clock: Clock) -> None:
    tokens = Tokens(file, clock)
    assert tokens.good() == (OLD,)
    file.write_text(NEW)
    clock.pass_by(LOOK_SECONDS)
    assert tokens.good() == (NEW, OLD)
    clock.pass_by(BEFORE_SECONDS)
    assert tokens.good() == (NEW,)


@pytest.mark.parametrize(
    "become", [Path.unlink, lambda file: file.write_text(" \n"), lambda file: file.write_bytes(b"\xff")]
)
def test_a_file_that_goes_bad_opens_nothing_and_closes_nothing(file: Path, clock: Clock, become) -> None:
    tokens = Tokens(file, clock)
    become(file)
    clock.pass_by(BEFORE_SECONDS * 2)
    assert tokens.good() == (OLD,)
    assert not tokens.accept("Bearer ")


def test_nobody_is_let_in_before_there_is_a_token(tmp_path: Path, clock: Clock) -> None:
    tokens = Tokens(tmp_path / "none", clock)
    assert not any(tokens.accept(text) for text in ("", "Bearer", "Bearer ", f"Bearer {OLD}"))
    (tmp_path / "none").write_text(OLD)
    clock.pass_by(LOOK_SECONDS)
    assert tokens.accept(f"Bearer {OLD}")


@pytest.mark.parametrize(
    "header", ["", OLD, f"Basic {OLD}", f"Bearer {NEW}", f"Bearer {OLD}x", f"Bearer {OLD[:-1]}", "Bearer \udcff"]
)
def test_what_is_not_the_token_is_not_accepted(file: Path, clock: Clock, header: str) -> None:
    assert not Tokens(file, clock).accept(header)


# -- the agent's port --


async def test_every_endpoint_but_probes_and_metrics_asks_for_the_token(
    pod: Pod, session: aiohttp.ClientSession
) -> None:
    app = pod.listening._runner.app
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.method != "HEAD"}
    assert {path for _, path in routes} > OPEN | {"/omni/v1/prune", "/omni/v1/report", "/v1/chat/completions"}
    for method, path in routes:
        url = pod.listening.address + path.replace("{path:.*}", "v1/models").replace("{", "").replace("}", "")
        for headers in ({}, bearer(NEW)):
            async with session.request("POST" if method == "*" else method, url, headers=headers) as response:
                assert (response.status == 401) == (path not in OPEN), path
    assert pod.system.calls == pod.agent.requests == []


@pytest.mark.parametrize(
    "path", ["/omni/v1/models/default/m/evict", "/nothing", "/healthz/../omni/v1/prune", "//metrics"]
)
async def test_a_refusal_says_what_is_wanted(pod: Pod, session: aiohttp.ClientSession, path: str) -> None:
    async with session.post(pod.listening.address + path) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = (await response.json())["error"]
    assert error["code"] == "unauthorized"
    assert error["message"].startswith(
        "this agent is asked with a token, and there was none; send the one of the Secret"
    )


async def test_of_who_has_no_token_no_body_is_read(pod: Pod, session: aiohttp.ClientSession) -> None:
    sent = []

    async def body():
        sent.append(1)
        yield b"x"

    url = f"{pod.listening.address}{INGRESS_PATH}/default/m{PATH}"
    async with session.post(url, data=body(), expect100=True) as response:
        assert response.status == 401
    assert not sent
    assert not pod.agent.requests


async def test_who_has_the_token_may_do_what_the_port_is_for(pod: Pod, session: aiohttp.ClientSession) -> None:
    pod.system.kinds["OmniModel"] = [{"metadata": {"name": "m"}}]
    url = f"{pod.listening.address}/omni/v1/models/default/m/wake"
    async with session.post(url, headers=bearer(OLD)) as response:
        assert response.status == 200


async def test_a_model_never_hears_the_token(cluster: Cluster) -> None:
    response = await cluster.post(json=chat(), headers={"Authorization": "Bearer of-the-client"})
    assert response.status == 200
    (headers,) = cluster.pods[0].process.headers
    assert "Authorization" not in headers
    assert OLD not in str(headers)


async def test_what_a_gateway_is_asked_to_do_reaches_the_agent(cluster: Cluster) -> None:
    pod = cluster.pods[0]
    pod.system.kinds["OmniModel"] = [{"metadata": {"name": "m"}}]
    admin = AgentsAdmin(cluster.backend, lambda _: [])
    assert (await admin.wake("default", "m", 1.0))["tier"] == "resident"
    with pytest.raises(DispatchError, match="is kept resident"):
        await admin.evict("default", "m", 1.0)
    assert [line async for line in admin.logs("default", "m", tail=1, follow=False)] == [b"line 0\n"]
    assert (await admin.prune(dry_run=True))["unreached"] == []


# -- another token --


async def test_no_request_fails_while_a_token_is_changed(cluster: Cluster, file: Path, clock: Clock) -> None:
    """The gateway hears of it first; the kubelet brings it to the agent later; the old one ends at last."""
    stop = asyncio.Event()
    statuses: list[int] = []

    async def ask() -> None:
        while not stop.is_set():
            statuses.append((await cluster.post(json=chat())).status)

    async def more() -> None:
        wanted = len(statuses) + 5
        await until(lambda: len(statuses) >= wanted)

    agent = next(iter(cluster.backend.seats.values())).agent
    asking = asyncio.create_task(ask())
    await more()
    hand(cluster, NEW, OLD)
    await more()
    assert agent.headers == bearer(OLD)
    change(file)
    clock.pass_by(LOOK_SECONDS)
    cluster.pods[0].reporter.tell()  # else with the next sign of life
    await until(lambda: agent.headers == bearer(NEW))
    clock.pass_by(BEFORE_SECONDS)
    await more()
    stop.set()
    await asking
    assert set(statuses) == {200}
    assert next(iter(cluster.backend.seats.values())).agent is agent


async def test_a_gateway_that_lags_behind_is_answered_and_then_out_until_it_hears_of_the_new_one(
    cluster: Cluster, file: Path, clock: Clock
) -> None:
    seat = next(iter(cluster.backend.seats.values()))
    change(file)
    clock.pass_by(LOOK_SECONDS)
    assert (await cluster.post(json=chat())).status == 200
    clock.pass_by(BEFORE_SECONDS)
    asked = asyncio.create_task(cluster.post(json=chat()))
    await until(lambda: seat.problem == "it does not know the token of this gateway")
    assert AgentsAdmin(cluster.backend, lambda _: []).status_lines()["agents"][0]["problem"] == seat.problem
    hand(cluster, NEW, OLD)
    assert (await asked).status == 200, "it was held meanwhile"


async def test_a_gateway_without_a_token_says_so(pod: Pod) -> None:
    backend = RoutingBackend()
    backend.set_agents([pod.address])
    await until(lambda: backend.seats[pod.address.url].problem == "it wants a token")
    await backend.close()
