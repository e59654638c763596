"""`omni up`: the whole system on this machine, in one process."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnimodel.cli.target import state_dir_option
from omnimodel.errors import OmniError

if TYPE_CHECKING:
    from omnimodel.agent.agent import Agent
    from omnimodel.cli.aside import Lines
    from omnimodel.controllers.local_state import StateLock

log = logging.getLogger(__name__)

FASTER_SECONDS = 2.0  # what the second Ctrl-C leaves to requests in flight
KILLED_SECONDS = 10.0  # after the third: for the kernel to end processes and for mounts and cgroups to go
LOG_BYTES = 16 << 20


@dataclass(frozen=True)
class Options:
    """What `omni up` was asked for."""

    folder: Path
    state_dir: Path
    host: str
    port: int
    pool: str
    memory: str | None
    drain_seconds: float
    form: str | None
    debug: bool


class Listen(click.ParamType[tuple[str, int]]):
    """`HOST:PORT`, `:PORT` or `[IPv6]:PORT`."""

    name = "HOST:PORT"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Host and port."""
        if isinstance(value, tuple):
            return value
        host, colon, port = value.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            self.fail(f"{value!r} is not HOST:PORT; write one such as 127.0.0.1:8080", param, ctx)
        return host.strip("[]") or "127.0.0.1", int(port)


