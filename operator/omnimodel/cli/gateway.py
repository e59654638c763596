"""`omni gateway`: the endpoints in front of the agents of other pods or machines."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnimodel.cli.up import Listen, Stops
from omnimodel.errors import OmniError

if TYPE_CHECKING:
    from aiohttp.web import Application

    from omnimodel.gateway.remote_admin import AgentsAdmin
    from omnimodel.gateway.routing import RoutingBackend
    from omnimodel.gateway.routing_measures import RoutingMeasures

log = logging.getLogger(__name__)

LINGER_SECONDS = 5.0  # after SIGTERM: until every node has taken the pod out of its Service
SYNC_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """What `omni gateway` was asked for."""

    listen: tuple[str, int]
    admin_listen: tuple[str, int] | None
    agents: tuple[str, ...]
    namespaces: tuple[str, ...]
    kubeconfig: str
    agent_port: int
    agent_token_secret: str
    agent_namespaces: tuple[str, ...]
    agent_token_file: Path | None
    region: str
    zone: str
    drain_seconds: float
    linger_seconds: float


def words(_: click.Context, __: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    """Values of an option that may be repeated, or hold several with commas between."""
    return tuple(word.strip() for text in value for word in text.split(",") if word.strip())


@click.command()
@click.option("--listen", type=Listen(), envvar="OMNI_LISTEN", default="127.0.0.1:8080", show_default=True,
              help="Where to answer; port 0 takes a free one.")  # fmt: skip
@click.option("--admin-listen", type=Listen(), envvar="OMNI_ADMIN_LISTEN",
              help="Where to answer the people who run this: everything. Then --listen answers clients of models, and "
              "nobody steers or sees more there.  [default: everything at --listen]")  # fmt: skip
@click.option("--agents", multiple=True, envvar="OMNI_AGENTS", callback=words, metavar="URL,…",
              help="The agents, or systems of `omni up`; without it those that a cluster has.")  # fmt: skip
@click.option("--namespace", "namespaces", multiple=True, envvar="OMNI_NAMESPACES", callback=words, metavar="NAME,…",
              help="Namespaces of the cluster to look at.  [default: all]")  # fmt: skip
@click.option("--kubeconfig", default="", metavar="FILE", help="How to reach the cluster.  [default: as kubectl]")
@click.option("--agent-port", envvar="OMNI_AGENT_PORT", type=click.IntRange(1, 65535), default=8710, show_default=True,
              help="Where agents answer in their pods.")  # fmt: skip
@click.option("--agent-token-secret", envvar="OMNI_AGENT_TOKEN_SECRET", default="", metavar="NAME",
              help="The Secret that has the token of the agents of its namespace.")  # fmt: skip
@click.option("--agent-namespace", "agent_namespaces", multiple=True, envvar="OMNI_AGENT_NAMESPACES", callback=words,
              metavar="NAME,…", help="Namespaces with such a Secret.  [default: those that are looked at]")  # fmt: skip
@click.option("--agent-token-file", envvar="OMNI_AGENT_TOKEN_FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="The token of the agents that are named with --agents.")  # fmt: skip
@click.option("--region", envvar="OMNI_REGION", default="", help="Where this gateway is.")
@click.option("--zone", envvar="OMNI_ZONE", default="", help="Where this gateway is.")
@click.option("--drain", "drain_seconds", envvar="OMNI_DRAIN_SECONDS", type=click.FloatRange(min=0), default=30.0,
              show_default=True, help="Seconds that SIGTERM leaves to requests in flight.")  # fmt: skip
@click.option("--linger", "linger_seconds", envvar="OMNI_LINGER_SECONDS", type=click.FloatRange(min=0),
              help="Seconds after SIGTERM in which requests are still taken.  [default: 5 in a cluster, else 0]",
              )  # fmt: skip
@click.pass_context
def command(
    context: click.Context,
    listen: tuple[str, int],
    admin_listen: tuple[str, int] | None,
    agents: tuple[str, ...],
    namespaces: tuple[str, ...],
    kubeconfig: str,
    agent_port: int,
    agent_token_secret: str,
    agent_namespaces: tuple[str, ...],
    agent_token_file: Path | None,
    region: str,
    zone: str,
    drain_seconds: float,
    linger_seconds: float | None,
) -> None:
    """Answer requests by the agents of a cluster, or by those named with --agents."""
    if linger_seconds is None:
        linger_seconds = 0.0 if agents else LINGER_SECONDS
    log_to_stderr(debug=bool(context.obj))
    asyncio.run(
        serve(
            Options(
                listen, admin_listen, agents, namespaces, kubeconfig, agent_port, agent_token_secret, agent_namespaces,
                agent_token_file, region, zone, drain_seconds, linger_seconds,
            ),
        )
    )  # fmt: skip


def log_to_stderr(*, debug: bool) -> None:
    """Where a container's log goes; the level is that of OMNI_LOG_LEVEL."""
    import os

    level = logging.DEBUG if debug else getattr(logging, os.environ.get("OMNI_LOG_LEVEL", "info").upper(), logging.INFO)
    logging.basicConfig(
        level=level, format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s", stream=sys.stderr, force=True
    )
    for chatty in ("asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


async def serve(options: Options) -> None:
    """Run until told to stop; then take no more, let what is in flight end, and end.

    Raises:
        OmniError: the address cannot be listened on, or there is no way to a cluster.
    """
    from prometheus_client import CollectorRegistry

    from omnimodel.gateway.app import create_app, create_public_app
    from omnimodel.gateway.gateway import GATEWAY
    from omnimodel.gateway.routing_measures import RoutingMeasures
    from omnimodel.gateway.settings import Settings

    stops = Stops()
    registry = CollectorRegistry()
    measures = RoutingMeasures(registry)
    async with (_by_hand if options.agents else _by_cluster)(options, measures) as (backend, admin, following):
        settings = Settings(drain_seconds=options.drain_seconds, needs_pool=False)
        app = create_app(backend, admin, settings=settings, metrics_registry=registry)
        apart = options.admin_listen is not None
        async with AsyncExitStack() as stack:
            if options.admin_listen is not None:
                address = await _listen(stack, app, options.admin_listen)
                print(f"listening on {address} for those who run this", file=sys.stderr, flush=True)
            address = await _listen(stack, create_public_app(app) if apart else app, options.listen)
            print(f"listening on {address}", file=sys.stderr, flush=True)
            closing = asyncio.create_task(_close_after(stops, app[GATEWAY].leaving, options.linger_seconds))
            await _first_of(closing, following)
            print("stopping: requests in flight may finish", file=sys.stderr, flush=True)
            ended = asyncio.create_task(stack.aclose())
            hurry = asyncio.create_task(stops.next())
            await asyncio.wait({ended, hurry}, return_when=asyncio.FIRST_COMPLETED)
            for task in (hurry, ended):
                task.cancel()
            await asyncio.gather(ended, hurry, return_exceptions=True)
    print("stopped", file=sys.stderr, flush=True)


async def _listen(stack: AsyncExitStack, app: Application, where: tuple[str, int]) -> str:
    """Listen until the stack is closed; the address."""
    from omnimodel.gateway.app import serve as listen

    listening = await listen(app, *where)
    stack.push_async_callback(listening.close)
    return listening.address


async def _close_after(stops: Stops, leaving: asyncio.Event, linger_seconds: float) -> None:
    """Wait for the first request to stop, and then a while longer, or for the second."""
    await stops.next()
    leaving.set()
    hurry = asyncio.create_task(stops.next())
    await asyncio.wait({hurry}, timeout=linger_seconds)
    hurry.cancel()


# A backend, what answers people, and the task that the backend depends on.
Made = tuple["RoutingBackend", "AgentsAdmin", "asyncio.Task[None] | None"]


@asynccontextmanager
async def _by_hand(options: Options, measures: RoutingMeasures) -> AsyncIterator[Made]:
    """A backend for agents that were named."""
    from omnimodel.controllers.gateway_objects import AgentObjects
    from omnimodel.gateway.order import Place
    from omnimodel.gateway.remote_admin import AgentsAdmin
    from omnimodel.gateway.routing import RoutingBackend
    from omnimodel.gateway.seats import Address
    from omnimodel.gateway.tokens import LOOK_SECONDS, Tokens

    backend = RoutingBackend(here=Place(options.region, options.zone), measures=measures)
    tokens = Tokens(options.agent_token_file) if options.agent_token_file else None

    def know() -> None:
        good = tokens.good() if tokens else ()
        backend.set_agents([Address(_url(agent), tokens=good) for agent in options.agents])

    async def look() -> None:
        known = tokens.good() if tokens else ()
        while tokens is not None:
            await asyncio.sleep(LOOK_SECONDS)
            if known != tokens.good():
                known = tokens.good()
                know()

    know()
    looking = asyncio.create_task(look(), name="token")
    try:
        yield backend, AgentsAdmin(backend, AgentObjects(backend)), None
    finally:
        looking.cancel()
        await backend.close()


@asynccontextmanager
async def _by_cluster(options: Options, measures: RoutingMeasures) -> AsyncIterator[Made]:
    """A backend for the agents of a cluster."""
    from omnimodel.controllers.gateway_kubernetes import Discovery
    from omnimodel.gateway.order import Place
    from omnimodel.gateway.remote_admin import AgentsAdmin
    from omnimodel.gateway.routing import RoutingBackend
    from omnimodel.kube import Kube

    async with await Kube.connect(options.kubeconfig, component="gateway") as kube:
        discovery = Discovery(
            kube,
            options.namespaces,
            port=options.agent_port,
            token_secret=options.agent_token_secret,
            agent_namespaces=options.agent_namespaces,
        )
        backend = RoutingBackend(here=Place(options.region, options.zone), measures=measures, known=discovery.known)
        following = asyncio.create_task(discovery.run(backend), name="discovery")
        try:
            await _first_of(discovery.wait_synced(SYNC_SECONDS), following)
            yield backend, AgentsAdmin(backend, discovery.objects), following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await backend.close()


async def _first_of(wait: Coroutine[Any, Any, Any] | asyncio.Task[Any], other: asyncio.Task[None] | None) -> None:
    """Wait for something, unless a task that it depends on ends first.

    Raises:
        OmniError: that task ended, though it never should.
    """
    waiting = asyncio.ensure_future(wait)
    await asyncio.wait({waiting, other} if other else {waiting}, return_when=asyncio.FIRST_COMPLETED)
    if other is not None and other.done() and not waiting.done():
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        failure = other.exception()
        log.error("discovery_ended error=%r", failure)
        raise OmniError(
            "gateway",
            f"it can no longer follow the cluster ({failure!r})",
            "the log says why; it is to be started anew",
        ) from failure
    await waiting


def _url(agent: str) -> str:
    """The URL of an agent; the scheme may be left out.

    Raises:
        OmniError: it is none.
    """
    from urllib.parse import urlsplit

    url = agent if "//" in agent else f"http://{agent}"
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise OmniError(f"agent {agent!r}", "it is no HTTP URL", "write it as http://10.0.0.7:8710")
    return url.rstrip("/")
