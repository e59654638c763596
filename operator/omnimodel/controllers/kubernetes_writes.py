"""The operator's writes: by the leader only, only what differs, and nothing that belongs to someone else."""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.kubernetes_cache import Cache, Key
from omnimodel.controllers.kubernetes_children import Child, differences, owned_by
from omnimodel.controllers.kubernetes_health import Hearing
from omnimodel.controllers.kubernetes_pods import PodView, is_by, speaks_for
from omnimodel.controllers.kubernetes_volumes import TOKEN_KEY
from omnimodel.errors import Reason
from omnimodel.kube import LEASES, PODS, POOLS, PROCESSES, SECRETS, Kind, Kube, KubeError, key_of

log = logging.getLogger(__name__)

MANAGER = "omni-operator"
CONDITIONS = frozenset({"Ready", "Reconciling", "Stalled", "NameConflict"})
RETRY_SECONDS = 2.0
TOKEN_SECONDS = 240.0  # between two looks at a Secret with a token
TOKEN_BYTES = 32


Changed = Callable[[Kind, Mapping[str, Any] | None, Mapping[str, Any] | None], None]


class NotLeadingError(Exception):
    """Someone else leads, or will: nothing may be written."""


class LaterError(Exception):
    """Something has to go first; to be tried again soon."""


