"""The smallest init: pid 1 of a container, which reaps whatever becomes an orphan and passes signals on.

An agent must not be it: the kernel gives pid 1 every orphan of the container, and the models of an agent that died are
to live on until the next agent finds them. So the agent is a child, and is started again when it was killed. What a
model would notice the death of the agent by, its open descriptors, is kept here meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from omnimodel.agent.descriptors import DescriptorStore, Kept
from omnimodel.isolation.syscalls import PR_SET_DUMPABLE, prctl
from omnimodel.protocol.channel import socket_pair

RESTARTS = 5  # within RESTART_WINDOW_SECONDS; after that the container ends, and the kubelet waits longer each time
RESTART_WINDOW_SECONDS = 600.0
RESTART_PAUSE_SECONDS = 1.0
PAUSE_STEP_SECONDS = 0.05
Work = Callable[[DescriptorStore], int]
_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_under_init(work: Work) -> int:
    """Fork; the child does the work, and this process is its init until it ends.

    Args:
        work: in the child, with what it may have kept for the next one; its result is the exit code.

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
        self._kept = Kept()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
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

    def run(self, work: Work) -> int:
        """Start the child once, reap and keep what it gives until it has ended; its wait status."""
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = socket_pair()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, *_PASSED):
                    signal.signal(number, signal.SIG_DFL)
                for descriptor in (ours.detach(), self._wake_read, self._wake_write):
                    os.close(descriptor)
                prctl(PR_SET_DUMPABLE, 1)
                code = work(DescriptorStore(theirs, self._kept.descriptors))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self.child = child
        theirs.close()
        ours.setblocking(False)
        prctl(PR_SET_DUMPABLE, 0)  # nobody of the same user takes by /proc what is kept
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(ours, select.POLLIN)
        speaks = True
        with ours:
            while (status := self._reap()) is None:
                poll.poll()
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                if speaks and not self._kept.follow(ours):
                    speaks = False
                    poll.unregister(ours)
            self._kept.follow(ours)  # what it said last
        return status

    def _reap(self) -> int | None:
        """Wait for all that have ended; the child's wait status when it is one of them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # cannot be: the child has not been reaped
                return 1 << 8
            if pid == self.child:
                self.child = 0
                return status
            if pid == 0:
                return None
