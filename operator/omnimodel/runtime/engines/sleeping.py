"""Foreign engines whose servers let go of the device without ending: an evict puts them to sleep, a wake wakes them.

A server is told so only when nobody asks it anything: some die of a request that comes while they sleep, or of falling
asleep with one under way. What it answers is not believed: the agent asks the driver how many bytes are left, and stops
a server that has kept them. One that does not wake is started anew.

Source: vllm-project/vllm#15483, #45520 (they die), #32714, #47654 (they keep the bytes), #36753 (they do not wake).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnimodel.errors import OmniError, ProcessError
from omnimodel.protocol.process import SLEEP_SECONDS
from omnimodel.runtime.engines.foreign import ForeignEngine
from omnimodel.runtime.requests import RequestError

if TYPE_CHECKING:
    from omnimodel.runtime.engines import Setting

log = logging.getLogger(__name__)

_DRAIN_SECONDS = 30.0
_SERVED = "/v1/"  # what clients may ask for: next to it are the paths that the system tells a server by


@dataclass(frozen=True)
class Controls:
    """How a server is told to sleep and to wake.

    Args:
        sleep, wake: what is posted to, with its query.
        body: of both, as JSON; None for none.
        state: answers `{"is_sleeping": BOOLEAN}`; empty where there is no such path.
    """

    sleep: str
    wake: str
    body: Mapping[str, Any] | None = None
    state: str = ""


class SleepingEngine(ForeignEngine):
    """A server that is started once, and then put to sleep and woken; see `engines.Engine`.

    Args:
        setting: of the process.
        argv: the command line, made for an address to listen on.
        health_path: what answers 2xx when the server is ready.
        ended: called with the exit status when the server ends without being told to.
        controls: how it is put to sleep and woken.
        env: variables of the server, beside those of this process.
    """

    def __init__(
        self,
        setting: Setting,
        argv: Callable[[int], Sequence[str]],
        health_path: str,
        ended: Callable[[int], None],
        controls: Controls,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(setting, argv, health_path, ended, _only_served, env)
        self._controls = controls
        self._asleep = False
        self._relays: set[asyncio.Task[None]] = set()  # each carries one request
        self._loop: asyncio.AbstractEventLoop | None = None

    # Command thread

    def wake(self, descriptors: list[int], fence_base: int | None = None) -> Mapping[str, Any]:
        """Wake the server, or start it.

        Raises:
            ProcessError: it ended, or was not healthy in time.
        """
        process = self._process
        if process is None or not self._asleep:
            return super().wake(descriptors, fence_base)
        began = time.monotonic()
        try:
            self._tell(process, self._controls.wake, asleep=False)
            if not self._healthy(process):
                raise ProcessError(self._setting.subject, "its server is not healthy after its sleep")
        except OmniError as error:
            log.warning("engine did not wake model=%s problem=%r", self._setting.name, error.problem)
            self._terminate()
            return {**super().wake(descriptors, fence_base), "restarted": error.problem}
        self._asleep, self._accepting = False, True
        return {"mapSeconds": time.monotonic() - began}

    def sleep(self) -> bool:
        """Wait for the requests in flight and put the server to sleep; False when it has to be stopped instead."""
        process = self._process
        if process is None or self._asleep:
            return self._asleep
        self._fence()
        try:
            self._tell(process, self._controls.sleep, asleep=True)
        except OmniError as error:
            log.warning("engine did not sleep model=%s problem=%r", self._setting.name, error.problem)
            self._terminate()
            return False
        self._asleep = True
        return True

    def _terminate(self) -> None:
        self._asleep = False
        super()._terminate()

    def _tell(self, process: subprocess.Popen[bytes], path: str, *, asleep: bool) -> None:
        """Tell the server to sleep or to wake; it says that it did when this returns.

        Raises:
            ProcessError: it refuses, does not answer in time, is gone, or says that it did not.
        """
        body = None if self._controls.body is None else json.dumps(self._controls.body).encode()
        self._ask(process, "POST", path, body)
        if not self._controls.state:
            return
        state = self._ask(process, "GET", self._controls.state, None)
        try:
            obeyed = json.loads(state) == {"is_sleeping": asleep}
        except ValueError:
            obeyed = False
        if not obeyed:
            raise ProcessError(self._setting.subject, f"its server says {state!r:.100} after {path}")

    def _ask(self, process: subprocess.Popen[bytes], method: str, path: str, body: bytes | None) -> bytes:
        client = http.client.HTTPConnection("127.0.0.1")
        try:
            with self._connect(process) as connection:
                connection.settimeout(SLEEP_SECONDS)
                client.sock = connection
                client.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
                response = client.getresponse()
                said = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ProcessError(self._setting.subject, f"its server did not answer {path}: {error!r}") from error
        if not 200 <= response.status < 300:
            raise ProcessError(self._setting.subject, f"its server answered {path} with {response.status}")
        return said

    def _fence(self) -> None:
        """Refuse new requests, and wait for those in flight; after `limits.drainSeconds` they are broken off."""
        assert self._loop is not None
        limits = self._setting.spec.get("limits") or {}
        seconds = float(limits.get("drainSeconds") or _DRAIN_SECONDS)
        asyncio.run_coroutine_threadsafe(self._drain(seconds), self._loop).result()

    # Event loop

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Take connections from the model's socket."""
        self._loop = asyncio.get_running_loop()
        return await super().listen(listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.current_task()
        assert relay is not None
        self._relays.add(relay)
        try:
            await super()._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # it was in flight for too long; the streams library has no use for a cancelled one
        finally:
            self._relays.discard(relay)

    async def _drain(self, seconds: float) -> None:
        self._accepting = False
        if self._relays:
            _, late = await asyncio.wait(self._relays, timeout=seconds)
            for relay in late:
                relay.cancel()
            if late:
                await asyncio.wait(late)


def _only_served(path: str, _: bytes) -> None:
    """Raise for what only the system may ask a server.

    Raises:
        RequestError: it is no path of the interface that clients have.
    """
    if not path.startswith(_SERVED):
        raise RequestError(f"There is no {path:.100}", code="not_found", status=404)
