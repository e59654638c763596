"""An emulated GPU whose operations take time: a clock for each stream, and nothing sleeps.

An operation begins when the one before it in its stream has ended, and what it waits for has come. So a test says how
long a wake takes on a line of a given rate, with a decoder of a given rate, however fast this machine is.
"""

# ruff: noqa: N802  (functions have the driver's own names)
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from gpu.emulated import EmulatedDriver
from omnimodel.memory.codec import Layout


class TimedDriver(EmulatedDriver):
    """Adds the clocks.

    Args:
        capacity_bytes: of the device.
        line: bytes that it copies from pinned memory, in a second.
        decoder: bytes that its decoder makes, in a second.
    """

    def __init__(self, capacity_bytes: int, line: float, decoder: float) -> None:
        super().__init__(capacity_bytes)
        self.line, self.decoder = line, decoder
        self.clocks: dict[int, float] = defaultdict(float)  # of streams, in seconds
        self.reached: dict[tuple[int, int], float] = {}  # event, and which record of it
        self.written: list[tuple[int, float]] = []  # values and when; a page has another address in each process
        self.moves: Callable[[int], None] = self.takes(0.0)  # the clock of the next operation's stream

    def takes(self, seconds: float) -> Callable[[int], None]:
        """An operation of that length."""

        def moves(stream: int) -> None:
            self.clocks[stream] += seconds

        return moves

    def compute(self, stream: int, seconds: float) -> None:
        """Have a process compute in its stream."""
        self.moves = self.takes(seconds)
        self._enqueue(stream, "compute", lambda: None)

    def _enqueue(self, stream, name, work, ready=lambda: True):
        moves, self.moves = self.moves, self.takes(0.0)

        def timed() -> None:
            work()
            moves(stream)

        super()._enqueue(stream, name, timed, ready)

    def _not_before(self, stream: int, seconds: float) -> None:
        self.clocks[stream] = max(self.clocks[stream], seconds)

    def do_cuMemcpyHtoDAsync(self, target, source, size, stream):
        self.moves = self.takes(size / self.line)
        super().do_cuMemcpyHtoDAsync(target, source, size, stream)

    def decode(self, block: int, target: int, layout: Layout, stream: int) -> None:
        with self.lock:
            self.moves = self.takes(2 * layout.count / self.decoder)
            super().decode(block, target, layout, stream)

    def do_cuEventRecord(self, event, stream):
        key = event, self.events[event][0] + 1
        self.moves = lambda stream: self.reached.__setitem__(key, self.clocks[stream])
        super().do_cuEventRecord(event, stream)

    def do_cuStreamWaitEvent(self, stream, event, flags):
        key = event, self.events[event][0]
        self.moves = lambda stream: self._not_before(stream, self.reached.get(key, 0.0))
        super().do_cuStreamWaitEvent(stream, event, flags)

    def do_cuStreamWriteValue32(self, stream, address, value, flags):
        self.moves = lambda stream: self.written.append((value, self.clocks[stream]))
        super().do_cuStreamWriteValue32(stream, address, value, flags)

    def do_cuStreamWaitValue32(self, stream, address, value, flags):
        self.moves = lambda stream: self._not_before(
            stream, min(seconds for written, seconds in self.written if written >= value)
        )
        super().do_cuStreamWaitValue32(stream, address, value, flags)

    def do_cuEventElapsedTime(self, began, ended):
        first, last = (self.reached[event, self.events[event][1]] for event in (began, ended))
        return ((last - first) * 1e3,)
