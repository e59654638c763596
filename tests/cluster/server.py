"""Plain questions to an API server, fast enough for thousands of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from cluster.connection import Connection

API = "/apis/omnimodel.io/v1alpha1"
_BEFORE = re.compile(r'Invalid value: ("(\\.|[^"\\])*": |[-+.\dE]+: |true: |false: )?')
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


@dataclass(frozen=True)
class Answer:
    """What the server answered: an object, or a Status that says why not."""

    status: int
    body: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it did what it was asked."""
        return self.status < 300

    @property
    def sentences(self) -> list[str]:
        """Each reason for a refusal, as `field: sentence`, without what the server puts before a CEL rule's message."""
        causes = self.body.get("details", {}).get("causes") or [{"message": self.body.get("message", "")}]
        return [f"{cause.get('field', '')}: {_bare(cause['message'])}" for cause in causes]


def _bare(message: str) -> str:
    """The message of a rule, without what the server puts before it: `Invalid value: "object": `."""
    return _BEFORE.sub("", message)


@dataclass
class Server:
    """An API server behind `kubectl proxy`, which knows every way to prove who one is."""

    port: int
    _connection: http.client.HTTPConnection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=150)

    def ask(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **query: str
    ) -> Answer:
        """One request.

        Args:
            path: from the root of the server.
            query: parameters such as `dryRun`.
        """
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        data = None if body is None else json.dumps(body)
        self._connection.request(method, f"{path}?{urlencode(query)}", data, headers)
        response = self._connection.getresponse()
        return Answer(response.status, json.loads(response.read() or "{}"))

    def create(self, manifest: Mapping[str, Any], namespace: str, **query: str) -> Answer:
        """Create an object of ours, strictly: unknown fields are refused."""
        return self.ask("POST", path_of(manifest["kind"], namespace), manifest, fieldValidation="Strict", **query)

    def try_create(self, manifest: Mapping[str, Any], namespace: str) -> Answer:
        """What `create` would answer, without doing it."""
        return self.create(manifest, namespace, dryRun="All")


def path_of(kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """Path of a kind's objects, of one of them, or of its subresource."""
    plural = {"OmniModel": "omnimodels", "OmniPool": "omnipools", "OmniProcess": "omniprocesses"}[kind]
    return "/".join(part for part in (API, "namespaces", namespace, plural, name, subresource) if part)


@contextlib.contextmanager
def serving(cluster: Connection) -> Iterator[Server]:
    """The server of a cluster."""
    command = [str(cluster.bin / "kubectl"), "--kubeconfig", str(cluster.kubeconfig), "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        line = proxy.stdout.readline() if proxy.stdout else ""
        try:
            yield Server(int(line.rpartition(":")[2]))
        finally:
            proxy.kill()
