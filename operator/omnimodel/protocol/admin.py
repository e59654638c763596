"""What the command line asks of a running system. HTTP under `/apis/omnimodel.io/v1alpha1` and `/omni/v1`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

OBJECTS_PATH = "/apis/omnimodel.io/v1alpha1"  # + /omnimodels | /omnipools | /omniprocesses [/{namespace}/{name}]
ADMIN_PATH = "/omni/v1"  # + /models/{namespace}/{name}/wake | evict | logs, /events, /prune


@dataclass(frozen=True)
class Event:
    """Something that happened to an object, for a person to read.

    Args:
        time_seconds: Unix time.
        kind, namespace, name: the object.
        type: `Normal` or `Warning`.
        reason: one CamelCase word, such as `Woken`.
        message: one sentence.
    """

    time_seconds: float
    kind: str
    namespace: str
    name: str
    type: str
    reason: str
    message: str


class Admin(Protocol):
    """The running system, as `omni get`, `wake`, `logs` and the rest see it."""

    def objects(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Whole objects (`metadata`, `spec`, `status`) of kind `OmniModel`, `OmniPool` or `OmniProcess`."""

    async def wake(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Make a model resident and wait for it: `{"tier": …, "wakeSeconds": …}`.

        Raises:
            DispatchError: it could not be woken.
        """

    async def evict(self, namespace: str, name: str, deadline_seconds: float) -> Mapping[str, Any]:
        """Drain a model and free its device bytes: `{"tier": …, "evictSeconds": …}`.

        Raises:
            DispatchError: it is kept resident, or did not drain in time.
        """

    async def prune(self, *, dry_run: bool) -> Mapping[str, Any]:
        """Remove images, sources and environments that no model needs; with `dry_run`, only say what would go.

        Returns:
            `bytes` and `removed`, a list of `kind`, `name`, `what`, `bytes`, `lastUsedSeconds` (Unix time), and `pod`
            where there are several; `unreached` has the pods that did not answer.
        """

    def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """What the model's process printed: the last `tail` lines, then, with `follow`, what comes."""

    def events(self, *, follow: bool) -> AsyncIterator[Event]:
        """What happened, oldest first, then, with `follow`, what comes."""

    def status_lines(self) -> Mapping[str, Any]:
        """State of the whole, for `omni top` and the live table: `errors` of manifests, `activity` with progress."""
