"""The main program of a model's process: commands over the control channel, requests over a UNIX socket.

The main thread runs the event loop with the HTTP server. One thread reads commands, refuses those that are meant for
another process or revision, and answers Ping at once; a second one carries the others out, one after the other, so
that nothing a handler does keeps the process from being asked whether it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omnimodel.errors import OmniError, ProcessError
from omnimodel.protocol.channel import Channel, ChannelClosed
from omnimodel.protocol.process import (
    Envelope,
    Evict,
    Ping,
    Progress,
    Publish,
    Reply,
    Settle,
    Start,
    Stop,
    Wake,
    encode,
)
from omnimodel.runtime import engines
from omnimodel.runtime.allocator import bound_device, bound_retention
from omnimodel.runtime.application import BACKLOG, Traffic, application
from omnimodel.runtime.engines.foreign import ForeignEngine
from omnimodel.runtime.engines.sleeping import SleepingEngine
from omnimodel.runtime.handlers import detail_of

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

REQUEST_BYTES = 32 << 20
_TERMINATED_GRACE_SECONDS = 5.0
_PROGRESS_SECONDS = 0.1


def run(channel: Channel, instance: str, descriptors: Mapping[str, int]) -> int:
    """Serve until told to stop, or until the agent is gone.

    Args:
        channel: to the agent.
        instance: this process's identity; commands for another are refused.
        descriptors: `listen`, the listening UNIX socket, when it was made before the fork; else it comes with Start.

    Returns:
        The exit status. Threads of the model may still run: end with `os._exit`.
    """
    bound_retention()
    process = _Process(channel, instance, dict(descriptors))
    return asyncio.run(process.main())


class _Process:
    def __init__(self, channel: Channel, instance: str, descriptors: dict[str, int]) -> None:
        self._channel = channel
        self._instance = instance
        self._listen = descriptors.get("listen", -1)
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[tuple[Envelope, list[int]]] = queue.SimpleQueue()
        self._last_id = -1
        self._generation: int | None = None
        self._engine: engines.Engine | None = None
        self._traffic: Traffic | None = None
        self._tier = ""  # what commands have brought it to; empty while one is at it, and after one that failed
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop
        self._ending: asyncio.Future[tuple[int, float]]  # exit status, and seconds that requests get to finish
        self._stop_reply: int | None = None

    async def main(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._ending = self._loop.create_future()
        self._loop.add_signal_handler(signal.SIGTERM, self._end, 0, _TERMINATED_GRACE_SECONDS)
        for target in (self._read, self._work):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        status, grace_seconds = await self._ending
        if self._traffic is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._traffic.idle.wait()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._runner.cleanup()
        if self._engine is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(10.0):
                    await asyncio.to_thread(self._engine.stop)
        if self._stop_reply is not None:
            self._send(Reply(self._stop_reply, ok=True))
        return status

    def _end(self, status: int, grace_seconds: float) -> None:
        if not self._ending.done():
            self._ending.set_result((status, grace_seconds))

    # The thread that reads commands

    def _read(self) -> None:
        while True:
            try:
                message, descriptors = self._channel.receive()
            except (OmniError, OSError):
                # The agent is gone. Requests in flight still have their clients, behind the agent: none of them can
                # be answered, so that nothing is waited for beyond the step under way.
                self._loop.call_soon_threadsafe(self._end, 0, _TERMINATED_GRACE_SECONDS)
                return
            self._accept(message, descriptors)

    def _accept(self, message: dict[str, Any], descriptors: list[int]) -> None:
        command_id = message.get("id", -1)
        try:
            envelope = Envelope.from_message(message)
            self._check(envelope)
        except (OmniError, TypeError, KeyError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._send(Reply.failed(command_id, error))
            return
        self._last_id = envelope.id
        command = envelope.command
        if isinstance(command, Ping):
            self._send(Reply(envelope.id, ok=True, values=self._traffic_now()))
        elif isinstance(command, Stop):
            self._stop_reply = envelope.id
            self._loop.call_soon_threadsafe(self._end, 0, command.grace_seconds)
        else:
            self._commands.put((envelope, descriptors))

    def _traffic_now(self) -> dict[str, Any]:
        engine, traffic = self._engine, self._traffic
        if engine is None or traffic is None:
            return {"inFlight": 0, "abandoned": False}
        in_flight = engine.connections if isinstance(engine, ForeignEngine) else traffic.in_flight
        return {"inFlight": in_flight, "abandoned": engine.abandoned, **engine.tokens}

    def _check(self, envelope: Envelope) -> None:
        """Refuse what is not meant for this process as it is now.

        Raises:
            ProcessError: it is a late, repeated or misdirected command.
        """
        subject = "control channel"
        if envelope.instance != self._instance:
            raise ProcessError(subject, f"the command is for process {envelope.instance}, this is {self._instance}")
        if envelope.id <= self._last_id:
            raise ProcessError(subject, f"command {envelope.id} is stale, {self._last_id} has come already")
        if self._generation is None:
            self._generation = envelope.generation
        elif envelope.generation != self._generation:
            raise ProcessError(
                subject, f"the command is for generation {envelope.generation}, this process has {self._generation}"
            )

    def _send(self, message: Reply | Progress) -> None:
        with self._sending, contextlib.suppress(ChannelClosed, OSError):
            self._channel.send(encode(message))

    # The thread that carries commands out

    def _work(self) -> None:
        while True:
            envelope, descriptors = self._commands.get()
            began = time.perf_counter()
            try:
                reply = Reply(envelope.id, ok=True, values=self._do(envelope, descriptors))
            except BaseException as error:
                reply = Reply.failed(envelope.id, error, detail_of(error))
                log.warning("command failed op=%s error=%s", envelope.command.op, reply.message)
                if reply.detail:
                    log.warning("%s", reply.detail)
            self._send(replace(reply, seconds=time.perf_counter() - began))
            if isinstance(envelope.command, Publish):
                self._loop.call_soon_threadsafe(self._end, 0 if reply.ok else 1, 0.0)

    def _do(self, envelope: Envelope, descriptors: list[int]) -> dict[str, Any]:
        command = envelope.command
        if isinstance(command, Publish):
            return engines.publish(command, self._progress())
        if isinstance(command, Start):
            return self._start(command, descriptors)
        engine, traffic = self._engine, self._traffic
        if engine is None or traffic is None:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ProcessError("control channel", f"{command.op} came before a Start that succeeded")
        if isinstance(command, Settle):
            return {"tier": self._tier, **engine.tokens}
        self._tier = ""
        if isinstance(command, Wake):
            bound_device(command.working_bytes)
            values = dict(engine.wake(descriptors, command.fence_base))
            traffic.resident = True
            self._tier = "resident"
            return values
        assert isinstance(command, Evict)
        traffic.resident = False
        if command.sleep and isinstance(engine, SleepingEngine):
            asleep = engine.sleep()
            self._tier = "warm"
            return {"frozen": 0, "asleep": asleep}
        frozen = engine.evict(trim=command.trim)
        self._tier = "warm"
        return {"frozen": frozen, **engine.tokens}

    def _start(self, command: Start, descriptors: list[int]) -> dict[str, Any]:
        if descriptors:
            self._listen = descriptors[0]
        if self._engine is not None or self._listen < 0:
            raise ProcessError("control channel", "a Start without a listening socket, or a second one")
        setting = engines.Setting.of(command, next(iter(descriptors[1:]), None))
        engine = engines.create(setting, self._engine_ended)
        engine.start()
        limit_bytes = int((command.spec.get("limits") or {}).get("requestBytes") or REQUEST_BYTES)
        traffic = Traffic(setting.subject, limit_bytes)
        served = asyncio.run_coroutine_threadsafe(self._serve(engine, traffic), self._loop)
        served.result()
        self._engine, self._traffic, self._tier = engine, traffic, "warm"
        return {"workingBytes": engine.working_bytes()}

    def _engine_ended(self, status: int) -> None:
        """A foreign engine is gone: so is this process, with a status that says so."""
        self._loop.call_soon_threadsafe(self._end, status if status > 0 else 128 - status, 0.0)

    async def _serve(self, engine: engines.Engine, traffic: Traffic) -> None:
        listener = socket.socket(fileno=self._listen)
        listener.setblocking(False)
        if isinstance(engine, ForeignEngine):
            self._server = await engine.listen(listener)
            return
        from aiohttp import web

        # Without a cancelled handler a client that goes away would be worked for to the end.
        self._runner = web.AppRunner(
            application(traffic, engine.routes()), handler_cancellation=True, access_log=None, handle_signals=False
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener, shutdown_timeout=0.5, backlog=BACKLOG).start()

    def _progress(self) -> Any:
        last: dict[str, Any] = {"stage": "", "seconds": 0.0}

        def progress(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            if stage != last["stage"] or now - last["seconds"] >= _PROGRESS_SECONDS or (total and done >= total):
                last["stage"], last["seconds"] = stage, now
                self._send(Progress(stage, done, total))

        return progress
