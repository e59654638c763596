"""What the operator knows of a pool's pods, and what it says of them. Pure: all times are of one monotonic clock.

Three facts are kept apart. A pod `answers` while it runs and its agent is heard of: what the agent says is true, and
its models are its own. It is `ready` when the kubelet says so, which is when every model it began with has been ready
once: a change of all pods waits for that, and nothing else does. It is `lost` when it has not answered for so long that
its models should be elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from omnimodel.controllers.conditions import Refusal
from omnimodel.errors import CURES, Reason
from omnimodel.placement.board import PodSupply

SILENT_SECONDS = 40.0  # without a heartbeat: four were missed
LOST_SECONDS = 60.0  # without an answer of one that was heard, or that cannot come: its models go elsewhere
BACK_SECONDS = 30.0  # before that one that answers again gets what others had: they may come back, too
START_SECONDS = 600.0  # the same of one that is still being made: an image of many GB takes minutes to pull
GONE_SECONDS = 15.0  # without a Pod for so long: longer than a restart leaves none
STUCK_SECONDS = 60.0  # after its grace period: nobody on its node will end it any more
PROVISION_SECONDS = 60.0  # for a volume to be made for a claim: until then nobody has to do anything
ZONE_LABEL = "topology.kubernetes.io/zone"
_UNBOUND = "unbound immediate PersistentVolumeClaims"  # as a scheduler says it
_WAITS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_FAILS = {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_ENDED = {"Failed", "Succeeded"}
_MORE_MEMORY = "raise spec.pod.resources.memory of the pool, or have fewer models in a pod"


@dataclass(frozen=True)
class PodView:
    """One pod that there is, or will be.

    Args:
        name: of the pod.
        index: its number in the pool.
        item: the Pod object; None when there is none.
        entry: what its agent says in the pool's status; empty for nothing.
        heard_seconds: when the heartbeat of this very pod changed last; None when it never did.
        away_seconds: since when it does not answer; None while it does.
        first_seconds: when this very pod was heard of first; None when it never was.
        here_seconds: since when it answers; None while it does not.
        renewed: that heartbeat's own time, as the Lease has it.
        zone: where it is; empty when unknown.
        lost_node: its node, when that is not there, or its kubelet is not; else empty.
        trouble: what controllers and the kubelet have said of it in events, as why it is not made or not started.
    """

    name: str
    index: int
    item: Mapping[str, Any] | None
    entry: Mapping[str, Any]
    heard_seconds: float | None
    away_seconds: float | None
    first_seconds: float | None = None
    here_seconds: float | None = None
    renewed: str = ""
    zone: str = ""
    lost_node: str = ""
    trouble: Refusal | None = None

    @property
    def uid(self) -> str:
        """Its own; empty while there is none."""
        return "" if self.item is None else str(self.item["metadata"].get("uid", ""))

    @property
    def ending(self) -> bool:
        """Whether it was told to end."""
        return self.item is not None and bool(self.item["metadata"].get("deletionTimestamp"))

    @property
    def ready(self) -> bool:
        """Whether the kubelet says that it is ready."""
        conditions = ((self.item or {}).get("status") or {}).get("conditions") or ()
        return not self.ending and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def silent(self, now_seconds: float) -> bool:
        """Whether its agent has not been heard of lately."""
        return is_silent(self.heard_seconds, now_seconds)

    def answers(self, now_seconds: float) -> bool:
        """Whether it runs, its agent is heard of, and has said what it has."""
        running = self.item is not None and not self.ending and _phase(self.item) == "Running"
        return running and bool(self.entry) and not self.silent(now_seconds)

    def lost(self, now_seconds: float) -> bool:
        """Whether it has been away for so long that its models should be elsewhere."""
        if self.away_seconds is None:
            return False
        problem = problem_of(self, now_seconds)
        comes = self.heard_seconds is None and not (problem is not None and problem[1])
        since = max(self.away_seconds, self.first_seconds or self.away_seconds)
        return now_seconds - since > (START_SECONDS if comes else LOST_SECONDS)

    def gone(self, now_seconds: float) -> bool:
        """Whether what its agent said last is true no longer: the pod is not there, has ended, or is lost."""
        if self.item is None:
            return self.away_seconds is not None and now_seconds - self.away_seconds > GONE_SECONDS
        return _phase(self.item) in _ENDED or (self.silent(now_seconds) and self.lost(now_seconds))

    @property
    def replaced(self) -> bool:
        """Whether what is said of it may be by a pod of its name before it: its own agent was not heard of yet."""
        return self.item is not None and self.heard_seconds is None


def is_by(entry: Mapping[str, Any], uid: str) -> bool:
    """Whether an entry of a status is by the pod with a uid, as far as it says, and not by one of the same name."""
    return entry.get("podUid", "") in {"", uid}


def is_silent(heard_seconds: float | None, now_seconds: float) -> bool:
    """Whether an agent whose heartbeat changed then, None for never, has not been heard of lately."""
    return heard_seconds is None or now_seconds - heard_seconds > SILENT_SECONDS


def index_of(pool: str, pod: str) -> int:
    """The number of a pod in its pool; -1 for a pod of another making."""
    prefix, _, number = pod.rpartition("-")
    return int(number) if prefix == pool and number.isdigit() else -1


def speaks_for(lease: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Whether a heartbeat is of this pod, and not of one of its name before it."""
    holder = (lease.get("spec") or {}).get("holderIdentity")
    return holder in {pod["metadata"].get("uid"), pod["metadata"]["name"]}


