"""multipart/form-data bodies: the model's name is found, and rewritten, while the upload passes through."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from enum import Enum
from typing import Any

from omnimodel.gateway.bodies import Lease, too_large
from omnimodel.gateway.refusals import RequestError

PART_HEADER_BYTES = 16 << 10
MODEL_FIELD_BYTES = 4 << 10


@dataclass(frozen=True)
class Raw:
    """Bytes that pass as they are."""

    data: bytes


@dataclass(frozen=True)
class ModelField:
    """The value of the field `model`, in the place where it stood."""

    value: bytes


@dataclass(frozen=True)
class End:
    """The closing delimiter, and what follows it."""

    data: bytes


class _State(Enum):
    PREAMBLE = "preamble"
    DELIMITED = "delimited"
    HEADERS = "headers"
    CONTENT = "content"
    MODEL = "model"
    EPILOGUE = "epilogue"


class FormScanner:
    """Finds the parts of a form while its bytes pass by; nothing but the value of `model` is kept.

    Args:
        boundary: as the Content-Type has it.
    """

    def __init__(self, boundary: bytes) -> None:
        self.boundary = boundary
        self.names: set[str] = set()
        self._delimiter = b"\r\n--" + boundary
        self._rest = b"\r\n"  # so that the first delimiter looks like all others; taken away again when it is found
        self._state = _State.PREAMBLE
        self._pending = b""  # a delimiter whose meaning the next two bytes decide

    @property
    def ended(self) -> bool:
        """Whether the closing delimiter was seen."""
        return self._state is _State.EPILOGUE

    def feed(self, data: bytes) -> Iterator[Raw | ModelField | End]:
        """Take the next bytes, and give what is settled by them.

        Raises:
            RequestError: it is no form.
        """
        self._rest += data
        while (step := self._step()) is not None:
            yield from step

    def _step(self) -> tuple[Raw | ModelField | End, ...] | None:
        """One piece of what is there, or None when more is needed."""
        if self._state is _State.DELIMITED:
            return self._after_delimiter()
        if self._state is _State.HEADERS:
            return self._headers()
        if self._state is _State.EPILOGUE:
            data, self._rest = self._rest, b""
            return (Raw(data),) if data else None
        at = self._rest.find(self._delimiter)
        if self._state is _State.MODEL:
            return self._model(at)
        first = self._state is _State.PREAMBLE
        if at < 0:
            if first and len(self._rest) > PART_HEADER_BYTES:
                raise _no_form(f'its first {PART_HEADER_BYTES} bytes do not have the boundary "{_text(self.boundary)}"')
            keep = len(self._rest) if first else min(len(self._rest), len(self._delimiter) - 1)
            data, self._rest = self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
            return (Raw(data),) if data else None
        after = at + len(self._delimiter)
        data = self._rest[2:after] if first else self._rest[:at]
        self._rest = self._rest[after:]
        self._state = _State.DELIMITED
        self._pending = b"" if first else self._delimiter
        return (Raw(data),) if data else ()

    def _after_delimiter(self) -> tuple[Raw | ModelField | End, ...] | None:
        """A delimiter is held back until it is known whether it is the closing one."""
        if len(self._rest) < 2:
            return None
        mark, self._rest = self._rest[:2], self._rest[2:]
        if mark == b"--":
            if not self.names:
                raise _no_form("it has no parts")
            self._state = _State.EPILOGUE
            return (End(self._pending + mark),)
        if mark != b"\r\n":
            raise _no_form("a boundary is not followed by a line break")
        self._state = _State.HEADERS
        return (Raw(self._pending + mark),)

    def _headers(self) -> tuple[Raw | ModelField | End, ...] | None:
        at = self._rest.find(b"\r\n\r\n")
        if at < 0:
            if len(self._rest) > PART_HEADER_BYTES:
                raise _no_form("the headers of a part do not end")
            return None
        head, self._rest = self._rest[: at + 4], self._rest[at + 4 :]
        name, filename = _disposition(head)
        self.names.add(name)
        self._state = _State.MODEL if name == "model" and filename is None else _State.CONTENT
        return (Raw(head),)

    def _model(self, at: int) -> tuple[Raw | ModelField | End, ...] | None:
        if (len(self._rest) if at < 0 else at) > MODEL_FIELD_BYTES:
            raise RequestError("the field model is too long", "send the name of a model", param="model")
        if at < 0:
            return None
        value, self._rest = self._rest[:at], self._rest[at + len(self._delimiter) :]
        self._state, self._pending = _State.DELIMITED, self._delimiter
        return (ModelField(value),)


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names.

    Raises:
        RequestError: it is no multipart form.
    """
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise RequestError(
            f'the Content-Type is "{content_type}"',
            "send multipart/form-data with a boundary, and a file in the field file",
            code="invalid_content_type",
        )
    return boundary.encode()


