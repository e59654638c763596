"""List and watch: every object as it is, and a mirror of it that outlives cut connections.

A stream that says nothing for longer than two bookmarks take is dead, whatever TCP says, and is begun anew. A version
that the server has forgotten (410) is answered with a new list; what was deleted meanwhile is then seen to be missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from omnimodel.errors import OmniError
from omnimodel.kube.client import Kube, selectors
from omnimodel.kube.error import KubeError
from omnimodel.kube.kinds import Kind, key_of

log = logging.getLogger(__name__)

SERVER_SECONDS = 290  # the server ends a stream after that; it is continued at once
SILENCE_SECONDS = 150.0  # bookmarks come about once a minute
BACKOFF_SECONDS = (0.2, 30.0)

Key = tuple[str, str]  # namespace, name


@dataclass(frozen=True)
class Listed:
    """Everything there is; what is not in it is gone."""

    items: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Changed:
    """One object changed: `kind` is ADDED, MODIFIED or DELETED. An item of None is a sign of life."""

    kind: str
    item: dict[str, Any] | None


async def follow(
    kube: Kube,
    kind: Kind,
    namespace: str = "",
    *,
    labels: str = "",
    fields: str = "",
    silence_seconds: float = SILENCE_SECONDS,
) -> AsyncIterator[Listed | Changed]:
    """Follow objects for ever; begins with a `Listed`, and has another after each gap.

    It outlives everything but its own cancellation: no answer, refusals, a kind that does not exist yet.

    Args:
        kube: the connection.
        kind: of the objects.
        namespace: empty for all.
        labels, fields: selectors.
        silence_seconds: a stream that says nothing for so long is begun anew.
    """
    version = ""
    failures = 0
    subject = f"{kind.plural} in {namespace or 'all namespaces'}"
    while True:
        try:
            if not version:
                page = await kube.list(kind, namespace, labels=labels, fields=fields)
                version, failures = page.resource_version, 0
                yield Listed(page.items)
            query = {
                "watch": "true",
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(SERVER_SECONDS),
                "resourceVersion": version,
                **selectors(labels, fields),
            }
            async with kube.stream(kind, namespace, query) as response:
                while line := await _line(response, silence_seconds):
                    event = json.loads(line)
                    item = event["object"]
                    if event["type"] == "ERROR":
                        raise _error(kind, item)
                    version = item["metadata"]["resourceVersion"]
                    failures = 0
                    yield Changed(event["type"], None if event["type"] == "BOOKMARK" else item)
        except KubeError as error:
            if error.gone:
                log.info("watch begins anew kind=%s reason=gone", kind.plural)
                version = ""
                continue
            failures += 1
            log.warning("watch failed kind=%s status=%d failures=%d error=%s", subject, error.status, failures, error)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            failures += 1
            log.info("watch cut kind=%s failures=%d error=%r", subject, failures, error)
        if failures:
            least, most = BACKOFF_SECONDS
            pause_seconds = min(most, least * 2 ** min(failures, 10))
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - spreads, hides nothing


async def _line(response: aiohttp.ClientResponse, silence_seconds: float) -> bytes:
    async with asyncio.timeout(silence_seconds):
        return await response.content.readline()


def _error(kind: Kind, status: Mapping[str, Any]) -> KubeError:
    code = int(status.get("code", HTTPStatus.INTERNAL_SERVER_ERROR))
    return KubeError(f"watch of {kind.plural}", str(status.get("message", "failed")), status=code)


Listener = Callable[[Key, dict[str, Any] | None, dict[str, Any] | None], None]


class Mirror:
    """Objects as the API server has them, in a dictionary that `run` keeps up.

    Args:
        kube: the connection.
        kind, namespace, labels, fields: of the objects, see `follow`.
        on_change: called with key, object before and object after; None for none. It must not block.
        on_synced: called once, when everything was listed, also when that was nothing.
        trim: what to keep of an object; all when None.
        clock: monotonic.
    """

    def __init__(
        self,
        kube: Kube,
        kind: Kind,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        on_change: Listener | None = None,
        on_synced: Callable[[], None] | None = None,
        trim: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._on_change = on_change
        self._on_synced = on_synced
        self._trim = trim
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._heard = clock()
        self._synced = asyncio.Event()
        self.items: dict[Key, dict[str, Any]] = {}

    @property
    def synced(self) -> bool:
        """Whether everything was listed once."""
        return self._synced.is_set()

    @property
    def age_seconds(self) -> float:
        """Since the last sign of life of the stream."""
        return self._clock() - self._heard

    async def wait_synced(self, deadline_seconds: float | None = None) -> None:
        """Wait for the first list.

        Raises:
            OmniError: it did not come in time.
        """
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._synced.wait()
        except TimeoutError:
            raise OmniError(
                "Kubernetes",
                f"the {self._kind.plural} could not be listed within {deadline_seconds:g} s",
                "see the log for what the API server says",
            ) from None

    async def run(self) -> None:
        """Keep the mirror up until cancelled."""
        async for event in follow(
            self._kube,
            self._kind,
            self._namespace,
            labels=self._labels,
            fields=self._fields,
            silence_seconds=self._silence_seconds,
        ):
            self._heard = self._clock()
            match event:
                case Listed(items):
                    fresh = {key_of(item): item for item in items}
                    for key in self.items.keys() - fresh.keys():
                        self._put(key, None)
                    for key, item in fresh.items():
                        self._put(key, item)
                    first = not self._synced.is_set()
                    self._synced.set()
                    if first and self._on_synced is not None:
                        self._on_synced()
                case Changed("DELETED", item) if item is not None:
                    self._put(key_of(item), None)
                case Changed(_, item) if item is not None:
                    self._put(key_of(item), item)

    def _put(self, key: Key, item: dict[str, Any] | None) -> None:
        before = self.items.get(key)
        if item is None:
            self.items.pop(key, None)
        else:
            if self._trim is not None:
                item = self._trim(item)
            if before is not None and before["metadata"].get("resourceVersion") == item["metadata"]["resourceVersion"]:
                return
            self.items[key] = item
        if self._on_change is not None:
            self._on_change(key, before, item)