class FaultError(Exception):
    """It cannot be done until a person does something; `refusal` says what."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Writer:
    """See the module.

    Args:
        kube: the connection.
        cache: gets the answer to each write.
        hearing: is told that the watch has to bring it.
        leads: whether this one may write.

    `changed` is told of objects that the answer to a write shows to be others than before.
    """

    def __init__(self, kube: Kube, cache: Cache, hearing: Hearing, leads: Callable[[], bool]) -> None:
        self._kube = kube
        self._cache = cache
        self._hearing = hearing
        self._leads = leads
        self.changed: Changed = lambda *_: None
        self._tolerated: dict[tuple[Kind, Key], tuple[str, ...]] = {}
        self._tokens: dict[Key, float] = {}  # when Secrets with tokens were looked at last

    def _guard(self) -> None:
        if not self._leads():
            raise NotLeadingError

    def _took(self, kind: Kind, answer: dict[str, Any]) -> None:
        """Take the answer to a write. It may hold what others wrote meanwhile, which is no news any more later."""
        taken, before = self._cache.put(kind, answer)
        self._hearing.expect(kind, answer)
        if taken:
            self.changed(kind, before, self._cache.items[kind][key_of(answer)])

    async def child(self, child: Child, owner_uid: str) -> bool:
        """Make a child of a pool what it should be; whether something had to be written.

        Raises:
            LaterError: its predecessor has not gone yet.
            FaultError: an object of someone else has its name, or it may not be written.
        """
        kind, body = child.kind, child.body
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        live = self._cache.get(kind, key) or await self._kube.get(kind, key[1], key[0])
        if live is not None:
            if live["metadata"].get("deletionTimestamp"):
                raise LaterError(f"{kind.name} {key[1]} is being deleted")
            if not owned_by(live, owner_uid):
                if _of_a_pool(live):
                    raise LaterError(f"{kind.name} {key[1]} belongs to a pool that is gone, and goes with it")
                problem = f"a {kind.name} named {key[1]} is there already, belongs to someone else, and is left alone"
                raise FaultError(Refusal(Reason.NAME_OCCUPIED, problem))
            wrong = tuple(differences(body, live))
            if not wrong or wrong == self._tolerated.get((kind, key)):
                return False
            log.info("child differs kind=%s namespace=%s name=%s at=%s", kind.name, *key, ",".join(wrong)[:200])
        self._guard()
        try:
            answer = await self._kube.apply(kind, body, manager=MANAGER)
        except KubeError as error:
            raise fault_of(error) or error from error
        # What the API server changes in what it was given would be applied for ever.
        left = tuple(differences(body, answer))
        if left:
            log.warning("child not as applied kind=%s namespace=%s name=%s at=%s", kind.name, *key, ",".join(left))
            self._tolerated[kind, key] = left
        else:
            self._tolerated.pop((kind, key), None)
        self._took(kind, answer)
        return True

    async def token(self, name: str, namespace: str) -> None:
        """Make a token of the agents of a namespace where its Secret has none; one that there is stays.

        Raises:
            FaultError: it may not be read or written.
        """
        key, now = (namespace, name), time.monotonic()
        if now - self._tokens.get(key, -TOKEN_SECONDS) < TOKEN_SECONDS:
            return
        try:
            live = await self._kube.get(SECRETS, name, namespace)
            if not ((live or {}).get("data") or {}).get(TOKEN_KEY):
                self._guard()
                token = base64.b64encode(secrets.token_hex(TOKEN_BYTES).encode()).decode()
                body = {"metadata": {"name": name, "namespace": namespace}, "data": {TOKEN_KEY: token}}
                await self._kube.apply(SECRETS, body, manager=MANAGER)
                log.info("token made namespace=%s secret=%s", namespace, name)
        except KubeError as error:
            raise fault_of(error) or error from error
        self._tokens[key] = now

    async def process(self, body: Mapping[str, Any]) -> bool:
        """Make a model's OmniProcess what it should be; whether something had to be written.

        Raises:
            LaterError: its predecessor has not gone yet.
            FaultError: the CRD drops fields, or it may not be written.
        """
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        live = self._cache.items[PROCESSES].get(key)
        if live is not None:
            if live["metadata"].get("deletionTimestamp"):
                raise LaterError(f"OmniProcess {key[1]} is being deleted")
            if _process_is(body, live):
                return False
        self._guard()
        try:
            if live is not None and _empties(body["spec"], live["spec"]):
                # Applied over a map with entries, an empty one would become null, which is refused.
                change = {"metadata": body["metadata"], "spec": correction(body["spec"], live["spec"], whole=True)}
                answer = await self._kube.merge(PROCESSES, key[1], key[0], change)
            else:
                answer = await self._kube.apply(PROCESSES, body, manager=MANAGER)
            excess = correction(body["spec"], answer["spec"])
            if excess:  # fields of a foreign hand are no one's to keep in an object of the system
                log.info("process corrected namespace=%s name=%s fields=%s", *key, ",".join(sorted(excess)))
                self._guard()
                answer = await self._kube.merge(PROCESSES, key[1], key[0], {"spec": excess})
        except KubeError as error:
            raise fault_of(error) or error from error
        self._took(PROCESSES, answer)
        lost = [name for name, value in body["spec"].items() if value is not None and name not in answer["spec"]]
        if lost:
            problem = (
                f"the CRD omniprocesses.omnimodel.io drops {', '.join(lost)}: the CRDs are older than the operator"
            )
            raise FaultError(Refusal(Reason.OUTDATED_DEFINITIONS, problem))
        return True

    async def delete_process(self, key: Key) -> None:
        """Delete the OmniProcess that is known, and no successor of it."""
        live = self._cache.process(key)
        if live is None:
            return
        self._guard()
        uid = live["metadata"].get("uid", "")
        await self._kube.delete(PROCESSES, key[1], key[0], uid=uid)
        self._cache.drop(PROCESSES, key, uid)
        log.info("process deleted namespace=%s name=%s", *key)

    async def status(self, kind: Kind, key: Key, status: Mapping[str, Any]) -> bool:
        """Say of an object what there is to say; whether something had to be written."""
        live = self._cache.get(kind, key)
        if live is None or not status_differs(status, live.get("status") or {}):
            return False
        self._guard()
        try:
            answer = await self._kube.patch_status(kind, key[1], key[0], status, manager=MANAGER)
        except KubeError as error:
            if error.missing:  # deleted this moment
                return False
            raise
        self._took(kind, answer)
        return True

    async def is_by_predecessor(self, namespace: str | None, pod: PodView, entry: Mapping[str, Any]) -> bool:
        """Whether what is said of a pod is by one of its name before it, as the API server has them now.

        News of the pod may come after news of what its agent wrote, and so may news of the agent's lease, which it
        renews before it writes anything else.
        """
        if namespace is None or pod.item is None:
            return False
        if entry.get("podUid"):
            there = await self._kube.list(PODS, namespace, fields=f"metadata.name={pod.name}")
            return not any(is_by(entry, item["metadata"]["uid"]) for item in there.items)
        lease = await self._kube.get(LEASES, pod.name, namespace)
        return lease is None or not speaks_for(lease, pod.item)

    async def bury(self, key: Key, pod: Mapping[str, Any]) -> None:
        """Delete the object of a pod that nobody ends any more, and no successor of it."""
        self._guard()
        await self._kube.delete(PODS, key[1], key[0], uid=pod["metadata"]["uid"], grace_seconds=0)
        log.warning("pod buried namespace=%s name=%s node=%s", *key, (pod.get("spec") or {}).get("nodeName", ""))

    async def clear_entry(self, kind: Kind, key: Key, field: str, entry: Mapping[str, Any]) -> None:
        """Take back what the agent of a pod that is gone said of an object, in that agent's place."""
        self._guard()
        live = self._cache.get(kind, key)
        if live is None:
            return
        if entry not in ((live.get("status") or {}).get(field) or ()):  # news came while it was asked who is gone
            raise LaterError(f"{kind.name} {key[1]} has changed")
        seen, pod = str(live["metadata"].get("resourceVersion", "")), str(entry["pod"])
        manager = f"omni-agent.{pod}"
        try:
            # Of the very object that was looked at: what an agent that came back has written since stays.
            # And no empty status: where nobody else has said anything the API server would have to make it null.
            none: dict[str, list[object]] = {field: []}
            answer = await self._kube.patch_status(kind, key[1], key[0], none, manager=manager, resource_version=seen)
            entries = (answer.get("status") or {}).get(field) or []
            index = next((index for index, entry in enumerate(entries) if entry.get("pod") == pod), None)
            if index is not None:  # a foreign hand wrote it
                self._guard()
                path = f"/status/{field}"
                await self._kube.remove_item(kind, key[1], key[0], path, index, ("pod", pod), "status")
                answer = await self._kube.get(kind, key[1], key[0]) or answer
        except KubeError as error:
            if error.missing:
                return
            if error.conflict:
                raise LaterError(f"{kind.name} {key[1]} has changed") from error
            raise
        self._took(kind, answer)
        log.info("entry cleared kind=%s namespace=%s name=%s pod=%s", kind.name, *key, pod)