def _disposition(head: bytes) -> tuple[str, str | None]:
    """(name, filename) of a part."""
    for line in head.split(b"\r\n"):
        label, _, value = line.partition(b":")
        if label.strip().lower() == b"content-disposition":
            message = Message()
            message["Content-Disposition"] = _text(value.strip())
            name = message.get_param("name", header="Content-Disposition")
            filename = message.get_filename()
            if isinstance(name, str):
                return name, filename
    raise _no_form("a part has no name")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _no_form(problem: str) -> RequestError:
    return RequestError(
        f"the body is no multipart form: {problem}", "send it as multipart/form-data", code="invalid_form"
    )


class FormUpload:
    """A form on its way to a model: `model_name` first, then `chunks` once, with the model's own name in it.

    Args:
        scanner: for its boundary.
        chunks: the body as the client sends it.
        lease: counts what has to be kept until the model is known.
        length: of the client's body in bytes, when known.

    `limit_bytes` may be set when the model is known; `error` is what was wrong with the body, once it was read.
    """

    def __init__(self, scanner: FormScanner, chunks: AsyncIterator[bytes], lease: Lease, length: int | None) -> None:
        self.error: RequestError | None = None
        self.limit_bytes: int | None = None
        self._total_bytes = 0
        self._scanner = scanner
        self._chunks = chunks
        self._lease = lease
        self._length = length
        self._kept: list[Raw | ModelField | End] = []
        self._given = b""

    async def model_name(self, fallback: str | None) -> str:
        """Read until the model is known: from its field, or at the end of the form from the query.

        Raises:
            RequestError: it is no form, or names no model.
        """
        async for chunk in self._chunks:
            self._lease.take(len(chunk))
            self._total_bytes += len(chunk)
            pieces = list(self._scanner.feed(chunk))
            self._kept += pieces
            for piece in pieces:
                if isinstance(piece, ModelField):
                    self._given = piece.value
                    return _text(piece.value).strip()
        if not self._scanner.ended:
            raise _no_form("it ends in the middle of a part")
        if fallback is None:
            raise RequestError("the form has no field model", "add it", code="model_missing", param="model")
        return fallback

    def rewritten_length(self, name: str, defaults: Mapping[str, Any]) -> int | None:
        """Bytes of what `chunks` will give; None when that cannot be known yet."""
        if self._length is None or defaults or "model" not in self._scanner.names:
            return None
        return self._length - len(self._given) + len(name.encode())

    async def chunks(self, name: str, defaults: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The form for the model: its own name in the field `model`, and the fields an alias adds at the end.

        Raises:
            RequestError: the rest of the body is no form, or too large; `error` has it as well, because whoever reads
                this may wrap what it raises.
        """
        try:
            found = False
            async for piece in self._pieces():
                if isinstance(piece, ModelField) and found:
                    raise RequestError("the form has the field model twice", "send it once", param="model")
                found = found or isinstance(piece, ModelField)
                yield self._rewrite(piece, name, defaults)
            if not self._scanner.ended:
                raise _no_form("it ends in the middle of a part")
        except RequestError as error:
            self.error = error
            raise

    async def _pieces(self) -> AsyncIterator[Raw | ModelField | End]:
        kept, self._kept = deque(self._kept), []
        while kept:
            yield kept.popleft()
        self._check_limit()
        async for chunk in self._chunks:
            self._total_bytes += len(chunk)
            self._check_limit()
            for piece in self._scanner.feed(chunk):
                yield piece

    def _check_limit(self) -> None:
        if self.limit_bytes is not None and self._total_bytes > self.limit_bytes:
            raise too_large(None, self.limit_bytes)

    def _rewrite(self, piece: Raw | ModelField | End, name: str, defaults: Mapping[str, Any]) -> bytes:
        if isinstance(piece, ModelField):
            return name.encode()
        if isinstance(piece, Raw):
            return piece.data
        missing = {field: value for field, value in defaults.items() if field not in self._scanner.names}
        if "model" not in self._scanner.names:
            missing["model"] = name
        added = b"".join(_part(self._scanner.boundary, field, value) for field, value in missing.items())
        return added + piece.data


def _part(boundary: bytes, field: str, value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    quoted = field.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
    head = f'Content-Disposition: form-data; name="{quoted}"\r\n\r\n{text}'
    return b"\r\n--" + boundary + b"\r\n" + head.encode()
