"""`kubectl omni`: the commands of `omni` against the gateway of a cluster.

kubectl itself carries every request (`kubectl proxy` on a socket that only this user can open, to the API server, to
the Service of the gateway's admin port): whatever way of logging in a kubeconfig holds works, and no port is opened on
this machine.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import click

from omnimodel.cli import run
from omnimodel.cli.exits import ConnectionFailed
from omnimodel.cli.lazy import LazyGroup
from omnimodel.errors import OmniError

COMMANDS = {
    "get": ("omnimodel.cli.get", "List models, pools or processes."),
    "describe": ("omnimodel.cli.describe", "Everything known about one model, in words."),
    "logs": ("omnimodel.cli.actions:logs", "What a model's process printed."),
    "events": ("omnimodel.cli.actions:events", "What happened, oldest first."),
    "wake": ("omnimodel.cli.actions:wake", "Make a model resident and wait for it."),
    "evict": ("omnimodel.cli.actions:evict", "Drain a model and free its device memory."),
    "prune": ("omnimodel.cli.prune", "Remove images, sources and environments that no model needs."),
    "check": ("omnimodel.cli.check", "Send each model its probe and compare the answer."),
    "top": ("omnimodel.cli.top", "Watch models and memory, live."),
    "plan": ("omnimodel.cli.cluster_plan", "Show which pods hold which models, and why."),
    "version": ("omnimodel.cli.version", "Print the version."),
}
_WITHOUT_CLUSTER = frozenset({"version"})
SELECTOR = "app.kubernetes.io/part-of=omnimodel,app.kubernetes.io/component=gateway-admin"
PORT = "admin"  # name of the Service's port
ANSWER_SECONDS = 60


class NamespacedGroup(LazyGroup):
    """Commands that take the namespace behind their name, too, as those of kubectl do."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, and add the option."""
        found = super().get_command(ctx, cmd_name)
        if found is None or cmd_name in _WITHOUT_CLUSTER:
            return found
        found = copy.copy(found)
        found.params = [*found.params, click.Option(["-n", "--namespace"], callback=_use, expose_value=False,
                                                    help="As before the command; this one counts.")]  # fmt: skip
        return found


def _use(_: click.Context, __: click.Parameter, namespace: str | None) -> None:
    if namespace:
        os.environ["OMNI_NAMESPACE"] = namespace


@click.group(
    cls=NamespacedGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@click.option("--kubeconfig", default="", metavar="FILE", help="As of kubectl.")
@click.option("--context", "cluster", default="", metavar="NAME", help="As of kubectl.")
@click.option("-n", "--namespace", default="", help="Of models that are named without one.  [default: the context's]")
@click.option("--gateway", default="", envvar="OMNI_GATEWAY", metavar="NAMESPACE/NAME",
              help="The Service of the gateway's admin port, where a cluster has several.")  # fmt: skip
@click.option("--debug", is_flag=True, envvar="OMNI_DEBUG", help="Show tracebacks.")
@click.pass_context
def kubectl_omni(
    context: click.Context, kubeconfig: str, cluster: str, namespace: str, gateway: str, debug: bool
) -> None:
    """Look at the models of a cluster, and steer them."""
    context.obj = debug
    if context.invoked_subcommand in _WITHOUT_CLUSTER or {"-h", "--help"} & set(sys.argv):
        return
    options = [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
    options += [f"--context={cluster}"] if cluster else []
    kubectl = Kubectl(options)
    os.environ["OMNI_NAMESPACE"] = namespace or kubectl.namespace()
    if gateway or "OMNI_ADDRESS" not in os.environ:
        os.environ["OMNI_ADDRESS"] = context.with_resource(kubectl.reaching(gateway))


def main() -> None:
    """The entry point of the plugin."""
    sys.exit(run(sys.argv[1:], kubectl_omni, "kubectl omni"))


class Kubectl:
    """kubectl, with the options of the one who called.

    Args:
        options: before every command.
    """

    def __init__(self, options: Sequence[str]) -> None:
        program = shutil.which("kubectl")
        if program is None:
            raise OmniError("kubectl", "it is not on the search path", "install it, or call this as `kubectl omni`")
        self._command = [program, *options]

    def _ask(self, *arguments: str) -> str:
        command = [*self._command, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ConnectionFailed("kubectl", f"no answer of the API server within {ANSWER_SECONDS} s") from error
        if done.returncode:
            raise ConnectionFailed("kubectl", done.stderr.strip().removeprefix("error: ") or "it failed")
        return done.stdout

    def namespace(self) -> str:
        """That of the context."""
        return self._ask("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip() or "default"

    def gateway(self, wanted: str) -> tuple[str, str]:
        """Namespace and name of the Service of the gateway's admin port.

        Args:
            wanted: `namespace/name`; empty for the only one.

        Raises:
            OmniError: there is none, or more than one.
        """
        if wanted:
            namespace, slash, name = wanted.partition("/")
            if not slash:
                raise OmniError("--gateway", f"{wanted!r} is not NAMESPACE/NAME")
            return namespace, name
        items = json.loads(self._ask("get", "services", "--all-namespaces", "-l", SELECTOR, "-o", "json"))["items"]
        found = [(item["metadata"]["namespace"], item["metadata"]["name"]) for item in items]
        if not found:
            raise OmniError(
                "cluster", "no gateway is installed", "install the chart, or name its Service with --gateway"
            )
        if len(found) > 1:
            names = ", ".join("/".join(each) for each in found)
            raise OmniError("cluster", f"there are several gateways: {names}", "name one with --gateway")
        return found[0]

    @contextmanager
    def reaching(self, wanted: str) -> Iterator[str]:
        """The gateway's address for `omnimodel.cli.client`, for as long as the context lasts."""
        namespace, name = self.gateway(wanted)
        with tempfile.TemporaryDirectory(prefix="kubectl-omni.") as folder:
            path = Path(folder) / "socket"
            command = [*self._command, "proxy", f"--unix-socket={path}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as proxy:
                try:
                    first = proxy.stdout.readline() if proxy.stdout else ""
                    if not first.startswith("Starting to serve"):
                        raise ConnectionFailed("kubectl proxy", first.strip() or "it ended")
                    service = f"/api/v1/namespaces/{namespace}/services/{name}:{PORT}/proxy"
                    yield f"http+unix://{quote(str(path), safe='')}{service}"
                finally:
                    proxy.terminate()
