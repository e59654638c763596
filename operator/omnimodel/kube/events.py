"""Events for people: what `kubectl describe` shows. The same words about the same object are one event, counted."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from omnimodel.kube.client import Kube
from omnimodel.kube.error import KubeError
from omnimodel.kube.kinds import EVENTS

log = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0  # the same event is not written again before that
REMEMBERED = 4096
MESSAGE_LIMIT = 1024  # of the API
EVERYWHERE = "default"  # events of objects without namespace go there


class Recorder:
    """Writes events. It never raises: nothing depends on an event.

    Args:
        kube: the connection.
        component: who tells, such as `omni-operator`.
        instance: which one of them, such as the pod's name.
        clock: monotonic.
    """

    def __init__(
        self, kube: Kube, component: str, instance: str = "", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._component = component
        self._instance = instance
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}  # when, and how often

    async def tell(self, about: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """Record an event of an object.

        Args:
            about: the object, with apiVersion, kind and metadata.
            reason: one CamelCase word.
            message: one sentence.
            warning: whether someone should look.
        """
        metadata = about["metadata"]
        text = message[:MESSAGE_LIMIT]
        parts = (about["kind"], metadata.get("uid", ""), reason, text, self._component)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        now = self._clock()
        last, count = self._told.get(digest, (now - REPEAT_SECONDS, 0))
        if now - last < REPEAT_SECONDS:
            return
        self._told[digest] = (now, count + 1)
        while len(self._told) > REMEMBERED:
            del self._told[next(iter(self._told))]
        namespace = metadata.get("namespace") or EVERYWHERE
        name = f"{metadata['name'][:200]}.{digest}"
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata.get("namespace", ""),
                "uid": metadata.get("uid", ""),
            },
            "reason": reason,
            "message": text,
            "type": "Warning" if warning else "Normal",
            "source": {"component": self._component, "host": self._instance},
            "reportingComponent": self._component,
            "reportingInstance": self._instance or self._component,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            try:
                await self._kube.create(EVENTS, body)
            except KubeError as error:
                if not error.conflict:
                    raise
                # Who writes events may not read them, so an earlier run's count is not known.
                counted = {"count": max(2, count + 1), "lastTimestamp": stamp}
                await self._kube.merge(EVENTS, name, namespace, counted)
        except KubeError as error:
            log.warning("event not written kind=%s name=%s reason=%s error=%s", parts[0], name, reason, error)
