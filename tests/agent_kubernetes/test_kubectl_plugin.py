"""`kubectl omni` as kubectl starts it: through the API server to the gateway's Service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.conftest import Running, system
from cluster.connection import Connection
from omnimodel.cli.kubectl import COMMANDS


@dataclass
class Plugin:
    """kubectl with the plugin on its search path."""

    cluster: Connection
    bin: Path
    namespace: str
    gateway: str

    def run(self, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        search = path if path is not None else f"{self.bin}:{self.cluster.bin}:/usr/bin:/bin"
        environment = {
            "PATH": search, "HOME": os.environ.get("HOME", "/"), "KUBECONFIG": str(self.cluster.kubeconfig),
            "PYTHONPATH": str(Path(__file__).parents[2] / "operator"),
        }  # fmt: skip
        kubectl = str(self.cluster.bin / "kubectl")
        command = [kubectl, *arguments] if path is None else [str(self.bin / "kubectl-omni"), *arguments[1:]]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def omni(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("omni", "--gateway", self.gateway, *arguments)


def own_address() -> str:
    """An address of this machine that an API server may dial: loopback ones it refuses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback, which an API server does not dial")
        return str(probe.getsockname()[0])


class Forwarder:
    """A port of this machine's own address that leads to the system on loopback."""

    def __init__(self, host: str, target: int) -> None:
        self._target = target
        self._listener = socket.create_server((host, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def plugin(api_cluster: Connection, system: Running, namespace: str, tmp_path: Path) -> Iterator[Plugin]:
    """A Service without pods, whose endpoint is the system of tests/cli."""
    host = own_address()
    forwarder = Forwarder(host, int(system.address.rpartition(":")[2]))
    labels = {"app.kubernetes.io/part-of": "omnimodel", "app.kubernetes.io/component": "gateway-admin"}
    metadata = {"name": "omni-gateway-admin", "namespace": namespace}
    # The API server passes requests on to pods only, at the addresses that their status says.
    container = {"name": "gateway", "image": "localhost/gateway:dev"}
    pod = {"name": "gateway-0", "namespace": namespace}
    target = {"kind": "Pod", **pod}
    api_cluster.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": {"containers": [container]}},
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {**metadata, "labels": labels},
            "spec": {"ports": [{"name": "admin", "port": 8081, "targetPort": forwarder.port}]},
        },
        {
            "apiVersion": "v1", "kind": "Endpoints", "metadata": metadata,
            "subsets": [
                {
                    "addresses": [{"ip": host, "targetRef": target}],
                    "ports": [{"name": "admin", "port": forwarder.port}],
                }
            ],
        },
    )  # fmt: skip
    status = json.dumps({"status": {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}})
    api_cluster.kubectl(
        "patch", "pod", "gateway-0", "-n", namespace, "--subresource=status", "--type=merge", "-p", status
    )
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "kubectl-omni"
    script.write_text(f"#!{sys.executable}\nfrom omnimodel.cli.kubectl import main\nmain()\n")
    script.chmod(0o755)
    yield Plugin(api_cluster, folder, namespace, f"{namespace}/omni-gateway-admin")
    forwarder.close()


def test_get_models(plugin: Plugin) -> None:
    done = plugin.omni("get", "models", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert [item["metadata"]["name"] for item in json.loads(done.stdout)["items"]] == ["slow", "words", "wrong"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("wake", "words"), "words is resident"),
        (("evict", "words"), "words"),
        (("describe", "words"), "words"),
        (("logs", "words"), "hello"),
        (("top", "--once"), "words"),
        (("plan",), "words"),
        (("events",), ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands(plugin: Plugin, arguments: tuple[str, ...], shown: str) -> None:
    done = plugin.omni(*arguments)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_the_gateway_is_found_by_its_labels(plugin: Plugin) -> None:
    deadline = time.monotonic() + 60
    while "several gateways" in (done := plugin.run("omni", "get", "models")).stderr:
        # Those of earlier tests go with their namespaces.
        assert time.monotonic() < deadline, done.stderr
    assert done.returncode == 0, done.stderr
    assert "words" in done.stdout


def test_names_without_a_namespace_are_in_the_one_that_is_given(plugin: Plugin) -> None:
    done = plugin.run("omni", "--gateway", plugin.gateway, "-n", "elsewhere", "describe", "words")
    assert done.returncode == 3
    assert "elsewhere/words" in done.stderr


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "version"])
def test_the_namespace_may_come_behind_any_command(plugin: Plugin, command: str) -> None:
    done = plugin.run("omni", "--gateway", plugin.gateway, command, "-n", "elsewhere", "--help")
    assert done.returncode == 0, done.stderr
    assert "-n, --namespace" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "-n", "elsewhere", "words"),
        ("describe", "words", "--namespace=elsewhere"),
        ("-n", "default", "wake", "words", "-n", "elsewhere"),
        ("get", "models", "words", "-nelsewhere"),
    ],
    ids=" ".join,
)
def test_a_namespace_behind_the_command_counts(plugin: Plugin, arguments: tuple[str, ...]) -> None:
    done = plugin.omni(*arguments)
    assert done.returncode == 3, done.stderr
    assert "elsewhere" in done.stderr or "there is no such object" in done.stderr


def test_a_failure_has_its_exit_code(plugin: Plugin) -> None:
    assert plugin.omni("wake", "slow").returncode == 4
    assert plugin.omni("wake", "nothing").returncode == 3


def test_a_gateway_without_pods_says_so(plugin: Plugin) -> None:
    plugin.cluster.kubectl("delete", "endpoints", "--all", "-n", plugin.namespace)
    done = plugin.omni("get", "models")
    assert done.returncode == 1
    assert "no endpoints available" in done.stderr
    assert "{" not in done.stderr


def test_a_gateway_that_is_not_there_says_so(plugin: Plugin) -> None:
    done = plugin.run("omni", "--gateway", f"{plugin.namespace}/nothing", "get", "models")
    assert done.returncode in {1, 3}
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_no_cluster(plugin: Plugin) -> None:
    done = plugin.run("omni", "--kubeconfig", "/nowhere", "wake", "--help")
    assert done.returncode == 0, done.stderr
    assert "Make MODEL resident" in done.stdout


def test_without_kubectl_it_says_what_to_do(plugin: Plugin) -> None:
    done = plugin.run("omni", "get", "models", path="/nowhere")
    assert done.returncode == 1
    assert "not on the search path" in done.stderr


def test_a_kubeconfig_that_leads_nowhere_says_so(plugin: Plugin, tmp_path: Path) -> None:
    done = plugin.run("omni", "--kubeconfig", str(tmp_path / "none"), "get", "models")
    assert done.returncode in {1, 5}
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")


def test_nothing_is_left_behind(plugin: Plugin, tmp_path: Path) -> None:
    plugin.omni("get", "models")
    assert not list(Path("/tmp").glob("kubectl-omni.*"))


__all__ = ["system"]  # the fixture of tests/cli
