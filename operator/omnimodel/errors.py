"""The one error hierarchy: what is wrong, with which object, and what to do about it."""

from __future__ import annotations

import re
from enum import StrEnum


class Reason(StrEnum):
    """Why something is as it is: the `reason` of conditions, events, residency entries and errors.

    docs/troubleshooting.md has a cure for each.
    """

    INVALID_MANIFEST = "InvalidManifest"
    NAME_TAKEN = "NameTaken"
    POOL_NOT_FOUND = "PoolNotFound"
    TOO_LARGE = "TooLarge"
    OVER_COMMIT_LIMIT = "OverCommitLimit"
    SHARES_WITH_KEPT = "SharesWithKept"
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
    CRASHED = "Crashed"
    LOAD_TIMEOUT = "LoadTimeout"
    EVICT_TIMEOUT = "EvictTimeout"
    PROBE_FAILED = "ProbeFailed"
    ISOLATION_UNAVAILABLE = "IsolationUnavailable"
    MODEL_NOT_FOUND = "ModelNotFound"
    QUEUE_FULL = "QueueFull"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DRAINING = "Draining"
    SUSPENDED = "Suspended"
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