class Memory(click.ParamType[str]):
    """A quantity or a share."""

    name = "QUANTITY"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, once it is known to be one."""
        from omnimodel.quantity import QuantityError, parse_bytes_or_share

        try:
            parse_bytes_or_share(value)
        except QuantityError as error:
            self.fail(f"{value} {error.problem}; {error.cure}", param, ctx)
        return value


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--listen", type=Listen(), default="127.0.0.1:8080", show_default=True, help="Where to answer; port 0 "
              "takes a free one.")  # fmt: skip
@click.option("--memory", type=Memory(), help="Device budget, such as 1Gi or 50%, instead of the pool's own.")
@click.option("--pool", default="", metavar="NAME", help="The pool this machine serves, when DIR has several.")
@click.option("--drain", "drain_seconds", type=click.FloatRange(min=0), default=30.0, show_default=True,
              help="Seconds that Ctrl-C leaves to requests in flight.")  # fmt: skip
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="One JSON object a line on stdout: first "
              "that the system is ready, then every event.")  # fmt: skip
@state_dir_option
@click.pass_context
def command(
    context: click.Context,
    folder: Path,
    listen: tuple[str, int],
    memory: str | None,
    pool: str,
    drain_seconds: float,
    form: str | None,
    state_dir: Path,
) -> None:
    """Serve the manifests of DIR on this machine, and reconcile every edit.

    Ctrl-C stops in stages: the first lets requests finish, the second hurries, the third kills.
    """
    host, port = listen
    options = Options(
        folder.resolve(), state_dir.resolve(), host, port, pool, memory, drain_seconds, form, bool(context.obj)
    )
    try:
        asyncio.run(serve(options))
    finally:
        # An interpreter that ends gives SIGINT its default back, and one Ctrl-C too many would look like a failure.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


async def serve(options: Options) -> None:
    """Run until told to stop, and leave nothing behind.

    Raises:
        OmniError: the state directory or the address is in use, or the folder cannot be read.
    """
    from omnimodel.controllers.local_state import StateLock

    stops = Stops()
    with StateLock(options.state_dir) as lock, _listening(options.host, options.port) as listener:
        _log_to(options.state_dir / "logs", debug=options.debug)
        raise_open_files()
        await _serve_locked(options, lock, listener, stops)


async def _serve_locked(options: Options, lock: StateLock, listener: socket.socket, stops: Stops) -> None:
    from aiohttp import web

    from omnimodel.agent.agent import Agent
    from omnimodel.cli.aside import Lines
    from omnimodel.cli.display import Display
    from omnimodel.controllers.local import LocalController
    from omnimodel.controllers.local_backend import LocalBackend
    from omnimodel.controllers.local_state import OBJECTS_FILE, IdentityFile
    from omnimodel.gateway.app import create_app
    from omnimodel.gateway.gateway import GATEWAY
    from omnimodel.protocol.ingress import Told

    agent = Agent(options.state_dir)
    runner: web.AppRunner | None = None
    work: set[asyncio.Task[object]] = set()
    errors = Lines(sys.stderr.fileno())
    stopping = asyncio.create_task(stops.next())
    try:
        await agent.start()
        identities = IdentityFile(options.state_dir / OBJECTS_FILE)
        controller = LocalController(options.folder, agent, identities, pool=options.pool, memory=options.memory)
        runner = web.AppRunner(
            create_app(
                LocalBackend(agent, controller.refused),
                controller,
                reporting=Told(agent.report, controller.wait_changed),
            ),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=FASTER_SECONDS,
        )
        await runner.setup()
        await web.SockSite(runner, listener).start()
        address = _address(listener)
        lock.publish_address(address)
        log.info("listening address=%s folder=%s", address, options.folder)
        display = Display(controller, address, form=options.form, out=Lines(sys.stdout.fileno()), errors=errors)
        work = {asyncio.create_task(controller.run()), asyncio.create_task(display.run())}
        done, _ = await asyncio.wait({stopping, *work}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        asked = stopping.done()
        stopping.cancel()
        if runner is not None:
            runner.app[GATEWAY].leaving.set()  # whoever looks at /readyz sends nobody new
        await shut_down(agent, stops, options.drain_seconds, errors, asked=asked)
        if runner is not None:
            await runner.cleanup()


async def shut_down(agent: Agent, stops: Stops, drain_seconds: float, lines: Lines, *, asked: bool) -> None:
    """Stop the agent in stages, telling about it; each further request to stop begins the next one.

    Args:
        agent: to stop.
        stops: the requests to stop.
        drain_seconds: what the first stage leaves to requests in flight.
        lines: where to tell.
        asked: whether anybody has asked for it; else an error has, which is told by itself.

    Raises:
        OmniError: processes outlived even that they were killed.
    """
    work: set[asyncio.Task[None]] = set()
    for seconds, text in (
        (drain_seconds, "stopping: requests in flight may finish (Ctrl-C again to hurry)"),
        (min(drain_seconds, FASTER_SECONDS), "hurrying (Ctrl-C again to kill)"),
        (0.0, "killing"),
    ):
        asked = asked or bool(work)
        if asked:
            lines.put(text)
        work.add(asyncio.create_task(agent.stop(seconds)))
        hurry = asyncio.create_task(stops.next())
        telling = asyncio.create_task(_tell_progress(agent, lines))
        limit_seconds = seconds + KILLED_SECONDS
        done, _ = await asyncio.wait({*work, hurry}, return_when=asyncio.FIRST_COMPLETED, timeout=limit_seconds)
        hurry.cancel()
        telling.cancel()
        ended = done & work
        if ended:
            await asyncio.gather(*work)
            if asked:
                lines.put("stopped")
            await lines.finish()
            return
    raise OmniError(
        "agent", "processes of models did not end when they were killed", "the next start cleans up what is left"
    )


async def _tell_progress(agent: Agent, lines: Lines) -> None:
    """Say which requests are waited for, when their number changes."""
    told = 0
    while True:
        busy = {f"{m.namespace}/{m.name}": m.in_flight for m in agent.report().models if m.in_flight}
        if busy and sum(busy.values()) != told:
            told = sum(busy.values())
            requests = "request" if told == 1 else "requests"
            lines.put(f"waiting for {told} {requests}: {', '.join(busy)}")
        await asyncio.sleep(0.5)


class Stops:
    """Requests to stop (SIGINT, SIGTERM, SIGHUP), in the order in which they came.

    The handlers stay for the rest of the process, so that one more Ctrl-C in its last moments does not break it off.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: object) -> None:
        del frame
        with suppress(RuntimeError):  # the loop is closed: everything has been stopped
            self._loop.call_soon_threadsafe(self._queue.put_nowait, number)

    async def next(self) -> int:
        """Wait for the next one; its signal."""
        return await self._queue.get()


def _listening(host: str, port: int) -> socket.socket:
    """A bound and listening socket; before anything is started, so that a taken port costs no time.

    Raises:
        OmniError: the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OmniError(f"address {host}:{port}", f"it is none of this machine ({error.strerror})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OmniError(
            f"address {host}:{port}",
            f"cannot listen there ({error.strerror})",
            "give another with --listen HOST:PORT; port 0 takes a free one",
        ) from error
    return listener


def _address(listener: socket.socket) -> str:
    """The URL by which clients of this machine reach a listening socket."""
    host, port = listener.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_to(folder: Path, *, debug: bool) -> None:
    """Write the log into the state directory; with `--debug` to stderr as well, and all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(folder / "omni.log", maxBytes=LOG_BYTES, backupCount=2)
    ]
    if debug:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
        handlers=handlers,
        force=True,
    )
    for chatty in ("asyncio", "watchfiles"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def raise_open_files() -> None:
    """Each frame of device memory takes two descriptors; the soft limit of a shell is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
