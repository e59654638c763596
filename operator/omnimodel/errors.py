"""The one error hierarchy: what is wrong, with which object, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum


class Reason(StrEnum):
    """Why something is not as it should be: the `reason` of conditions, events, residency entries and errors.

    `CURES` has a cure for each in one sentence, docs/troubleshooting.md at length. Conditions and events that need
    nothing have words of their own, which that document lists.
    """

    INVALID_MANIFEST = "InvalidManifest"
    NAME_TAKEN = "NameTaken"
    POOL_NOT_FOUND = "PoolNotFound"
    TOO_LARGE = "TooLarge"
    OVER_COMMIT_LIMIT = "OverCommitLimit"
    SHARES_WITH_KEPT = "SharesWithKept"
    AFFINITY_CONFLICT = "AffinityConflict"
    SIZE_UNKNOWN = "SizeUnknown"
    NO_PODS = "NoPods"
    TOO_FEW_PODS = "TooFewPods"
    UNSCHEDULABLE = "Unschedulable"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    IMAGE_NOT_PULLED = "ImageNotPulled"
    POD_NOT_CREATED = "PodNotCreated"
    POD_FAILED = "PodFailed"
    AGENT_SILENT = "AgentSilent"
    NODE_SILENT = "NodeSilent"
    NAME_OCCUPIED = "NameOccupied"
    NOT_ALLOWED = "NotAllowed"
    OUTDATED_DEFINITIONS = "OutdatedDefinitions"
    SOURCE_NOT_FOUND = "SourceNotFound"
    DIGEST_MISMATCH = "DigestMismatch"
    BAD_ARTIFACT = "BadArtifact"
    DISK_FULL = "DiskFull"
    STORE_UNAVAILABLE = "StoreUnavailable"
    STORE_IN_USE = "StoreInUse"
    ENVIRONMENT_FAILED = "EnvironmentFailed"
    HANDLER_FAILED = "HandlerFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    DEVICE_FULL = "DeviceFull"
    CRASHED = "Crashed"
    LOAD_TIMEOUT = "LoadTimeout"
    EVICT_TIMEOUT = "EvictTimeout"
    NOT_GIVEN_BACK = "NotGivenBack"
    PARKING_FAILED = "ParkingFailed"
    DEVICE_LOST = "DeviceLost"
    PROBE_FAILED = "ProbeFailed"
    ISOLATION_UNAVAILABLE = "IsolationUnavailable"
    MODEL_NOT_FOUND = "ModelNotFound"
    QUEUE_FULL = "QueueFull"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DRAINING = "Draining"
    SUSPENDED = "Suspended"
    WITHOUT_EFFECT = "WithoutEffect"
    STATE_DIR_IN_USE = "StateDirInUse"
    INTERNAL = "InternalError"

    @property
    def code(self) -> str:
        """As error objects of HTTP have it: `QueueFull` is `queue_full`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.value).lower()

    @classmethod
    def of_code(cls, code: object) -> Reason | None:
        """The reason that a code of an error object stands for; None for a code of another kind."""
        return next((reason for reason in cls if reason.code == code), None)