def _of_a_pool(item: Mapping[str, Any]) -> bool:
    owners = item["metadata"].get("ownerReferences") or ()
    return any(owner.get("kind") == POOLS.name and owner.get("apiVersion") == POOLS.api_version for owner in owners)


def fault_of(error: KubeError) -> FaultError | None:
    """What only a person can change; None for everything else."""
    if error.status == 403:
        return FaultError(Refusal(Reason.NOT_ALLOWED, error.problem))
    if error.invalid:
        return FaultError(Refusal(Reason.INVALID_MANIFEST, error.problem))
    return None


def _process_is(body: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    head = {"labels": body["metadata"]["labels"], "ownerReferences": body["metadata"].get("ownerReferences", [])}
    return not differences(head, live["metadata"]) and without_null(body["spec"]) == without_null(live.get("spec"))


def without_null(value: Any) -> Any:
    """A JSON value without the keys that are null: to be null and to be missing are the same to the API server."""
    if isinstance(value, Mapping):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_null(item) for item in value]
    return value


def _empties(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a map that has entries is to have none."""
    both = ((value, found.get(key)) for key, value in wanted.items())
    return any(
        isinstance(value, Mapping) and isinstance(there, Mapping) and there and (not value or _empties(value, there))
        for value, there in both
    )


def correction(wanted: Mapping[str, Any], found: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """A merge patch that takes out of `found` what `wanted` does not have, and if `whole` puts in what it lacks."""
    patch: dict[str, Any] = {}
    for key, value in found.items():
        mine = wanted.get(key)
        if mine is None:
            if value is not None:
                patch[key] = None
        elif isinstance(mine, Mapping) and isinstance(value, Mapping):
            inner = correction(mine, value, whole=whole)
            if inner:
                patch[key] = inner
        elif without_null(mine) != without_null(value):
            patch[key] = mine
    if whole:
        patch |= {key: value for key, value in wanted.items() if value is not None and key not in found}
    return patch


def status_differs(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a status lacks what the operator says; what others say in it does not count."""
    conditions = {condition["type"]: condition for condition in found.get("conditions") or ()}
    mine = {condition["type"]: condition for condition in wanted.get("conditions") or ()}
    if any(conditions.get(kind) != condition for kind, condition in mine.items()):
        return True
    if (conditions.keys() & CONDITIONS) - mine.keys():
        return True
    rest = {key: value for key, value in wanted.items() if key != "conditions"}
    return any(found.get(key) != value for key, value in rest.items())


def delay_of(error: Exception) -> float:
    """Seconds that an error asks to wait before it is tried again; 0 to leave it to the queue."""
    if isinstance(error, LaterError):
        return RETRY_SECONDS
    return error.retry_after_seconds if isinstance(error, KubeError) else 0.0
