"""Foreign engines: HTTP servers of others, run inside the model's sandbox, whose weights are their own memory.

A wake starts the server and waits until it is healthy, an evict stops it. In between, every connection to the
model's UNIX socket is one to the server, byte for byte. Only of an engine whose server passes over what it does not
know is each request looked at first, and where its server lacks a form of answer, that is made here.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from omnimodel.errors import OmniError, ProcessError, Reason
from omnimodel.runtime.application import BACKLOG
from omnimodel.runtime.engines.listeners import listens_for
from omnimodel.runtime.requests import NOT_RESIDENT, RequestError

if TYPE_CHECKING:
    from aiohttp import web

    from omnimodel.runtime.engines import Setting

log = logging.getLogger(__name__)

_LOAD_SECONDS = 300.0
_TERMINATE_SECONDS = 10.0
_TERMINATE_AT_MOST_SECONDS = 20.0
_POLL_SECONDS = (0.02, 0.25)
_REAP_SECONDS = 2.0
_CHUNK_BYTES = 256 << 10
_LINGER_SECONDS = 2.0
_HEAD_END = b"\r\n\r\n"
_CLOSE = b"Connection: close"

Translation = Callable[[bytes], bytes]  # of the body of an answer
Check = Callable[[str, bytes], Translation | None]


class ForeignEngine:
    """A server that is started and stopped; see `engines.Engine`.

    Args:
        setting: of the process.
        argv: the command line, made for an address to listen on.
        health_path: what answers 2xx when the server is ready; empty when accepting a connection is enough.
        ended: called with the exit status when the server ends without being told to.
        check: called with path and body of a request, raises RequestError for what the server would pass over or must
            not be asked, and says how the client wants an answer that the server gives otherwise; None for a server
            that answers for itself.
        env: variables of the server, beside those of this process.
    """

    def __init__(
        self,
        setting: Setting,
        argv: Callable[[int], Sequence[str]],
        health_path: str,
        ended: Callable[[int], None],
        check: Check | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._setting = setting
        self._argv = argv
        self._health_path = health_path
        self._ended = ended
        self._check = check
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._stopping = False
        self._accepting = False
        self._port = 0
        self._unix = False
        self.connections = 0

    @property
    def abandoned(self) -> bool:
        """Unknown: the server sees its clients leave, and does what it does."""
        return False

    @property
    def tokens(self) -> dict[str, int]:
        """Not counted: the server has metrics of its own."""
        return {}

    def start(self) -> None:
        """Nothing is loaded before the first wake."""

    def routes(self) -> list[web.RouteDef]:
        """None: the server answers."""
        return []

    def working_bytes(self) -> int:
        """Unknown: the server's memory is its own affair."""
        return 0

    # Command thread

    def wake(self, descriptors: list[int], fence_base: int | None = None) -> Mapping[str, Any]:  # noqa: ARG002
        """Start the server and wait until it is healthy.

        Raises:
            ProcessError: it ended, or was not healthy in time.
        """
        for descriptor in descriptors:
            os.close(descriptor)
        if self._process is not None:
            return {}
        began = time.monotonic()
        self._port = free_port()
        argv = list(self._argv(self._port))
        self._unix = any(socket_path() in part for part in argv)
        with suppress(FileNotFoundError):
            os.unlink(socket_path())
        self._stopping = False
        self._watcher = None
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, env={**_environment(), **self._env}, start_new_session=True
            )
        except OSError as error:
            raise ProcessError(
                self._setting.subject,
                f"its engine {argv[0]} cannot be started: {error.strerror}",
                "correct runtime.command or runtime.environment",
                reason=Reason.HANDLER_FAILED,
            ) from error
        self._process = process
        try:
            self._wait_until_healthy(process, began)
        except BaseException:
            self._terminate()
            raise
        self._accepting = True
        self._watcher = threading.Thread(target=self._watch, args=(process,), name="engine", daemon=True)
        self._watcher.start()
        seconds = time.monotonic() - began
        log.info("engine started model=%s seconds=%.3f", self._setting.name, seconds)
        return {"mapSeconds": seconds}

    def evict(self, *, trim: bool) -> int:  # noqa: ARG002 a stopped engine holds nothing
        """Stop the server; it has ended when this returns."""
        self._terminate()
        return 0

    def stop(self) -> None:
        """Stop the server."""
        self._terminate()

    def _wait_until_healthy(self, process: subprocess.Popen[bytes], began: float) -> None:
        limits = self._setting.spec.get("limits") or {}
        deadline = began + float(limits.get("loadDeadlineSeconds") or _LOAD_SECONDS)
        pause_seconds = _POLL_SECONDS[0]
        while True:
            status = process.poll()
            if status is not None:
                raise ProcessError(self._setting.subject, f"its engine ended while it started ({_status(status)})")
            if self._healthy(process):
                return
            if time.monotonic() > deadline:
                raise ProcessError(
                    self._setting.subject,
                    f"its engine was not healthy after {time.monotonic() - began:.0f} s",
                    "raise limits.loadDeadline, or correct healthPath",
                    reason=Reason.LOAD_TIMEOUT,
                )
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, _POLL_SECONDS[1])

    def _healthy(self, process: subprocess.Popen[bytes]) -> bool:
        try:
            with self._connect(process) as connection:
                if not self._health_path:
                    return True
                client = http.client.HTTPConnection("127.0.0.1")
                client.sock = connection
                client.request("GET", self._health_path)
                return 200 <= client.getresponse().status < 300
        except (OSError, http.client.HTTPException):
            return False

    def _connect(self, process: subprocess.Popen[bytes]) -> socket.socket:
        """A connection to the server, and to no other.

        Raises:
            OSError: nobody listens.
            ProcessError: somebody else does.
        """
        if self._unix:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(5.0)
            connection.connect(socket_path())
            return connection
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=5.0)
        if not listens_for(self._port, process.pid):
            connection.close()
            raise ProcessError(self._setting.subject, f"another process listens on its engine's port {self._port}")
        return connection

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if process is self._process and not self._stopping:
            log.error("engine ended model=%s status=%s", self._setting.name, _status(status))
            self._ended(status)

    def _terminate(self) -> None:
        self._accepting = False
        process, self._process = self._process, None
        if process is None:
            return
        self._stopping = True
        limits = self._setting.spec.get("limits") or {}
        seconds_to_end = min(float(limits.get("drainSeconds") or _TERMINATE_SECONDS), _TERMINATE_AT_MOST_SECONDS)
        for number, seconds in ((signal.SIGTERM, seconds_to_end), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            if self._ends(process, seconds):
                break
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what the server left behind
        _reap(process.pid)

    def _ends(self, process: subprocess.Popen[bytes], seconds: float | None) -> bool:
        """Wait for its end; by the watcher, if there is one: a timed `Popen.wait` only looks now and then."""
        watcher = self._watcher
        if watcher is not None:
            watcher.join(seconds)
            return not watcher.is_alive()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode is not None

    # Event loop

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Take connections from the model's socket."""
        return await asyncio.start_unix_server(self._serve, sock=listener, backlog=BACKLOG)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            try:
                await _splice(reader, writer, *await self._engine(reader))
            except RequestError as error:
                await _refuse(reader, writer, error)
        except asyncio.IncompleteReadError:
            pass  # the client left before it had asked
        finally:
            self.connections -= 1
            writer.close()

    async def _engine(
        self, reader: asyncio.StreamReader
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Translation | None]:
        """A connection to the server, which has what had to be read to look at it, and what becomes of its answer.

        Raises:
            RequestError: the server does not run, or it would pass over something.
        """
        try:
            if not self._accepting:
                raise ConnectionRefusedError
            request, translation = (b"", None) if self._check is None else await _looked_at(reader, self._check)
            engine_reader, engine_writer = await (
                asyncio.open_unix_connection(socket_path())
                if self._unix
                else asyncio.open_connection("127.0.0.1", self._port)
            )
        except OSError as error:
            raise RequestError(f"{self._setting.subject} is not resident", code=NOT_RESIDENT, status=503) from error
        engine_writer.write(request)
        return engine_reader, engine_writer, translation


async def _looked_at(reader: asyncio.StreamReader, check: Check) -> tuple[bytes, Translation | None]:
    """The first request of a connection, made its last one: the next would pass unseen; and what `check` says of it.

    Raises:
        RequestError: `check` refuses it, or nobody could look at it.
        IncompleteReadError: the client left.
    """
    try:
        head = await reader.readuntil(_HEAD_END)
    except asyncio.LimitOverrunError as error:
        raise RequestError("The head of the request is too long", status=431) from error
    asked, *fields = head.removesuffix(_HEAD_END).split(b"\r\n")
    values = {name.strip().lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
    if b"transfer-encoding" in values:
        raise RequestError("The body has no Content-Length", status=411)
    body = await reader.readexactly(int(values.get(b"content-length", 0)))
    translation = check(unquote(urlsplit(asked.split(b" ")[1].decode("latin-1")).path), body)
    kept = [field for field in fields if not field.lower().startswith(b"connection:")]
    return b"\r\n".join((asked, *kept, _CLOSE)) + _HEAD_END + body, translation


async def _splice(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    engine_reader: asyncio.StreamReader,
    engine_writer: asyncio.StreamWriter,
    translation: Translation | None,
) -> None:
    """Carry bytes both ways until one side ends: a client that leaves is one that the engine sees leave."""
    ways = {
        asyncio.create_task(_carry(reader, engine_writer)),
        asyncio.create_task(
            _carry(engine_reader, writer) if translation is None else _translate(engine_reader, writer, translation)
        ),
    }
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        engine_writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()


async def _translate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, translation: Translation) -> None:
    """Carry the one answer of a connection, translated if it is a whole answer to a request that succeeded."""
    with suppress(OSError):
        answer = await reader.read()
        head, _, body = answer.partition(_HEAD_END)
        status, *fields = head.split(b"\r\n")
        length = b"content-length: %d"
        if b" 200 " in status and length % len(body) in (field.lower() for field in fields):
            body = translation(body)
            kept = [field for field in fields if not field.lower().startswith(b"content-length:")]
            answer = b"\r\n".join((status, *kept, length % len(body))) + _HEAD_END + body
        writer.write(answer)
        await writer.drain()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: RequestError) -> None:
    """Answer with an error, and take what the client is still sending, so that it reads the answer."""
    body = json.dumps(error.body()).encode()
    status = f"{error.status} {HTTPStatus(error.status).phrase}".encode()
    fields = (b"Content-Type: application/json", b"Content-Length: %d" % len(body), _CLOSE)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            writer.write(b"\r\n".join((b"HTTP/1.1 " + status, *fields)) + _HEAD_END + body)
            await writer.drain()
            writer.write_eof()
            while await reader.read(_CHUNK_BYTES):
                pass