CURES: Mapping[str, str] = {  # for conditions, events and answers that know nothing better
    Reason.INVALID_MANIFEST: "correct the manifest and apply it again (omni validate FILE checks it)",
    Reason.NAME_TAKEN: "choose another name",
    Reason.POOL_NOT_FOUND: "add an OmniPool of that name, or correct spec.pool",
    Reason.TOO_LARGE: (
        "raise spec.device.memory of the pool, or have the model need less (a smaller runtime.dtype,"
        " resources.deviceMemory)"
    ),
    Reason.OVER_COMMIT_LIMIT: "raise that limit or spec.replicas of the pool, or remove or suspend a model",
    Reason.SHARES_WITH_KEPT: (
        "keep fewer models resident (residency.keepResident), or raise spec.device.memory of the pool"
    ),
    Reason.AFFINITY_CONFLICT: "raise spec.replicas of the pool, or correct spec.affinity of one of the two models",
    Reason.SIZE_UNKNOWN: "write resources.deviceMemory, or wait until it was measured",
    Reason.NO_PODS: "raise spec.replicas of the pool",
    Reason.TOO_FEW_PODS: "raise spec.replicas of the pool, or write a smaller spec.replicas.min of the model",
    Reason.UNSCHEDULABLE: (
        "free or add a node that takes it, or change spec.pod.nodeSelector, spec.pod.tolerations, spec.pod.resources or"
        " spec.device of the pool"
    ),
    Reason.CLAIM_NOT_FOUND: (
        "create that claim in the pool's namespace with a storage class that makes volumes, or correct it in"
        " spec.volumes or spec.store of the pool"
    ),
    Reason.IMAGE_NOT_PULLED: (
        "correct spec.pod.image of the pool or the chart's images.agent, or give the node the registry's credentials"
        " (images.pullSecrets)"
    ),
    Reason.POD_NOT_CREATED: "correct what is refused in spec.pod of the pool, or allow it in the namespace",
    Reason.POD_FAILED: (
        "see kubectl logs --previous and kubectl describe of that pod, and correct spec.pod, spec.volumes or spec.store"
        " of the pool"
    ),
    Reason.AGENT_SILENT: "look at the pod's node, then at kubectl logs of the pod; deleted, it is made anew",
    Reason.NODE_SILENT: "restart its kubelet, or delete the Node when the machine is gone",
    Reason.NAME_OCCUPIED: "delete that object, or give the pool another name",
    Reason.NOT_ALLOWED: "upgrade the chart, or list the namespace in its `namespaces` or `agent.namespaces`",
    Reason.OUTDATED_DEFINITIONS: "upgrade them with the chart, or kubectl apply --server-side -f crds/",
    Reason.SOURCE_NOT_FOUND: (
        "correct its name, version or revision, or see that it can be reached with spec.sources of the pool"
    ),
    Reason.DIGEST_MISMATCH: "find out which of the two is right, and correct sha256 or the source",
    Reason.BAD_ARTIFACT: "replace it at its source, or name another",
    Reason.DISK_FULL: "free some space, or give the pool a larger store",
    Reason.STORE_UNAVAILABLE: "let the agent write there, or correct spec.store of the pool",
    Reason.STORE_IN_USE: "give each agent a folder of its own, or name this one in spec.store.published",
    Reason.ENVIRONMENT_FAILED: "correct the versions in runtime.environment.requirements",
    Reason.HANDLER_FAILED: "correct the handler (omni logs MODEL has its traceback)",
    Reason.OUT_OF_MEMORY: "raise resources.hostMemory, or ask for less at once (limits.concurrency)",
    Reason.DEVICE_FULL: "see nvidia-smi for who else has memory there, or lower spec.device.memory of the pool",
    Reason.CRASHED: "see omni logs MODEL for its last words",
    Reason.LOAD_TIMEOUT: "see omni logs MODEL for what it waits for, or raise limits.loadDeadline",
    Reason.EVICT_TIMEOUT: "see omni logs MODEL for what holds its interpreter",
    Reason.NOT_GIVEN_BACK: "have the handler hold no tensors on the GPU between requests",
    Reason.PARKING_FAILED: "report it with the last lines of the agent's log when it happens again",
    Reason.DEVICE_LOST: (
        "look for Xid messages in the kernel's log, reset or replace the GPU, and start the agent again"
    ),
    Reason.PROBE_FAILED: "correct spec.probe.expect, or the weights and options that answer otherwise",
    Reason.ISOLATION_UNAVAILABLE: "give the machine or pod what is missing, or lower spec.isolation.level of the pool",
    Reason.MODEL_NOT_FOUND: "see omni get models for the names that there are",
    Reason.QUEUE_FULL: "send it again later, or raise limits.queue or limits.concurrency",
    Reason.DEADLINE_EXCEEDED: "raise limits.deadline, or see in omni top what keeps the device busy",
    Reason.DRAINING: "send it again when it is back",
    Reason.SUSPENDED: "remove `suspend: true` from its manifest",
    Reason.WITHOUT_EFFECT: "start the agent again, or take back what has no effect",
    Reason.STATE_DIR_IN_USE: "stop the other one, or give this one its own --state-dir",
    Reason.INTERNAL: "report it with the last lines of the agent's log",
}


