"""Descriptors that outlive the agent: the init of its container keeps copies of them, by name.

The control channel, the output and the frames of a process are so not closed by the end of its agent, and the next
agent goes on with them. The init starts every agent by a fork, which hands over all that is kept: an agent only says
what is to be kept, and what no longer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Mapping

from omnimodel.errors import OmniError
from omnimodel.protocol.channel import DESCRIPTORS_PER_PACKET, Channel, ChannelClosed

log = logging.getLogger(__name__)


class DescriptorStore:
    """The agent's end.

    Args:
        sock: to the init.
        found: what earlier agents have given, by name.
    """

    def __init__(self, sock: socket.socket, found: Mapping[str, int]) -> None:
        self._channel = Channel(sock)
        self.found = dict(found)

    def put(self, named: Mapping[str, int]) -> None:
        """Have descriptors kept, which stay open here; a name is `PROCESS/...`, and what had it before is let go.

        What cannot be kept is missing after a kill, and then the process that it belongs to is ended.
        """
        names = list(named)
        for start in range(0, len(names), DESCRIPTORS_PER_PACKET):
            some = names[start : start + DESCRIPTORS_PER_PACKET]
            self._send({"put": some}, [named[name] for name in some])

    def drop(self, name: str) -> None:
        """Let go of what has this name, and of everything below it."""
        self._send({"drop": name}, [])

    def _send(self, message: dict[str, object], descriptors: list[int]) -> None:
        try:
            self._channel.send(message, descriptors)
        except (OmniError, OSError) as error:
            log.warning("not_kept what=%s error=%r", message, str(error))

    def leave(self, used: Collection[str]) -> None:
        """Close and let go of everything that was found, but for these names."""
        for name in self.found.keys() - set(used):
            os.close(self.found.pop(name))
            self.drop(name)


class Kept:
    """The init's end: what is kept, by name."""

    def __init__(self) -> None:
        self.descriptors: dict[str, int] = {}

    def follow(self, sock: socket.socket) -> bool:
        """Do all that an agent has said until now; False when it will say no more.

        Args:
            sock: from it; does not block.
        """
        channel = Channel(sock)
        while True:
            try:
                message, received = channel.receive()
            except BlockingIOError:
                return True
            except ChannelClosed:
                return False
            except OmniError:  # no more descriptors can be open here: what came with it is closed already
                continue
            for name, descriptor in zip(message.get("put", ()), received, strict=False):
                self._drop(name)
                self.descriptors[name] = descriptor
            if "drop" in message:
                self._drop(message["drop"])

    def _drop(self, wanted: str) -> None:
        for name in [name for name in self.descriptors if name == wanted or name.startswith(f"{wanted}/")]:
            with contextlib.suppress(OSError):
                os.close(self.descriptors.pop(name))
