"""What the operator knows of a pool's pods, and what it says of them. Pure: all times are of one monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnimodel.controllers.status import Refusal
from omnimodel.errors import Reason
from omnimodel.placement.pods import PodSupply

SILENT_SECONDS = 40.0  # without a heartbeat: four were missed
LOST_SECONDS = 60.0  # not serving for so long: its models go elsewhere, if they can
GONE_SECONDS = 15.0  # without a Pod for so long: longer than a restart leaves none
ZONE_LABEL = "topology.kubernetes.io/zone"
_WAITS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_FAILS = {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}


@dataclass(frozen=True)
class PodView:
    """One pod that there is, or will be.

    Args:
        name: of the pod.
        index: its number in the pool.
        item: the Pod object; None when there is none.
        entry: what its agent says in the pool's status; empty for nothing.
        heard_seconds: when its heartbeat changed last; None when it never did.
        away_seconds: since when it does not serve; None while it does.
    """

    name: str
    index: int
    item: Mapping[str, Any] | None
    entry: Mapping[str, Any]
    heard_seconds: float | None
    away_seconds: float | None

    @property
    def zone(self) -> str:
        """Where it is; empty when unknown."""
        labels: Mapping[str, str] = (self.item or {}).get("metadata", {}).get("labels") or {}
        return labels.get(ZONE_LABEL, "")

    def silent(self, now_seconds: float) -> bool:
        """Whether its agent has not been heard of lately."""
        return self.heard_seconds is None or now_seconds - self.heard_seconds > SILENT_SECONDS

    def serves(self, now_seconds: float) -> bool:
        """Whether the kubelet and the agent say that it serves."""
        return self.item is not None and _ready(self.item) and not self.silent(now_seconds)

    def lost(self, now_seconds: float) -> bool:
        """Whether it has been away for so long that its models should be elsewhere."""
        return self.away_seconds is not None and now_seconds - self.away_seconds > LOST_SECONDS

    def gone(self, now_seconds: float) -> bool:
        """Whether what its agent said last is true no longer: the pod is not there, has ended, or is lost."""
        if self.item is None:
            return self.away_seconds is not None and now_seconds - self.away_seconds > GONE_SECONDS
        ended = (self.item.get("status") or {}).get("phase") in {"Failed", "Succeeded"}
        return ended or (self.silent(now_seconds) and self.lost(now_seconds))


def index_of(pool: str, pod: str) -> int:
    """The number of a pod in its pool; -1 for a pod of another making."""
    prefix, _, number = pod.rpartition("-")
    return int(number) if prefix == pool and number.isdigit() else -1


def supply_of(pod: PodView, replicas: int, now_seconds: float) -> PodSupply:
    """The pod as placement sees it.

    Args:
        pod: the pod.
        replicas: pods that the pool asks for; those beyond will go.
        now_seconds: monotonic.
    """
    return PodSupply(
        name=pod.name,
        zone=pod.zone,
        budget_bytes=int(pod.entry.get("budgetBytes", 0)),
        ready=pod.serves(now_seconds) and bool(pod.entry.get("ready", True)),
        lost=pod.lost(now_seconds),
        leaving=pod.index >= replicas,
        images=frozenset(pod.entry.get("images") or ()),
    )


def _ready(item: Mapping[str, Any]) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or ()
    return not item["metadata"].get("deletionTimestamp") and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def problem_of(pod: PodView, now_seconds: float) -> tuple[Refusal, bool] | None:
    """Why a pod does not serve, and whether a person has to do something; None when it does or may soon."""
    if pod.item is None:
        return None
    status: Mapping[str, Any] = pod.item.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = condition.get("message", "no node takes it")
            reason = Reason.CLAIM_NOT_FOUND if "persistentvolumeclaim" in said.lower() else Reason.UNSCHEDULABLE
            return Refusal(reason, f"{pod.name}: {said}"), True
    for container in status.get("containerStatuses") or ():
        waiting: Mapping[str, str] = (container.get("state") or {}).get("waiting") or {}
        cause = waiting.get("reason", "")
        if cause in _WAITS:
            return Refusal(Reason.IMAGE_NOT_PULLED, f"{pod.name}: {waiting.get('message', cause)}"), True
        if cause in _FAILS:
            last = ((container.get("lastState") or {}).get("terminated") or {}).get("message", "")
            said = waiting.get("message", cause)
            return Refusal(Reason.POD_FAILED, f"{pod.name}: {said}{f' ({last.strip()})' if last else ''}"), True
    if _ready(pod.item) and pod.silent(now_seconds):
        if pod.heard_seconds is None:
            return Refusal(Reason.AGENT_SILENT, f"{pod.name}: its agent has not been heard of yet"), False
        quiet = now_seconds - pod.heard_seconds
        return Refusal(Reason.AGENT_SILENT, f"{pod.name}: its agent has been silent for {quiet:.0f} s"), False
    if pod.entry and not pod.entry.get("ready") and pod.entry.get("reason"):
        return Refusal(str(pod.entry["reason"]), f"{pod.name}: {pod.entry.get('message', '')}"), True
    return None


def problems_of(pods: Sequence[PodView], now_seconds: float) -> tuple[Refusal, bool] | None:
    """The problem to tell first: one that a person has to solve comes before one that may pass."""
    found = [problem for pod in pods if (problem := problem_of(pod, now_seconds)) is not None]
    return min(found, key=lambda problem: not problem[1], default=None)
