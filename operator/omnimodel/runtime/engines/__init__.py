"""What serves a model. Own engines (`python`, `transformers`) keep their weights in frames; foreign ones keep theirs.

An engine belongs to one process and is driven by `serve`: it is started once, then woken and evicted any number of
times. All calls but the routes' come from the command thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omnimodel.errors import OmniError, Reason

if TYPE_CHECKING:
    from aiohttp import web

    from omnimodel.protocol.process import Publish, Start

TEXT_GENERATION = "text-generation"


@dataclass(frozen=True)
class Setting:
    """What an engine is made with.

    Args:
        spec: the process spec.
        folder: of the published image, as the process sees it; for a foreign engine of nothing.
        image_bytes, frame_bytes, device: of the window.
        threads: of one forward pass; 0 leaves it to the library.
        fence: descriptor of what says how far a copy is; None where a wake begins when it is over.
    """

    spec: Mapping[str, Any]
    folder: Path
    image_bytes: int
    frame_bytes: int
    device: str
    threads: int
    fence: int | None = None

    @classmethod
    def of(cls, command: Start, fence: int | None = None) -> Setting:
        """The setting that a Start command describes."""
        window = (command.image_bytes, command.frame_bytes, command.device)
        return cls(command.spec, Path(command.image), *window, command.threads, fence)

    @property
    def devices(self) -> int:
        """How many devices the process sees."""
        return int(self.spec.get("devices") or 1)

    @property
    def subject(self) -> str:
        """The model, for messages."""
        return subject_of(self.spec)

    @property
    def name(self) -> str:
        """The model's name in answers: its first served name, or metadata.name."""
        return name_of(self.spec)


class Engine(Protocol):
    """See the module."""

    @property
    def abandoned(self) -> bool:
        """Whether it computes for somebody who no longer waits; read from any thread."""

    @property
    def tokens(self) -> dict[str, int]:
        """`promptTokens` and `generatedTokens` computed so far; empty where nobody counts; read from any thread."""

    def start(self) -> None:
        """Get ready to be woken. Raises OmniError."""

    def routes(self) -> list[web.RouteDef]:
        """What it answers; empty when the engine is a server itself."""

    def working_bytes(self) -> int:
        """Memory it will come to need beyond its weights and what a first short answer takes; 0 when unknown."""

    def wake(self, descriptors: list[int], fence_base: int | None = None) -> Mapping[str, Any]:
        """Map the frames, or start the foreign engine; values of the reply. The descriptors are the engine's now."""

    def evict(self, *, trim: bool) -> int:
        """Fence and unmap, or stop the foreign engine; how many requests are frozen."""

    def stop(self) -> None:
        """End what would outlive the process."""


def subject_of(spec: Mapping[str, Any]) -> str:
    """A model, for messages."""
    model = spec.get("model") or {}
    return f"OmniModel {model.get('namespace', 'default')}/{model.get('name', '?')}"


def name_of(spec: Mapping[str, Any]) -> str:
    """A model's name in answers."""
    for served in spec.get("servedNames") or ():
        return str(served if isinstance(served, str) else served["name"])
    return str((spec.get("model") or {}).get("name", "model"))


def create(setting: Setting, ended: Callable[[int], None]) -> Engine:
    """Make the engine that a spec names.

    Args:
        setting: what it is made with.
        ended: called with an exit status when a foreign engine ends without being told to.

    Raises:
        OmniError: this version has no such engine.
    """
    name = setting.spec.get("engine")
    if name in ("python", "transformers"):
        from omnimodel.runtime.engines.own import OwnEngine

        return OwnEngine(setting)
    if name == "llamacpp":
        from omnimodel.runtime.engines import llamacpp

        return llamacpp.create(setting, ended)
    if name == "vllm":
        from omnimodel.runtime.engines import vllm

        return vllm.create(setting, ended)
    if name == "sglang":
        from omnimodel.runtime.engines import sglang

        return sglang.create(setting, ended)
    if name == "command":
        from omnimodel.runtime.engines import command

        return command.create(setting, ended)
    raise _unknown(setting.spec)


def publish(command: Publish, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Publish a model of an own engine; values of the reply.

    Raises:
        OmniError: the source or the handler is at fault.
    """
    if command.spec.get("engine") not in ("python", "transformers"):
        raise _unknown(command.spec)
    from omnimodel.runtime.engines.own import publish_own

    return publish_own(command, progress)


def _unknown(spec: Mapping[str, Any]) -> OmniError:
    return OmniError(
        subject_of(spec),
        f"the runtime has no engine {spec.get('engine')!r} here",
        "use transformers, python, llamacpp, vllm, sglang or command",
        reason=Reason.HANDLER_FAILED,
    )
