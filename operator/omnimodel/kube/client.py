"""Requests to the API server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client as api
from kubernetes.aio import config as loading

from omnimodel.errors import OmniError
from omnimodel.kube.error import KubeError, refused, suppress_missing, unreachable
from omnimodel.kube.kinds import Kind

log = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0
PAGE_ITEMS = 500
CONFLICTS = 6  # of one write with others, before the caller's own backoff takes over
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

_DISCOVERY = Kind("", "", "discovery", "", namespaced=False)

Object = Mapping[str, Any]
Calls = Counter[tuple[str, str]]  # verb and plural -> requests


@dataclass(frozen=True)
class Page:
    """All objects of a list, at one moment.

    Args:
        items: each with apiVersion and kind.
        resource_version: to watch from.
    """

    items: tuple[dict[str, Any], ...]
    resource_version: str


class Kube:
    """A connection to an API server.

    Args:
        configuration: of the package `kubernetes`.
        component: who asks, for the server's audit log.
    """

    def __init__(self, configuration: Any, *, component: str = "omni") -> None:
        self.configuration = configuration
        self.component = component
        self.calls: Calls = Counter()
        self._client = api.ApiClient(configuration)
        self._client.user_agent = f"omnimodel/{component}"

    @classmethod
    async def connect(cls, kubeconfig: str = "", *, context: str = "", component: str = "omni") -> Self:
        """Use a kubeconfig, or inside a pod its service account.

        Args:
            kubeconfig: a file; empty for KUBECONFIG, the service account, then ~/.kube/config.
            context: of the kubeconfig; empty for the current one.
            component: see the class.

        Raises:
            OmniError: there is none of them.
        """
        configuration = api.Configuration()
        # Watches and requests share the pool, so it must not bound them.
        configuration.connection_pool_maxsize = 0
        try:
            given = kubeconfig or os.environ.get("KUBECONFIG", "")
            if not given and _in_cluster():
                loading.load_incluster_config(client_configuration=configuration)
            else:
                await loading.load_kube_config(given or None, context or None, configuration, persist_config=False)
        except (loading.ConfigException, OSError) as error:
            raise OmniError(
                "Kubernetes",
                f"no way to a cluster is configured ({error})",
                "run inside a cluster, or set KUBECONFIG to a file that kubectl can use",
            ) from error
        return cls(configuration, component=component)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()

    async def token(self) -> str:
        """The bearer token as it is now; empty when a client certificate is used. It changes in a pod."""
        value = (await self.configuration.auth_settings()).get("BearerToken", {}).get("value") or ""
        return str(value).partition(" ")[2]

    async def get(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any] | None:
        """One object, or None when there is none."""
        try:
            return await self._ask("get", "GET", kind, kind.path(namespace, name))
        except KubeError as error:
            if error.missing:
                return None
            raise

    async def get_path(self, path: str) -> dict[str, Any] | None:
        """Any other resource, such as `/apis/omnimodel.io/v1alpha1`; None when there is none."""
        try:
            return await self._ask("get", "GET", _DISCOVERY, path)
        except KubeError as error:
            if error.missing:
                return None
            raise

    async def list(self, kind: Kind, namespace: str = "", *, labels: str = "", fields: str = "") -> Page:
        """Every object of a kind, in pages.

        Args:
            kind: of the objects.
            namespace: empty for all.
            labels, fields: selectors.
        """
        for attempt in range(CONFLICTS):
            found: list[dict[str, Any]] = []
            query = {"limit": str(PAGE_ITEMS), **selectors(labels, fields)}
            try:
                while True:
                    answer = await self._ask("list", "GET", kind, kind.path(namespace), query)
                    found += answer.get("items") or ()
                    metadata = answer.get("metadata", {})
                    if not metadata.get("continue"):
                        break
                    query["continue"] = metadata["continue"]
            except KubeError as error:
                # The pages are of one moment, and that moment was too long ago: begin anew.
                if not error.gone or attempt == CONFLICTS - 1:
                    raise
                continue
            head = {"apiVersion": kind.api_version, "kind": kind.name}
            return Page(tuple({**head, **item} for item in found), str(metadata.get("resourceVersion", "")))
        raise AssertionError("unreachable")

    async def apply(self, kind: Kind, body: Object, *, manager: str, force: bool = True) -> dict[str, Any]:
        """Server-side apply: what the body says, and nothing else of this manager's, is in the object afterwards.

        Args:
            kind: of the object.
            body: with its metadata.
            manager: the field manager.
            force: take fields from other managers.
        """
        return await self._apply(kind, body, "", manager, force=force)

    async def patch_status(
        self, kind: Kind, name: str, namespace: str, status: Object, *, manager: str, resource_version: str = ""
    ) -> dict[str, Any]:
        """Server-side apply of a status: what this manager says, and nothing else of it.

        An empty status takes back everything that the manager ever said. It makes no object that is not there.

        Args:
            kind, name, namespace: of the object.
            status: what to say.
            manager: the field manager.
            resource_version: write only if the object still is that one; empty for whatever it is.

        Raises:
            KubeError: `missing` when there is no such object, `conflict` when it is another one by now.
        """
        metadata = {"name": name, "namespace": namespace}
        if resource_version:
            body = {"metadata": {**metadata, "resourceVersion": resource_version}, "status": status}
            return await self._apply(kind, body, "status", manager, force=True, attempts=1)
        return await self._apply(kind, {"metadata": metadata, "status": status}, "status", manager, force=True)

    async def _apply(
        self, kind: Kind, body: Object, subresource: str, manager: str, *, force: bool, attempts: int = CONFLICTS
    ) -> dict[str, Any]:
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace", ""), metadata["name"], subresource)
        query = {"fieldManager": manager, **({"force": "true"} if force else {})}
        whole = {**body, "apiVersion": kind.api_version, "kind": kind.name}
        verb = "apply-status" if subresource else "apply"
        for attempt in range(attempts):
            try:
                return await self._ask(verb, "PATCH", kind, path, query, whole, APPLY)
            except KubeError as error:
                # Forced, a conflict is a race of two requests, not one of owners (keycloak#43198).
                if not (error.conflict and force) or attempt == attempts - 1:
                    raise
                await asyncio.sleep(random.uniform(0.02, 0.1) * 2**attempt)  # noqa: S311 - spreads, hides nothing
        raise AssertionError("unreachable")

    async def create(self, kind: Kind, body: Object) -> dict[str, Any]:
        """Make an object.

        Raises:
            KubeError: `conflict` when there is one of that name.
        """
        path = kind.path(body["metadata"].get("namespace", ""))
        whole = {**body, "apiVersion": kind.api_version, "kind": kind.name}
        return await self._ask("create", "POST", kind, path, {}, whole, JSON)

    async def replace(self, kind: Kind, body: Object) -> dict[str, Any]:
        """Replace an object, if it is still the one whose resourceVersion the body has.

        Raises:
            KubeError: `conflict` when it is not.
        """
        path = kind.path(body["metadata"].get("namespace", ""), body["metadata"]["name"])
        whole = {**body, "apiVersion": kind.api_version, "kind": kind.name}
        return await self._ask("update", "PUT", kind, path, {}, whole, JSON)

    async def merge(self, kind: Kind, name: str, namespace: str, patch: Object) -> dict[str, Any]:
        """JSON merge patch: for what this system made alone, such as the count of an event."""
        return await self._ask("patch", "PATCH", kind, kind.path(namespace, name), {}, patch, MERGE)

    async def remove_item(
        self,
        kind: Kind,
        name: str,
        namespace: str,
        path: str,
        index: int,
        expected: tuple[str, str],
        subresource: str = "",
    ) -> None:
        """Remove one item of a list, if it still is the one that is meant.

        Args:
            kind, name, namespace, subresource: of the object.
            path: of the list, such as `/status/residency`.
            index: of the item.
            expected: a field of the item and its value.
        """
        steps = [
            {"op": "test", "path": f"{path}/{index}/{expected[0]}", "value": expected[1]},
            {"op": "remove", "path": f"{path}/{index}"},
        ]
        verb = "patch-status" if subresource else "patch"
        await self._ask(verb, "PATCH", kind, kind.path(namespace, name, subresource), {}, steps, JSON_PATCH)

    async def delete(
        self, kind: Kind, name: str, namespace: str = "", *, uid: str = "", grace_seconds: int | None = None
    ) -> None:
        """Delete an object, and in the background what it owns. Nothing happens when it is not there.

        Args:
            kind, name, namespace: of the object.
            uid: delete that one only, not a successor of the same name.
            grace_seconds: of a pod; its own when None, and with 0 it is not waited for that its node ends it.
        """
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        with suppress_missing(also_conflict=bool(uid)):
            await self._ask("delete", "DELETE", kind, kind.path(namespace, name), {}, options, JSON)

    async def _ask(
        self,
        verb: str,
        method: str,
        kind: Kind,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = JSON,
    ) -> dict[str, Any]:
        async with self._request(verb, method, kind, path, query or {}, body, content, REQUEST_SECONDS) as response:
            try:
                answer: dict[str, Any] = json.loads(await response.read())
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise unreachable(path, error) from error
            return answer

    @asynccontextmanager
    async def _request(
        self,
        verb: str,
        method: str,
        kind: Kind,
        path: str,
        query: Mapping[str, str],
        body: Any,
        content: str,
        total_seconds: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        self.calls[verb, kind.plural] += 1
        headers = {"Accept": JSON, "Content-Type": content, "User-Agent": self._client.user_agent}
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        except (loading.ConfigException, OSError, ValueError) as error:  # a token that could not be read or renewed
            raise unreachable(path, error) from error
        url = f"{self.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        timeout = aiohttp.ClientTimeout(total=total_seconds, sock_connect=10.0)
        try:
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=timeout
            )
            response: aiohttp.ClientResponse = answer.response if hasattr(answer, "response") else answer
        except api.ApiException as error:
            raise refused(path, error.status or 0, error.body, error.headers or {}) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(path, error) from error
        try:
            if response.status >= HTTPStatus.BAD_REQUEST:
                with suppress(aiohttp.ClientError, TimeoutError):
                    raise refused(path, response.status, await response.read(), response.headers)
                raise refused(path, response.status, b"", response.headers)
            yield response
        finally:
            response.close() if total_seconds is None else response.release()

    @asynccontextmanager
    async def stream(
        self, kind: Kind, namespace: str, query: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The lines of a watch; closed at the end, whatever is still to come."""
        async with self._request("watch", "GET", kind, kind.path(namespace), query, None, JSON, None) as response:
            yield response


def _in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and _IN_CLUSTER.exists()


def selectors(labels: str, fields: str) -> dict[str, str]:
    """Query parameters of selectors."""
    return {**({"labelSelector": labels} if labels else {}), **({"fieldSelector": fields} if fields else {})}
