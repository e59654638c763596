"""The smallest init: pid 1 of a container, which reaps whatever becomes an orphan and passes signals on.

An agent must not be it: the kernel gives pid 1 every orphan of the container, and the models of an agent that died are
to live on until the next agent finds them. So the agent is a child, and is started again when it was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

RESTARTS = 5  # within RESTART_WINDOW_SECONDS; after that the container ends, and the kubelet waits longer each time
RESTART_WINDOW_SECONDS = 600.0
RESTART_PAUSE_SECONDS = 1.0
PAUSE_STEP_SECONDS = 0.05
_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_under_init(work: Callable[[], int]) -> int:
    """Fork; the child does the work, and this process is its init until it ends.

    Args:
        work: in the child; its result is the exit code.

    Returns:
        The exit code of the last child: 128 and its signal when it was killed.
    """
    init = _Init()
    restarts: list[float] = []
    while True:
        status = init.run(work)
        if not os.WIFSIGNALED(status) or init.told:
            return os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else 128 + os.WTERMSIG(status)
        now = time.monotonic()
        restarts = [moment for moment in restarts if now - moment < RESTART_WINDOW_SECONDS] + [now]
        number = os.WTERMSIG(status)
        if len(restarts) > RESTARTS:
            print(f"the agent was killed by signal {number} too often; giving up", file=sys.stderr, flush=True)
            return 128 + number
        print(f"the agent was killed by signal {number}; starting it again", file=sys.stderr, flush=True)
        if init.pause(RESTART_PAUSE_SECONDS):
            return 128 + number


class _Init:
    def __init__(self) -> None:
        self.child = 0
        self.told = False  # to end
        for number in _PASSED:
            signal.signal(number, self._pass)

    def pause(self, seconds: float) -> bool:
        """Wait, and reap what becomes an orphan; whether it was told to end meanwhile."""
        until = time.monotonic() + seconds
        while not self.told and time.monotonic() < until:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(PAUSE_STEP_SECONDS)
        return self.told

    def _pass(self, number: int, _: object) -> None:
        self.told = self.told or number in {signal.SIGTERM, signal.SIGINT}
        if self.child:
            os.kill(self.child, number)

    def run(self, work: Callable[[], int]) -> int:
        """Start the child once and reap until it has ended; its wait status."""
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for number in _PASSED:
                    signal.signal(number, signal.SIG_DFL)
                code = work()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self.child = child
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:  # cannot be: the child has not been reaped
                return 1 << 8
            if pid == child:
                self.child = 0
                return status
