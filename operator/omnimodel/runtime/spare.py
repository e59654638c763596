"""A process that is forked before anybody asks for it, and waits to become a model's.

Most of a fork is to copy the page tables of the zygote: 11 ms, where a process is ready after 50. A spare has touched
next to nothing before it moves into the control group of its model, so that what the model takes is charged there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from omnimodel.isolation import fork_ahead
from omnimodel.isolation.syscalls import close_descriptors_except
from omnimodel.protocol.channel import Channel, ChannelClosed, socket_pair

Become = Callable[[Mapping[str, Any], list[int]], NoReturn]


class Spare:
    """See the module. It ends when the zygote does.

    Args:
        pid: of it.
        channel: to it.
    """

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self._channel = channel

    @classmethod
    def fork(cls, become: Become) -> Spare | None:
        """Make one; None where a process is forked for its user only.

        Args:
            become: what it does once it is told who it is.

        Raises:
            OSError: there is no room for it.
        """
        ours, theirs = socket_pair()
        channel = Channel(ours)
        with theirs:
            try:
                pid = fork_ahead()
            except OSError:
                channel.close()
                raise
            if pid == 0:
                _wait(theirs.fileno(), become)
        if pid is None:
            channel.close()
            return None
        return cls(pid, channel)

    def told(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> bool:
        """Tell it who it is; False when it is gone."""
        try:
            self._channel.send(dict(request), descriptors)
        except ChannelClosed:
            return False
        finally:
            self._channel.close()
        return True

    def end(self) -> None:
        """Let it end, and wait until it has."""
        self._channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _wait(descriptor: int, become: Become) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        close_descriptors_except({descriptor})  # or the zygote's channel would outlive the zygote
        with contextlib.suppress(ChannelClosed):
            become(*Channel(socket.socket(fileno=descriptor)).receive())
    finally:
        os._exit(0)
