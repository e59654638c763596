"""What an agent says of itself, past operator and gateway: by a forwarded port of its pod, with the token of agents."""

from __future__ import annotations

import base64
import http.client
import json
import re
import subprocess
import sys
from typing import Any

from cluster.cluster import Cluster
from cluster.connection import Connection
from omnimodel.gateway.tokens import bearer
from omnimodel.protocol.ingress import REPORT_PATH

RELEASE = "omnimodel"
PORT = 8710
_ASK = """
import json, sys, urllib.request
url, headers = json.load(sys.stdin)
print(urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60).read().decode())
"""


def token_of_agents(cluster: Connection, namespace: str) -> str:
    """What the Secret of the release holds."""
    secret = cluster.get("secret", f"{RELEASE}-agents", "-n", namespace)
    return base64.b64decode(secret["data"]["token"]).decode()


def ask_agent(
    cluster: Connection, namespace: str, pod: str, path: str, method: str = "GET", token: str | None = None
) -> tuple[int, Any]:
    """Status and JSON answer of an agent; with the token of its Secret unless another is given."""
    token = token_of_agents(cluster, namespace) if token is None else token
    command = [str(cluster.bin / "kubectl"), "--kubeconfig", str(cluster.kubeconfig), "port-forward", f"pod/{pod}"]
    with subprocess.Popen([*command, "-n", namespace, f":{PORT}"], stdout=subprocess.PIPE, text=True) as forwarding:
        try:
            assert forwarding.stdout is not None
            said = re.search(r"127\.0\.0\.1:(\d+)", forwarding.stdout.readline())
            assert said, f"no port of {pod} is forwarded"
            connection = http.client.HTTPConnection("127.0.0.1", int(said[1]), timeout=60)
            connection.request(method, path, headers=dict(bearer(token)))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            forwarding.terminate()


def report(cluster: Connection, namespace: str, pod: str) -> dict[str, Any]:
    """The report of an agent."""
    status, body = ask_agent(cluster, namespace, pod, REPORT_PATH)
    assert status == 200, body
    return dict(body)


def report_past_kubelet(cluster: Cluster, namespace: str, pod: str) -> dict[str, Any]:
    """The report of an agent, asked from the network of its node: forwarded ports go through the kubelet."""
    address = cluster.get("pod", pod, "-n", namespace)["status"]["podIP"]
    request = f"http://{address}:{PORT}{REPORT_PATH}", dict(bearer(token_of_agents(cluster, namespace)))
    return dict(json.loads(cluster.on_node(sys.executable, "-c", _ASK, stdin=json.dumps(request))))
