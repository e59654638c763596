"""Why pods are not made, or do not start: what controllers and kubelets say in events and nowhere else.

Events are asked for only about a pod that has been away for a while, and not again before half a minute has passed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from omnimodel.api import OmniPool
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.kubernetes_children import privilege_of
from omnimodel.controllers.kubernetes_pods import PodView, index_of
from omnimodel.errors import Reason
from omnimodel.kube import EVENTS, STATEFUL_SETS, Kube, KubeError

log = logging.getLogger(__name__)

AWAY_SECONDS = 10.0  # of a pod, before anyone asks why
LOOK_SECONDS = 30.0
LOOKED = "omnimodel.io/looked"  # when a StatefulSet that cannot make its pods was last asked to try again
_NOT_STARTED = {"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedMapVolume"}
_ACCOUNT = re.compile(r'serviceaccount "([^"]+)" not found')

Key = tuple[str, str]


class Troubles:
    """See the module.

    Args:
        kube: the connection.
        clock: monotonic.
    """

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[Key, Refusal] = {}  # by namespace and name of the pod
        self._looked: dict[Key, float] = {}  # by namespace and name of the pool

    def of(self, namespace: str, pod: str) -> Refusal | None:
        """What is known of a pod."""
        return self._known.get((namespace, pod))

    def doubtful(self, pods: Sequence[PodView], replicas: int) -> list[PodView]:
        """Pods that are away for longer than making them takes, and of which no status says why."""
        now = self._clock()
        return [
            pod
            for pod in pods
            if pod.index < replicas
            and pod.away_seconds is not None
            and now - pod.away_seconds > AWAY_SECONDS
            and (pod.item is None or (pod.item.get("status") or {}).get("phase") == "Pending")
        ]

    async def look(
        self, key: Key, pool: OmniPool, pods: Sequence[PodView], replicas: int, owner: Mapping[str, Any] | None
    ) -> bool:
        """Ask why pods are away, where it is time to; whether to look again later.

        Args:
            key: of the pool.
            pool: checked.
            pods: of the pool.
            replicas: that it asks for.
            owner: its StatefulSet; None when there is none.
        """
        doubtful = self.doubtful(pods, replicas)
        for pod in pods:
            if pod not in doubtful:
                self._known.pop((key[0], pod.name), None)
        if not doubtful or owner is None:
            self._looked.pop(key, None)
            return False
        now = self._clock()
        if now - self._looked.get(key, -LOOK_SECONDS) < LOOK_SECONDS:
            return True
        self._looked[key] = now
        try:
            if any(pod.item is None for pod in doubtful):
                await self._look_at_set(key, pool, [pod for pod in doubtful if pod.item is None], owner)
            for pod in doubtful:
                if pod.item is not None:
                    await self._look_at_pod(key, pod)
        except KubeError as error:
            log.warning("events not read namespace=%s pool=%s error=%s", *key, error)
        return True

    def forget(self, pool: Key) -> None:
        """A pool is gone."""
        self._looked.pop(pool, None)
        for key in [key for key in self._known if key[0] == pool[0] and index_of(pool[1], key[1]) >= 0]:
            del self._known[key]

    async def _look_at_set(self, key: Key, pool: OmniPool, pods: Sequence[PodView], owner: Mapping[str, Any]) -> None:
        events = await self._events(key[0], owner["metadata"]["uid"])
        for pod in pods:
            about = [event for event in events if f" pod {pod.name} " in event.get("message", "").lower()]
            newest = max(about, key=_moment, default=None)
            if newest is None or newest.get("reason") != "FailedCreate":
                self._known.pop((key[0], pod.name), None)
                continue
            said = newest["message"].partition("error: ")[2] or newest["message"]
            problem = f"{pod.name} cannot be made: {said}"
            self._known[key[0], pod.name] = Refusal(Reason.POD_NOT_CREATED, problem, _cure(key[0], pool, said))
        if any((key[0], pod.name) in self._known for pod in pods):
            # Its controller waits longer after each failure, up to a quarter of an hour; a change of it is news.
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            await self._kube.merge(STATEFUL_SETS, key[1], key[0], {"metadata": {"annotations": {LOOKED: stamp}}})

    async def _look_at_pod(self, key: Key, pod: PodView) -> None:
        assert pod.item is not None
        events = await self._events(key[0], pod.item["metadata"]["uid"])
        newest = max((e for e in events if e.get("reason") in _NOT_STARTED), key=_moment, default=None)
        if newest is None:
            self._known.pop((key[0], pod.name), None)
            return
        self._known[key[0], pod.name] = Refusal(Reason.POD_FAILED, f"{pod.name}: {newest.get('message', '')}")

    async def _events(self, namespace: str, uid: str) -> Sequence[Mapping[str, Any]]:
        return (await self._kube.list(EVENTS, namespace, fields=f"involvedObject.uid={uid}")).items


def _moment(event: Mapping[str, Any]) -> tuple[str, int]:
    series = event.get("series") or {}
    when = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
    return str(when)[:19], int(event["metadata"].get("resourceVersion", "0"))


def _cure(namespace: str, pool: OmniPool, said: str) -> str | None:
    """What to do about a pod that the API server does not take; None when there is nothing better than the usual."""
    account = _ACCOUNT.search(said)
    if account is not None:
        return (
            f"add {namespace} to the chart's agent.namespaces, which makes it there, or name a service account of"
            " that namespace in spec.pod.serviceAccountName"
        )
    if "violates PodSecurity" in said:
        privilege = privilege_of(pool)
        level, why = ("privileged", f" for {privilege}") if privilege else ("baseline", "")
        return (
            f"its pods need{why} a namespace whose label pod-security.kubernetes.io/enforce is {level} at most: set it,"
            " or put the pool into such a namespace"
        )
    if "exceeded quota" in said:
        return "raise that ResourceQuota, or ask for less in spec.replicas and spec.pod.resources"
    return None
