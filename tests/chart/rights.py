"""The cluster as a service account sees it, and a record of what was asked with its token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aiohttp import web

from cluster.cluster import Cluster
from kube.proxy import Proxy

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
Right = tuple[str, str]  # resource with its subresource, verb


def account(cluster: Cluster, folder: Path, namespace: str, name: str, pod: str = "") -> Path:
    """A kubeconfig with a token of a service account, made for a pod if one is named."""
    bound: list[str] = []
    if pod:
        uid = cluster.get("pod", pod, "-n", namespace)["metadata"]["uid"]
        bound = ["--bound-object-kind=Pod", f"--bound-object-name={pod}", f"--bound-object-uid={uid}"]
    token = cluster.kubectl("create", "token", name, "-n", namespace, *bound).strip()
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = folder / f"{namespace}.{name}.{pod}.kubeconfig"
    path.write_text(json.dumps(config))
    return path


def granted(cluster: Cluster, *roles: str) -> set[Right]:
    """What the rules of roles let one do; `roles` as KIND/NAME, with -n NAMESPACE behind a slash where they have one."""
    rights = set()
    for role in roles:
        kind, name, *namespace = role.split("/")
        for rule in cluster.get(kind, name, *(["-n", *namespace] if namespace else []))["rules"]:
            rights |= {(resource, verb) for resource in rule["resources"] for verb in rule["verbs"]}
    return rights


class Recorder(Proxy):
    """A way to the API server that writes down which rights are used, and which are missing.

    Args:
        kubeconfig: with the token that is used for everything that comes this way.
        folder: for the kubeconfig that leads here.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        folder.mkdir()
        super().__init__(kubeconfig, folder)
        self.used: set[Right] = set()
        self.namespaces: set[str] = set()
        self.denied: list[str] = []
        self.before = self._note

    async def _note(self, request: web.Request) -> None:
        resource, verb, namespace = _right(request)
        self.used.add((resource, verb))
        self.namespaces.add(namespace)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        answer = await super()._pass(request)
        if answer.status in {401, 403}:
            body = answer.text if isinstance(answer, web.Response) else ""
            self.denied.append(f"{request.method} {request.path_qs}: {body}")
        if answer.status == 201 and request.method == "PATCH":  # an apply that makes the object
            self.used.add((_right(request)[0], "create"))
        return answer


def _right(request: web.Request) -> tuple[str, str, str]:
    """Resource with its subresource, verb and namespace of a request."""
    parts = [part for part in request.path.split("/") if part]
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    if request.method == "GET":
        named = len(parts) > 1
        verb = "watch" if request.query.get("watch") == "true" else "get" if named else "list"
    else:
        verb = _VERBS[request.method]
    resource, _, subresource = (*parts, "", "", "")[:3]
    return f"{resource}/{subresource}" if subresource else resource, verb, namespace


def sorted_rights(rights: set[Right]) -> dict[str, Any]:
    """Rights for people: by resource."""
    found: dict[str, list[str]] = {}
    for resource, verb in sorted(rights):
        found.setdefault(resource, []).append(verb)
    return found
