"""What the agent says to one model process, and what the process answers.

Every command has an `id` that its `Reply` repeats, and the `generation` and `instance` it is meant for: a process
refuses a command that is meant for another, so that a late one cannot hit a successor.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from omnimodel.errors import OmniError, Reason


@dataclass(frozen=True)
class Start:
    """Build the model without weights and serve; answered when the process is bound and can be woken (warm).

    Values of the reply: `workingBytes`, the memory it will come to need beyond its weights and what a first short
    answer takes; 0 when the engine does not know.

    Descriptors: the listening UNIX socket to serve HTTP on; then, where copies go on behind a wake, the page of the
    fence that says how far they are. The spec is the rendered process spec as JSON.

    Args:
        image: folder of the published image as the process sees it (index.json, assets/); for a foreign engine, which
            keeps its weights itself, the file or folder of its source.
        image_bytes: bytes of the image, which is what the process reserves addresses for.
        frame_bytes: size of one frame.
        device: `host` or `cuda:0`.
        threads: how many threads one forward pass may use.
    """

    spec: dict[str, Any]
    image: str
    image_bytes: int
    frame_bytes: int
    device: str
    threads: int
    op: Literal["start"] = "start"


@dataclass(frozen=True)
class Publish:
    """Load the model the ordinary way from its source, once, and write its image; answered when it is written.

    The process then ends. `source` and `output` are folders as the process sees them: `source` read-only, `output`
    its only writable place. Values of the reply: `weightsBytes`, `tensors`, `seconds`.

    Args:
        packed_frame_bytes: pack the image for frames of that size, if it is worth it; 0: store it as it is.
    """

    spec: dict[str, Any]
    source: str
    output: str
    dtype: str
    threads: int
    packed_frame_bytes: int = 0
    op: Literal["publish"] = "publish"


@dataclass(frozen=True)
class Build:
    """Run `uv` with these arguments, each line it says is a `Progress` of its own; answered when it has ended.

    The process then ends. Values of the reply: `code`, uv's exit status.
    """

    arguments: list[str]
    op: Literal["build"] = "build"


@dataclass(frozen=True)
class Wake:
    """Map these frames, in order, over the model's address range. Descriptors: one read-only descriptor a frame.

    For a foreign engine there are no frames: start its server, or wake one that sleeps. Values: `mapSeconds`;
    `restarted`, why a server that slept had to be started anew.

    Args:
        frames: their ids.
        fence_base: what the fence says when nothing of the image has arrived; None when all of it has.
        working_bytes: device memory that the process may have beside them; 0 where that is host memory.
    """

    frames: list[int]
    fence_base: int | None = None
    working_bytes: int = 0
    op: Literal["wake"] = "wake"


@dataclass(frozen=True)
class Evict:
    """Fence, unmap, close the descriptors, then answer.

    Values: `frozen` (requests that will go on after a wake), and tokens as of a `Ping`.

    For a foreign engine: stop its server, or with `sleep` have it let go of the device. Values: `asleep`, whether it
    says that it did; else it is stopped.

    Args:
        freeze: requests in flight stop between two tokens and go on after the next wake; otherwise there are none.
        trim: give working memory back to the system as well.
        sleep: a server that can sleep is not stopped.
    """

    freeze: bool = False
    trim: bool = True
    sleep: bool = False
    op: Literal["evict"] = "evict"


@dataclass(frozen=True)
class Ping:
    """Answered at once from the control thread.

    Values: `inFlight`, and `abandoned`, whether it computes for somebody who no longer waits; where tokens are counted,
    `promptTokens` and `generatedTokens` since the process began.
    """

    op: Literal["ping"] = "ping"


@dataclass(frozen=True)
class Stop:
    """Finish requests in flight for at most `grace_seconds`, then end."""

    grace_seconds: float
    op: Literal["stop"] = "stop"


@dataclass(frozen=True)
class Settle:
    """Answered when the commands before it have been carried out: another agent wants to know what they came to.

    Values: `tier`, `warm` or `resident`; empty when one of them failed half-way; and tokens as of a `Ping`.
    """

    op: Literal["settle"] = "settle"


SLEEP_SECONDS = 60.0  # that a server has for falling asleep, and for waking up

_MESSAGE_CHARACTERS, _DETAIL_CHARACTERS = 2000, 8000  # of a failure: a packet holds 160 KiB, a character up to 12 bytes

Command = Start | Publish | Build | Wake | Evict | Ping | Stop | Settle
_COMMANDS: dict[str, type[Any]] = {
    "start": Start,
    "publish": Publish,
    "build": Build,
    "wake": Wake,
    "evict": Evict,
    "ping": Ping,
    "stop": Stop,
    "settle": Settle,
}


@dataclass(frozen=True)
class Envelope:
    """A command with its addressee.

    Args:
        id: grows by one with each command on a channel.
        generation: metadata.generation of the OmniModel the process was rendered from.
        instance: identity of the process, made by the agent at its fork.
    """

    id: int
    generation: int
    instance: str
    command: Command

    def to_message(self) -> dict[str, Any]:
        """The envelope as a JSON object."""
        return {
            "id": self.id,
            "generation": self.generation,
            "instance": self.instance,
            "command": asdict(self.command),
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Envelope:
        """Read an envelope.

        Raises:
            OmniError: it is no command this process knows.
        """
        body = dict(message["command"])
        kind = _COMMANDS.get(body.get("op", ""))
        if kind is None:
            raise OmniError(
                "control channel", f"unknown command {body.get('op')!r}", "run agent and runtime of one version"
            )
        return cls(message["id"], message["generation"], message["instance"], kind(**body))


@dataclass(frozen=True)
class Reply:
    """The answer to one command.

    Args:
        id: of the command.
        ok: whether it was done.
        reason, message, detail: when not: a `Reason`, one sentence, and the last lines of a traceback or log.
        seconds: how long it took inside the process.
        values: see the command.
    """

    id: int
    ok: bool
    seconds: float = 0.0
    reason: str = ""
    message: str = ""
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """A whole number of `values`; 0 when there is none, or what is there is none."""
        value = self.values.get(name)
        return value if type(value) is int and value > 0 else 0

    @classmethod
    def failed(cls, id: int, error: BaseException, detail: str = "") -> Reply:
        """The reply that says why a command was not done."""
        reason = error.reason if isinstance(error, OmniError) else Reason.HANDLER_FAILED
        text = str(error) if isinstance(error, OmniError) else f"{type(error).__name__}: {error}"
        shown = text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}…"
        return cls(id, ok=False, reason=str(reason), message=shown, detail=detail[-_DETAIL_CHARACTERS:])


@dataclass(frozen=True)
class Progress:
    """Sent unasked while a long command runs: what it does, and how far it is (`total` 0 when unknown)."""

    stage: str
    done: int
    total: int


def encode(message: Reply | Progress) -> dict[str, Any]:
    """A message of the process as a JSON object."""
    return {"kind": "reply" if isinstance(message, Reply) else "progress", **asdict(message)}


_TEXT_CHARACTERS = 64 << 10  # of one field: a message is longer only if it is hostile
_LARGEST = 1 << 62  # of a number: bytes, counts
_FIELDS: dict[type[Any], dict[str, type[Any]]] = {
    Reply: {
        "id": int, "ok": bool, "seconds": float, "reason": str, "message": str, "detail": str, "values": dict,
    },
    Progress: {"stage": str, "done": int, "total": int},
}  # fmt: skip
_VALUES: dict[str, type[Any]] = {
    "workingBytes": int,
    "weightsBytes": int,
    "tensors": int,
    "code": int,
    "mapSeconds": float,
    "seconds": float,
    "frozen": int,
    "inFlight": int,
    "abandoned": bool,
    "promptTokens": int,
    "generatedTokens": int,
    "tier": str,
    "asleep": bool,
    "restarted": str,
}


def decode(message: dict[str, Any]) -> Reply | Progress:
    """Read a message of the process. It runs a stranger's code, so that nothing of it is taken on trust.

    Raises:
        OmniError: it is no message of a process, or a field has another type than it must have, or no sense.
    """
    body = dict(message)
    kinds: dict[Any, type[Reply | Progress]] = {"reply": Reply, "progress": Progress}
    kind = body.pop("kind", None)
    made = kinds.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise OmniError("control channel", "what came is neither a reply nor progress")
    fields = _FIELDS[made]
    if unknown := sorted(set(body) - set(fields)):
        raise OmniError("control channel", f"a {kind} has a field {unknown[0]!r:.100} that nobody knows")
    for name, value in body.items():
        _check(f"{kind} field {name}", value, fields[name])
    for name, value in body.get("values", {}).items():
        if name in _VALUES:
            _check(f"value {name}", value, _VALUES[name])
    try:
        return made(**body)
    except TypeError:
        raise OmniError("control channel", f"a {kind} has too few fields") from None


def _check(what: str, value: Any, wanted: type[Any]) -> None:
    """Raise unless a value has its type (a float may be whole, a bool is no number) and sense."""
    fits = isinstance(value, (int, float) if wanted is float else wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        raise OmniError("control channel", f"the {what} is no {_TYPES[wanted]}")
    if isinstance(value, int | float) and not 0 <= value < _LARGEST:
        raise OmniError("control channel", f"the {what} is out of range")
    if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
        raise OmniError("control channel", f"the {what} has {len(value)} characters")


_TYPES: dict[type[Any], str] = {int: "whole number", float: "number", bool: "truth value", str: "text", dict: "object"}
