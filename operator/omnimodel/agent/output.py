"""What models' processes print: from pipes into files of bounded size, by one thread for all of them.

A model that prints a gigabyte is not held up by it and hurts nobody: beyond a rate its output is read and dropped, and
a line says how much.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import selectors
import threading
import time
from io import FileIO
from pathlib import Path

log = logging.getLogger(__name__)

FILE_BYTES = 8 << 20  # of one log file; one older one is kept
RATE_BYTES = 1 << 20  # a second; more is dropped
_BURST_BYTES = 4 << 20
_TAIL_BYTES = 16 << 10
_CHUNK_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_CLOSE_SECONDS = 5.0
_WARNING_SECONDS = 60.0  # between two warnings of one file


def rotated(path: Path) -> Path:
    """Where a log file goes when it has reached its size."""
    return path.with_name(f"{path.name}.1")


class Output:
    """The output of one process.

    Args:
        path: of the file.
        loop: in which `ended` is awaited.
        pipe: its reading end, of a process that there is already.
    """

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, pipe: int | None = None) -> None:
        self.path = path
        self.read_descriptor, self.write_descriptor = os.pipe2(os.O_CLOEXEC) if pipe is None else (pipe, -1)
        os.set_blocking(self.read_descriptor, False)
        with contextlib.suppress(OSError):
            _resize(self.read_descriptor)
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: FileIO | None = path.open("ab", buffering=0)
        self._bytes = self._file.tell()
        self._warned_seconds = -math.inf
        self._tail = bytearray()
        self._allowance = float(_BURST_BYTES)
        self._refilled = time.monotonic()
        self._dropped_bytes = 0

    def take(self, chunk: bytes) -> None:
        """Keep a chunk, or drop it when it comes too fast. Called by the pump's thread."""
        self._tail += chunk[-_TAIL_BYTES:]
        del self._tail[:-_TAIL_BYTES]
        now = time.monotonic()
        self._allowance = min(_BURST_BYTES, self._allowance + (now - self._refilled) * RATE_BYTES)
        self._refilled = now
        if self._allowance < len(chunk):
            self._dropped_bytes += len(chunk)
            return
        self._allowance -= len(chunk)
        self._say_dropped()
        self._write(chunk)

    def _say_dropped(self) -> None:
        if self._dropped_bytes:
            count, self._dropped_bytes = self._dropped_bytes, 0
            self._write(f"\n[omnimodel: {count} bytes of output dropped: more than {RATE_BYTES} a second]\n".encode())

    def _write(self, chunk: bytes) -> None:
        try:
            if self._file is None:
                self._open()
            if self._bytes + len(chunk) > FILE_BYTES:
                self.path.replace(rotated(self.path))
                self._open()
            assert self._file is not None
            self._file.write(chunk)
            self._bytes += len(chunk)
        except OSError as error:  # a full disk must not stop the reading; the next chunk opens the file again
            self._close()
            if time.monotonic() - self._warned_seconds > _WARNING_SECONDS:
                self._warned_seconds = time.monotonic()
                log.warning("log_write_failed path=%s error=%s", self.path, error)

    def _open(self) -> None:
        self._close()
        self._file = self.path.open("ab", buffering=0)
        self._bytes = self._file.tell()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def end(self) -> None:
        """No more will come. Called by the pump's thread."""
        self._say_dropped()
        self._close()
        os.close(self.read_descriptor)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def tail(self, lines: int = 20) -> str:
        """The last lines that were printed."""
        return "\n".join(bytes(self._tail).decode(errors="replace").splitlines()[-lines:])

    def close_writer(self) -> None:
        """Close the agent's copy of the writing end, once the process has its own."""
        if self.write_descriptor >= 0:
            os.close(self.write_descriptor)
            self.write_descriptor = -1


def _resize(descriptor: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, _F_SETPIPE_SZ, _PIPE_BYTES)


class OutputPump:
    """The thread that reads every process's output."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._added: list[Output] = []
        self._dropped: list[Output] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def add(self, path: Path, pipe: int | None = None) -> Output:
        """Make a pipe, or read the given one; its output goes to the file `path`."""
        output = Output(path, asyncio.get_running_loop(), pipe)
        with self._lock:
            self._added.append(output)
            self._wake()
        return output

    def drop(self, output: Output) -> None:
        """Stop reading an output although somebody still holds its writing end."""
        with self._lock:
            if self._closing:
                return
            self._dropped.append(output)
            self._wake()

    def close(self) -> None:
        """Stop the thread."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():  # it writes to a disk that hangs
            return
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of them already
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        outputs: set[Output] = set()
        while not self._closing:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                output: Output = key.data
                try:
                    chunk = os.read(output.read_descriptor, _CHUNK_BYTES)
                except BlockingIOError:
                    continue
                if chunk:
                    output.take(chunk)
                else:
                    self._end(output, outputs)
            with self._lock:
                added, self._added = self._added, []
                dropped, self._dropped = self._dropped, []
            for output in added:
                self._selector.register(output.read_descriptor, selectors.EVENT_READ, output)
                outputs.add(output)
            for output in dropped:
                if output in outputs:
                    self._end(output, outputs)
        for output in list(outputs):
            self._end(output, outputs)

    def _end(self, output: Output, outputs: set[Output]) -> None:
        self._selector.unregister(output.read_descriptor)
        outputs.discard(output)
        output.end()
