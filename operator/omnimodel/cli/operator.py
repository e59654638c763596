"""`omni operator`: reconciles the models and pools of a cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from omnimodel.controllers.kubernetes import OperatorSettings

PORT = 8711
LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.option("--kubeconfig", default="", metavar="FILE", help="How to reach the cluster.  [default: as kubectl]")
@click.option("--identity", envvar="OMNI_POD_NAME", default="", help="Own name; no two operators may have the same.  "
              "[default: host and pid]")  # fmt: skip
@click.option("--own-namespace", envvar="OMNI_POD_NAMESPACE", default="default", show_default=True,
              help="Where its Lease is.")  # fmt: skip
@click.option("--release", envvar="OMNI_RELEASE", default="omnimodel", show_default=True,
              help="Prefix of its Lease, and of the Secret with the token of agents.")  # fmt: skip
@click.option("--namespace", "namespaces", multiple=True, envvar="OMNI_NAMESPACES", metavar="NAME,…",
              help="Namespaces that it looks after.  [default: all]")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True,
              help="Of /healthz, /readyz and /metrics; 0 for any.")  # fmt: skip
@click.option("--agent-image", envvar="OMNI_AGENT_IMAGE", default="omnimodel-agent:latest", show_default=True,
              help="Image of pods, unless a pool says another.")  # fmt: skip
@click.option("--agent-pull-policy", envvar="OMNI_AGENT_PULL_POLICY", default="IfNotPresent", show_default=True,
              type=click.Choice(["Always", "IfNotPresent", "Never"]), help="When it is pulled.")  # fmt: skip
@click.option("--agent-service-account", envvar="OMNI_AGENT_SERVICE_ACCOUNT", default="", metavar="NAME",
              help="Service account of pods, unless a pool says another.")  # fmt: skip
@click.option("--lease", "lease_seconds", type=click.FloatRange(min=2), default=20.0, show_default=True,
              help="Seconds without a sign of life after which another one leads.")  # fmt: skip
@click.option("--log-level", envvar="OMNI_LOG_LEVEL", type=click.Choice(LEVELS), default="info", show_default=True,
              help="Least level of what is logged.")  # fmt: skip
@click.pass_context
def command(
    context: click.Context,
    kubeconfig: str,
    identity: str,
    own_namespace: str,
    release: str,
    namespaces: tuple[str, ...],
    port: int,
    agent_image: str,
    agent_pull_policy: str,
    agent_service_account: str,
    lease_seconds: float,
    log_level: str,
) -> None:
    """Reconcile the models and pools of a cluster. Several may run: one leads, the others stand by."""
    from omnimodel.controllers.kubernetes import OperatorSettings
    from omnimodel.controllers.kubernetes_children import AgentSettings

    only = tuple(word.strip() for text in namespaces for word in text.split(",") if word.strip())
    _log_to_stderr("debug" if context.obj else log_level)
    settings = OperatorSettings(
        identity=identity or f"{socket.gethostname()}-{os.getpid()}",
        namespace=own_namespace,
        release=release,
        namespaces=only,
        port=port,
        agents=AgentSettings(
            image=agent_image,
            pull_policy=agent_pull_policy,
            service_account=agent_service_account,
            token_secret=f"{release}-agents",
            env={"OMNI_NAMESPACES": ",".join(only)} if only else None,
        ),
        lease_seconds=lease_seconds,
        renew_seconds=lease_seconds * 0.6,
        retry_seconds=lease_seconds * 0.2,
    )
    asyncio.run(_run(kubeconfig, settings))


async def _run(kubeconfig: str, settings: OperatorSettings) -> None:
    from omnimodel.controllers.kubernetes import Operator
    from omnimodel.kube import Kube

    async with await Kube.connect(kubeconfig, component="operator") as kube:
        operator = Operator(kube, settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, operator.stop)
        await operator.run()


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    for chatty in ("asyncio", "kopf", "aiohttp"):
        logging.getLogger(chatty).setLevel(logging.WARNING if level != "debug" else logging.INFO)