def _reap(group: int) -> None:
    """Wait for what is left of a killed process group, as far as it is this process's own by now."""
    deadline = time.monotonic() + _REAP_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                time.sleep(_POLL_SECONDS[0])


def socket_path() -> str:
    """Where a server that listens on a UNIX socket has it; the sandbox gives every process a /tmp of its own."""
    return os.path.join(os.environ.get("TMPDIR", "/tmp"), "engine.sock")  # noqa: S108


def free_port() -> int:
    """A TCP port of this network namespace that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def source_path(setting: Setting) -> str:
    """Where the model's source is inside the sandbox.

    Raises:
        OmniError: the spec does not say.
    """
    if str(setting.folder) not in ("", "."):
        return str(setting.folder)
    for mount in setting.spec.get("mounts") or ():
        if mount.get("source") is True:
            return str(mount["path"])
    raise OmniError(
        setting.subject, "its source is not mounted", "add a mount with source: true", reason=Reason.SOURCE_NOT_FOUND
    )


def _environment() -> dict[str, str]:
    """This process's environment; Python engines find the packages that this process finds."""
    import sys

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def check_command(setting: Setting, argv: Sequence[str]) -> None:
    """Raise when a command line is empty.

    Raises:
        OmniError: it is.
    """
    if not argv or not all(isinstance(part, str) for part in argv):
        raise OmniError(
            setting.subject,
            "runtime.command is empty",
            'write a list of words, "{port}" among them',
            reason=Reason.INVALID_MANIFEST,
        )
