"""A process that is forked before anybody asks for it, and waits to become a model's.

It spares the model the copy of the zygote's page tables, and most copies of the zygote's pages: it moves into the
control group that the model will be limited in, and rehearses there what every model does first.
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
        group: that it is in.
        channel: to it.
    """

    def __init__(self, pid: int, group: str, channel: Channel) -> None:
        self.pid = pid
        self.group = group
        self._channel = channel

    @classmethod
    def fork(cls, group: str, doors: Sequence[int], rehearse: Callable[[], object], become: Become) -> Spare | None:
        """Make one; None where a process is forked for its user only.

        Args:
            group: that it shall be in.
            doors: of that group, see `Group.doors`.
            rehearse: what it does first.
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
                _wait(theirs.fileno(), doors, rehearse, become)
        if pid is None:
            channel.close()
            return None
        return cls(pid, group, channel)

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
        """End it, and wait until it has."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def go_in(doors: Sequence[int]) -> None:
    """Move this process into a control group; where it cannot, the agent does."""
    for door in doors:
        with contextlib.suppress(OSError):
            os.write(door, b"0")


def _wait(descriptor: int, doors: Sequence[int], rehearse: Callable[[], object], become: Become) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        go_in(doors)
        close_descriptors_except({descriptor})  # or the zygote's channel would outlive the zygote
        rehearse()
        with contextlib.suppress(ChannelClosed):
            become(*Channel(socket.socket(fileno=descriptor)).receive())
    finally:
        os._exit(0)