def advised(reason: str, problem: str, cure: str | None = None) -> str:
    """What is wrong and what to do about it, in one sentence.

    Args:
        reason: a `Reason`, or a word that has no cure.
        problem: as of `OmniError`.
        cure: as of `OmniError`; the usual one of the reason when it is None.
    """
    cure = CURES.get(reason, "") if cure is None else cure
    return f"{problem.rstrip(' .')}; {cure}" if cure else problem


class OmniError(Exception):
    """An error a person can act on.

    Args:
        subject: the object, as `OmniModel default/smollm2`, or a file or option.
        problem: what is wrong, in one sentence without a full stop.
        cure: what to do about it, in one sentence without a full stop; empty when nothing can be done.
        reason: the machine-readable reason.
    """

    reason: Reason = Reason.INTERNAL

    def __init__(self, subject: str, problem: str, cure: str = "", *, reason: Reason | None = None) -> None:
        self.subject = subject
        self.problem = problem
        self.cure = cure
        if reason is not None:
            self.reason = reason
        super().__init__(subject, problem, cure)

    def __str__(self) -> str:
        text = f"{self.subject}: {self.problem}" if self.subject else self.problem
        return f"{text}; {self.cure}" if self.cure else text

    @property
    def advice(self) -> str:
        """What is wrong and what to do about it, for places that show the object themselves."""
        return advised(self.reason, self.problem, self.cure or None)


class ManifestError(OmniError):
    """A manifest that cannot be accepted, with the place in the file where known."""

    reason = Reason.INVALID_MANIFEST

    def __init__(
        self,
        subject: str,
        problem: str,
        cure: str = "",
        *,
        field: str = "",
        file: str = "",
        line: int = 0,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(subject, problem, cure, reason=reason)
        self.field = field
        self.file = file
        self.line = line

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        field = f" {self.field}:" if self.field else ""
        text = f"{place}{self.subject}:{field} {self.problem}"
        return f"{text}; {self.cure}" if self.cure else text


class ImageError(OmniError):
    """A weights image, or a source of one, that is damaged or hostile."""

    reason = Reason.BAD_ARTIFACT


class SourceError(OmniError):
    """A source that does not exist or has other contents than the manifest says."""

    reason = Reason.SOURCE_NOT_FOUND


class LedgerError(OmniError):
    """Bytes that are not there, or were given back by someone who does not hold them."""

    reason = Reason.OUT_OF_MEMORY


class IsolationError(OmniError):
    """The machine cannot give the isolation that the pool asks for."""

    reason = Reason.ISOLATION_UNAVAILABLE


class ProcessError(OmniError):
    """A model's process that could not start, died, or did not answer."""

    reason = Reason.CRASHED


class DispatchError(OmniError):
    """A request that gets no answer from a model; `status` is the HTTP status that says so.

    Args:
        retry_after_seconds: when it makes sense to try again; None when it does not.
    """

    def __init__(
        self,
        subject: str,
        problem: str,
        cure: str = "",
        *,
        reason: Reason,
        status: int,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(subject, problem, cure, reason=reason)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


def lost(device: str, problem: str) -> OmniError:
    """What is said of a device that can do nothing any more."""
    return OmniError(f"device {device}", problem, CURES[Reason.DEVICE_LOST], reason=Reason.DEVICE_LOST)