def is_steady(pods: Sequence[PodView], now_seconds: float) -> bool:
    """Whether any pod answers for so long that those that are away would have come back with it."""
    return any(pod.here_seconds is not None and now_seconds - pod.here_seconds > BACK_SECONDS for pod in pods)


def supply_of(pod: PodView, replicas: int, now_seconds: float, *, steady: bool = True) -> PodSupply:
    """The pod as placement sees it.

    Args:
        pod: the pod.
        replicas: pods that the pool asks for; those beyond will go.
        now_seconds: monotonic.
        steady: whether others answer for long enough to get what it had.
    """
    return PodSupply(
        name=pod.name,
        zone=pod.zone,
        budget_bytes=int(pod.entry.get("budgetBytes", 0)),
        ready=pod.answers(now_seconds) and bool(pod.entry.get("ready", True)),
        lost=steady and pod.lost(now_seconds),
        leaving=pod.index >= replicas,
        images=frozenset(pod.entry.get("images") or ()),
    )


def _phase(item: Mapping[str, Any]) -> str:
    return str((item.get("status") or {}).get("phase", ""))


def problem_of(pod: PodView, now_seconds: float) -> tuple[Refusal, bool] | None:
    """Why a pod does not serve, and whether a person has to do something; None when it does or may soon."""
    if pod.item is None or _phase(pod.item) != "Running":
        found = None if pod.item is None else _unschedulable(pod) or _not_started(pod)
        found = found or pod.trouble
        if found is None:
            return None
        since = now_seconds if pod.away_seconds is None else pod.away_seconds
        return found, not (_UNBOUND in found.problem and now_seconds - since < PROVISION_SECONDS)
    failed = _not_started(pod)
    if failed is not None:
        return failed, True
    if pod.heard_seconds is None:
        if pod.away_seconds is not None and now_seconds - pod.away_seconds > START_SECONDS:
            return Refusal(Reason.AGENT_SILENT, f"{pod.name}: its agent was never heard of"), False
        return None
    if pod.silent(now_seconds):
        last = f" since {pod.renewed[:19]}Z" if pod.renewed else ""
        problem = f"{pod.name}: its agent has not been heard of{last}"
        if pod.lost_node:
            problem, cure = f"{problem}, and node {pod.lost_node} does not answer", CURES[Reason.NODE_SILENT]
            return Refusal(Reason.AGENT_SILENT, problem, cure), False
        return Refusal(Reason.AGENT_SILENT, problem), False
    if pod.entry and not pod.entry.get("ready") and pod.entry.get("reason"):  # agents say what to do themselves
        return Refusal(str(pod.entry["reason"]), f"{pod.name}: {pod.entry.get('message', '')}", ""), True
    if pod.lost_node and not pod.ready:
        problem = f"{pod.name} serves, but cannot be told ready: node {pod.lost_node} does not answer"
        return Refusal(Reason.NODE_SILENT, problem), False
    return None


def _unschedulable(pod: PodView) -> Refusal | None:
    for condition in ((pod.item or {}).get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = condition.get("message", "no node takes it")
            reason = Reason.CLAIM_NOT_FOUND if "persistentvolumeclaim" in said.lower() else Reason.UNSCHEDULABLE
            return Refusal(reason, f"{pod.name}: {said}")
    return None


def _not_started(pod: PodView) -> Refusal | None:
    for container in ((pod.item or {}).get("status") or {}).get("containerStatuses") or ():
        waiting: Mapping[str, str] = (container.get("state") or {}).get("waiting") or {}
        cause = waiting.get("reason", "")
        if cause in _WAITS:
            return Refusal(Reason.IMAGE_NOT_PULLED, f"{pod.name}: {waiting.get('message', cause)}")
        if cause in _FAILS:
            last: Mapping[str, Any] = (container.get("lastState") or {}).get("terminated") or {}
            said = waiting.get("message", cause)
            if last.get("reason") == "OOMKilled":
                problem = f"{pod.name}: its container ran out of memory and was killed: {said}"
                return Refusal(Reason.OUT_OF_MEMORY, problem, _MORE_MEMORY)
            words = str(last.get("message") or "").strip() or (f"exit code {last['exitCode']}" if last else "")
            return Refusal(Reason.POD_FAILED, f"{pod.name}: {said}{f' ({words})' if words else ''}")
    return None


def problems_of(pods: Sequence[PodView], now_seconds: float) -> tuple[Refusal, bool] | None:
    """The problem to tell first: one that a person has to solve comes before one that may pass."""
    found = [problem for pod in pods if (problem := problem_of(pod, now_seconds)) is not None]
    return min(found, key=lambda problem: not problem[1], default=None)


def is_stuck(pod: Mapping[str, Any], *, silent: bool, node_lost: bool, unix_seconds: float) -> bool:
    """Whether a pod was told to end and nobody on its node will do it: then its object alone is left to delete.

    Args:
        pod: the Pod object.
        silent: its agent has not been heard of lately.
        node_lost: its node is not there, or its kubelet is not.
        unix_seconds: the time of day.
    """
    until = pod["metadata"].get("deletionTimestamp")  # the end of its grace period
    if not until or not silent or not node_lost:
        return False
    due = datetime.fromisoformat(until) + timedelta(seconds=STUCK_SECONDS)
    return datetime.fromtimestamp(unix_seconds, UTC) > due
