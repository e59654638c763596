"""`omni agent`: one pod of a pool. It runs what the operator assigns to it and answers gateways."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnimodel.cli.exits import exit_code, report_error
from omnimodel.cli.gateway import log_to_stderr, words
from omnimodel.cli.init import run_under_init
from omnimodel.cli.target import state_dir_option
from omnimodel.cli.up import FASTER_SECONDS, KILLED_SECONDS, Listen, Stops, raise_open_files
from omnimodel.errors import OmniError

if TYPE_CHECKING:
    from omnimodel.agent.agent import Agent
    from omnimodel.agent.descriptors import DescriptorStore
    from omnimodel.controllers.agent_kubernetes_status import PodIdentity

log = logging.getLogger(__name__)

PORT = 8710
END_SECONDS = 10.0  # of the grace period: to end processes and free what they hold


@dataclass(frozen=True)
class Options:
    """What `omni agent` was asked for."""

    state_dir: Path
    host: str
    port: int
    kubeconfig: str
    namespaces: tuple[str, ...]
    pod: PodIdentity
    drain_seconds: float
    token_file: Path | None


@click.command()
@click.option("--listen", type=Listen(), envvar="OMNI_LISTEN", default=f"0.0.0.0:{PORT}", show_default=True,
              help="Where to answer gateways.")  # fmt: skip
@click.option("--pod", envvar="OMNI_POD_NAME", required=True, help="Name of this pod.")
@click.option("--pod-namespace", envvar="OMNI_POD_NAMESPACE", default="default", show_default=True,
              help="Its namespace.")  # fmt: skip
@click.option("--pod-uid", envvar="OMNI_POD_UID", default="", help="Its uid, so that its lease goes with it.")
@click.option("--pool", envvar="OMNI_POOL", required=True, help="Name of its pool.")
@click.option("--pool-namespace", envvar="OMNI_POOL_NAMESPACE", default="",
              help="Namespace of the pool.  [default: that of the pod]")  # fmt: skip
@click.option("--namespace", "namespaces", multiple=True, envvar="OMNI_NAMESPACES", callback=words, metavar="NAME,…",
              help="Namespaces of models.  [default: all]")  # fmt: skip
@click.option("--kubeconfig", default="", metavar="FILE", help="How to reach the cluster.  [default: as kubectl]")
@click.option("--drain", "drain_seconds", envvar="OMNI_DRAIN_SECONDS", type=click.FloatRange(min=0), default=60.0,
              show_default=True, help="Seconds that SIGTERM leaves to requests in flight; below the pod's "
              f"terminationGracePeriodSeconds by {END_SECONDS:.0f} at least.")  # fmt: skip
@click.option("--token-file", envvar="OMNI_TOKEN_FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="A file with the token that gateways must have.  [default: everybody is answered]")  # fmt: skip
@state_dir_option
@click.pass_context
def command(
    context: click.Context,
    listen: tuple[str, int],
    pod: str,
    pod_namespace: str,
    pod_uid: str,
    pool: str,
    pool_namespace: str,
    namespaces: tuple[str, ...],
    kubeconfig: str,
    drain_seconds: float,
    token_file: Path | None,
    state_dir: Path,
) -> None:
    """Serve the models that are assigned to this pod. Ends with SIGTERM, after a drain."""
    from omnimodel.controllers.agent_kubernetes_status import PodIdentity

    debug = bool(context.obj)
    identity = PodIdentity(pod, pod_namespace, pool, pool_namespace or pod_namespace, pod_uid)
    options = Options(state_dir.resolve(), *listen, kubeconfig, namespaces, identity, drain_seconds, token_file)

    def work(store: DescriptorStore | None = None) -> int:
        log_to_stderr(debug=debug)
        try:
            asyncio.run(serve(options, store))
        except Exception as error:
            report_error(error, debug=debug)
            return exit_code(error)
        return 0

    raise_open_files()  # of the init too, which keeps descriptors of what the agent has
    context.exit(run_under_init(work) if os.getpid() == 1 else work())


async def serve(options: Options, store: DescriptorStore | None = None) -> None:
    """Run until told to stop; drain, and leave nothing behind.

    Args:
        options: of the command.
        store: keeps descriptors for the agent after this one.

    Raises:
        OmniError: the state directory or the address is in use, or there is no way to a cluster.
    """
    from omnimodel.agent.agent import Agent
    from omnimodel.controllers.agent_kubernetes import PodController
    from omnimodel.controllers.agent_kubernetes_admin import PodAdmin
    from omnimodel.controllers.local_state import StateLock
    from omnimodel.gateway.app import create_app
    from omnimodel.gateway.app import serve as listen
    from omnimodel.gateway.gateway import GATEWAY
    from omnimodel.gateway.settings import Settings
    from omnimodel.gateway.tokens import Tokens
    from omnimodel.kube import Kube
    from omnimodel.protocol.ingress import Told

    stops = Stops()
    with StateLock(options.state_dir) as lock:
        async with await Kube.connect(options.kubeconfig, component="agent") as kube:
            agent = Agent(options.state_dir, store)
            await agent.start()
            controller = PodController(
                kube,
                agent,
                options.pod,
                options.state_dir,
                namespaces=options.namespaces,
                images=lambda: images_in(agent.layout.store),  # which the pool says
            )
            app = create_app(
                agent,
                PodAdmin(agent, controller),
                settings=Settings(drain_seconds=FASTER_SECONDS),
                reporting=Told(controller.report, controller.wait_changed),
                tokens=Tokens(options.token_file) if options.token_file else None,
            )
            if options.token_file is None:
                log.warning("no_token cure=%r", "whoever reaches this port may steer; name a file with --token-file")
            try:
                listening = await listen(app, options.host, options.port)
            except BaseException:
                await agent.stop(0.0)
                raise
            lock.publish_address(listening.address)
            log.info("serving pod=%s pool=%s address=%s", options.pod.name, options.pod.pool, listening.address)
            working = asyncio.create_task(controller.run(), name="controller")
            stopping = asyncio.create_task(stops.next())
            try:
                await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                # Gateways learn first that nothing more may be sent here; what is held goes elsewhere.
                app[GATEWAY].leaving.set()
                app[GATEWAY].closing.set()
                log.info("draining seconds=%g", options.drain_seconds)
                await drain(agent, stops, options.drain_seconds)
                working.cancel()
                stopping.cancel()
                await asyncio.gather(working, stopping, return_exceptions=True)
                await listening.close()
    log.info("stopped")


async def drain(agent: Agent, stops: Stops, drain_seconds: float) -> None:
    """Stop the agent; a second signal hurries it, a third kills.

    Raises:
        OmniError: processes outlived even that they were killed.
    """
    work: set[asyncio.Task[None]] = set()
    for seconds in (drain_seconds, min(drain_seconds, FASTER_SECONDS), 0.0):
        work.add(asyncio.create_task(agent.stop(seconds)))
        hurry = asyncio.create_task(stops.next())
        done, _ = await asyncio.wait(
            {*work, hurry}, return_when=asyncio.FIRST_COMPLETED, timeout=seconds + KILLED_SECONDS
        )
        hurry.cancel()
        if done & work:
            await asyncio.gather(*work)
            return
    raise OmniError("agent", "processes of models did not end when they were killed", "the pod's end takes them along")


def images_in(store: Path) -> Sequence[str]:
    """Publish hashes of the images in a store, sorted."""
    found: set[str] = set()
    try:
        for entry in os.scandir(store / "keys"):
            if entry.name.endswith(".json"):
                found.add(entry.name.rpartition("-")[0])
    except OSError:
        return []
    return sorted(found)
