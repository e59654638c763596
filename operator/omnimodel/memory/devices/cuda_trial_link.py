"""How the benchmark and the tests talk to a `cuda_trial` process: one JSON object a packet, descriptors with it."""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Sequence
from typing import Any

PACKET_BYTES = 64 << 10
PACKET_DESCRIPTORS = 250  # Source: SCM_MAX_FD is 253


class Link:
    """Commands, answers and descriptors over a SOCK_SEQPACKET socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message; descriptors beyond those of the first packet follow in more."""
        body = json.dumps({**message, "descriptors": len(descriptors)}).encode()
        for start in range(0, max(1, len(descriptors)), PACKET_DESCRIPTORS):
            socket.send_fds(self.sock, [body], list(descriptors[start : start + PACKET_DESCRIPTORS]))
            body = b"+"

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for one message.

        Raises:
            EOFError: the other side is gone.
        """
        body, descriptors = self._packet()
        message: dict[str, Any] = json.loads(body)
        while len(descriptors) < message["descriptors"]:
            descriptors += self._packet()[1]
        return message, descriptors

    def _packet(self) -> tuple[bytes, list[int]]:
        space = socket.CMSG_SPACE(PACKET_DESCRIPTORS * array.array("i").itemsize)
        body, ancillary, _, _ = self.sock.recvmsg(PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        if not body:
            raise EOFError
        descriptors = array.array("i")
        for _, _, received in ancillary:
            descriptors.frombytes(received)
        return body, list(descriptors)

    def ask(self, op: str, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            RuntimeError: the process says that it failed.
        """
        self.send({"op": op, **arguments}, descriptors)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a command that was sent before."""
        reply, _ = self.receive()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply
