"""The client's side of the administration endpoints, blocking, over the standard library's HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from omnimodel.cli.exits import ConnectionFailed
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.protocol.admin import ADMIN_PATH, OBJECTS_PATH

CONNECT_SECONDS = 10.0
PRUNE_SECONDS = 600.0  # a disk takes its time to let go of hundreds of gigabytes
CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """One running system.

    Args:
        address: its URL, such as `http://127.0.0.1:8080`; the scheme may be left out. `http+unix://PATH/…` is a
            UNIX socket, its path quoted.
        token: of an agent that asks for one.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self._token = token
        self.address = (address if "//" in address else f"http://{address}").rstrip("/")
        parts = urlsplit(self.address)
        if parts.scheme not in {"http", "https", "http+unix"} or not parts.hostname:
            raise OmniError(f"address {address!r}", "it is no HTTP URL", "write it as http://127.0.0.1:8080")
        self._tls = parts.scheme == "https"
        self._socket = unquote(parts.netloc) if parts.scheme == "http+unix" else ""
        self._host = "localhost" if self._socket else parts.hostname
        self._port = None if self._socket else parts.port
        self._prefix = parts.path

    def objects(self, plural: str) -> list[dict[str, Any]]:
        """Whole objects: `omnimodels`, `omnipools` or `omniprocesses`."""
        items = self._json("GET", f"{OBJECTS_PATH}/{plural}").get("items", [])
        return list(items)

    def model(self, namespace: str, name: str) -> dict[str, Any]:
        """One OmniModel.

        Raises:
            DispatchError: there is none of this name (status 404).
        """
        return self._json("GET", f"{OBJECTS_PATH}/omnimodels/{quote(namespace)}/{quote(name)}")

    def wake(self, namespace: str, name: str, deadline_seconds: float) -> dict[str, Any]:
        """Make a model resident: `{"tier": …, "wakeSeconds": …}`."""
        return self._action(namespace, name, "wake", deadline_seconds)

    def evict(self, namespace: str, name: str, deadline_seconds: float) -> dict[str, Any]:
        """Free a model's device memory: `{"tier": …, "evictSeconds": …}`."""
        return self._action(namespace, name, "evict", deadline_seconds)

    def _action(self, namespace: str, name: str, verb: str, deadline_seconds: float) -> dict[str, Any]:
        query = urlencode({"deadlineSeconds": deadline_seconds})
        path = f"{ADMIN_PATH}/models/{quote(namespace)}/{quote(name)}/{verb}?{query}"
        return self._json("POST", path, timeout_seconds=deadline_seconds + CONNECT_SECONDS)

    def prune(self, *, dry_run: bool) -> dict[str, Any]:
        """Remove what no model needs: `{"bytes": …, "removed": […]}`."""
        query = urlencode({"dryRun": _flag(dry_run)})
        return self._json("POST", f"{ADMIN_PATH}/prune?{query}", timeout_seconds=PRUNE_SECONDS)

    def status(self) -> dict[str, Any]:
        """The state of the whole: manifest errors and what is being done."""
        return self._json("GET", f"{ADMIN_PATH}/status")

    def events(self, *, follow: bool) -> Iterator[dict[str, Any]]:
        """What happened, then, with `follow`, what happens."""
        for line in self._lines(f"{ADMIN_PATH}/events?{urlencode({'follow': _flag(follow)})}", follow=follow):
            if line.strip():
                yield json.loads(line)

    def logs(self, namespace: str, name: str, *, tail: int, follow: bool) -> Iterator[bytes]:
        """Lines that a model's process printed, with their line ends."""
        query = urlencode({"tail": tail, "follow": _flag(follow)})
        path = f"{ADMIN_PATH}/models/{quote(namespace)}/{quote(name)}/logs?{query}"
        yield from self._lines(path, follow=follow)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
    ) -> Answer:
        """Send any request and read the whole answer, whatever its status.

        Raises:
            ConnectionFailed: nothing answers at the address.
            OmniError: no answer in time (`DeadlineExceeded`).
        """
        connection = self._connect(timeout_seconds)
        try:
            response = self._send(connection, method, path, body, headers, timeout_seconds)
            return Answer(response.status, dict(response.getheaders()), response.read())
        except TimeoutError as error:
            raise self._late(timeout_seconds) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            connection.close()

    def _json(
        self, method: str, path: str, *, timeout_seconds: float = 30.0, body: bytes | None = None
    ) -> dict[str, Any]:
        answer = self.request(method, path, body, timeout_seconds=timeout_seconds)
        if answer.status >= 400:
            raise _refusal(answer.status, answer.body)
        try:
            return dict(json.loads(answer.body))
        except (ValueError, TypeError) as error:
            raise OmniError(f"system at {self.address}", "its answer is no JSON object", "check the address") from error

    def _lines(self, path: str, *, follow: bool) -> Iterator[bytes]:
        timeout_seconds = 30.0
        connection = self._connect(timeout_seconds)
        try:
            response = self._send(connection, "GET", path, None, None, timeout_seconds)
            if response.status >= 400:
                raise _refusal(response.status, response.read())
            if follow and connection.sock is not None:
                connection.sock.settimeout(None)  # silence is no fault while nothing happens
            rest = b""
            while chunk := response.read1(CHUNK_BYTES):  # readline takes a broken connection for the end
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line + b"\n" for line in lines)
            if rest:
                yield rest
        except TimeoutError as error:
            raise self._late(timeout_seconds) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            connection.close()

    def _connect(self, timeout_seconds: float) -> http.client.HTTPConnection:
        if self._socket:
            return _UnixConnection(self._socket, min(CONNECT_SECONDS, timeout_seconds))
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=min(CONNECT_SECONDS, timeout_seconds))

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        timeout_seconds: float,
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
        except OSError as error:
            raise ConnectionFailed(
                f"system at {self.address}",
                f"nothing answers ({error.strerror or error})",
                "start one with `omni up DIR`, or name another with --address or OMNI_ADDRESS",
            ) from error
        connection.sock.settimeout(timeout_seconds)
        own = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        connection.request(method, self._prefix + path, body=body, headers={**own, **(headers or {})})
        return connection.getresponse()

    def _broken(self, error: Exception) -> ConnectionFailed:
        return ConnectionFailed(
            f"system at {self.address}", f"it broke off ({type(error).__name__})", "look whether it still runs"
        )

    def _late(self, timeout_seconds: float) -> OmniError:
        return OmniError(
            f"system at {self.address}",
            f"no answer within {timeout_seconds:g} s",
            "raise --timeout, or look at `omni top` for what it is doing",
            reason=Reason.DEADLINE_EXCEEDED,
        )


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _refusal(status: int, body: bytes) -> DispatchError:
    """The error of an answer, from its OpenAI-style error object where it has one."""
    message, reason = body.decode(errors="replace").strip(), Reason.INTERNAL
    try:
        answer = json.loads(body)
        if answer.get("kind") == "Status":  # of an API server in between
            return DispatchError("Kubernetes", str(answer.get("message")), reason=reason, status=status)
        error = answer["error"]
        message = str(error["message"])
        reason = Reason.of_code(error.get("code")) or Reason.INTERNAL
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    if reason is Reason.INTERNAL:
        reason = {404: Reason.MODEL_NOT_FOUND, 504: Reason.DEADLINE_EXCEEDED}.get(status, reason)
    return DispatchError("", message or f"the system answered {status}", reason=reason, status=status)
