"""Messages with file descriptors over a SOCK_SEQPACKET socket pair: blocking in a model's process, async in the agent.

One message is one JSON object. The kernel passes at most 253 descriptors with a packet, so that a message with more
of them goes as several packets: the first byte of each says whether another one follows.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from omnimodel.errors import OmniError

DESCRIPTORS_PER_PACKET = 250  # Source: SCM_MAX_FD is 253 in the kernel's include/net/scm.h
PACKETS_PER_MESSAGE = 1000  # a process that runs a stranger's code may send a message without an end
PACKET_BYTES = 160 << 10  # stays under net.core.wmem_default (208 KiB), which bounds one packet


class ChannelClosed(OmniError):
    """The other side is gone."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make a connected pair: one end for the agent, one for the model's process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def packets(message: dict[str, Any], descriptors: Sequence[int]) -> list[tuple[bytes, Sequence[int]]]:
    """Cut a message into packets: (bytes, descriptors) each.

    Raises:
        OmniError: the message is larger than one packet may be.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) >= PACKET_BYTES:
        raise OmniError("control message", f"{len(body)} bytes are more than the {PACKET_BYTES} that one may have")
    groups = [
        descriptors[start : start + DESCRIPTORS_PER_PACKET]
        for start in range(0, len(descriptors), DESCRIPTORS_PER_PACKET)
    ] or [()]
    last = len(groups) - 1
    return [
        ((b"\1" if index < last else b"\0") + (body if index == 0 else b""), group)
        for index, group in enumerate(groups)
    ]


def _ancillary(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []


class _Assembly:
    """Packets of one message while they arrive."""

    def __init__(self) -> None:
        self.body = b""
        self.descriptors: list[int] = []
        self.packets = 0

    def receive(self, sock: socket.socket) -> bool:
        """Read one packet; True when the message is whole."""
        packet, ancillary, flags, _ = sock.recvmsg(
            PACKET_BYTES + 1,
            socket.CMSG_SPACE((DESCRIPTORS_PER_PACKET + 3) * array.array("i").itemsize),
            socket.MSG_CMSG_CLOEXEC,
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self.descriptors.extend(received)
        if not packet:
            self.discard()
            raise ChannelClosed("control channel", "the other side has closed it")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            self.discard()
            raise OmniError("control channel", "a message arrived cut off", "raise the limit of open files (ulimit -n)")
        self.body += packet[1:]
        self.packets += 1
        if self.packets > PACKETS_PER_MESSAGE or len(self.body) > PACKET_BYTES:
            self.discard()
            raise OmniError("control channel", "a message has no end", "the other side is broken or hostile")
        return packet[0] == 0

    def discard(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def message(self) -> tuple[dict[str, Any], list[int]]:
        return json.loads(self.body), self.descriptors


class Channel:
    """The blocking end, used inside a model's process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open here.

        Raises:
            ChannelClosed: the other side is gone.
        """
        try:
            for body, group in packets(message, descriptors):
                self.sock.sendmsg([body], _ancillary(group))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("control channel", "the other side has closed it") from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for one message; the descriptors are the caller's to close.

        Raises:
            ChannelClosed: the other side is gone.
        """
        assembly = _Assembly()
        try:
            while not assembly.receive(self.sock):
                pass
        except ConnectionResetError as error:
            assembly.discard()
            raise ChannelClosed("control channel", "the other side has closed it") from error
        return assembly.message()

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


class AsyncChannel:
    """The agent's end. One task receives; any task may send (packets of one message are never mixed with another's)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._sending = asyncio.Lock()

    async def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open here.

        Raises:
            ChannelClosed: the other side is gone.
        """
        async with self._sending:
            for body, group in packets(message, descriptors):
                while True:
                    try:
                        self.sock.sendmsg([body], _ancillary(group))
                        break
                    except BlockingIOError:
                        await self._ready(write=True)
                    except (BrokenPipeError, ConnectionResetError, OSError) as error:
                        raise ChannelClosed("control channel", "the other side has closed it") from error

    async def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for one message; the descriptors are the caller's to close.

        Raises:
            ChannelClosed: the other side is gone, or this end was closed.
        """
        assembly = _Assembly()
        try:
            while True:
                if self.sock.fileno() < 0:
                    raise ChannelClosed("control channel", "it was closed")
                try:
                    if assembly.receive(self.sock):
                        return assembly.message()
                except BlockingIOError:
                    await self._ready(write=False)
        except OSError as error:
            assembly.discard()
            raise ChannelClosed("control channel", "the other side has closed it") from error
        except asyncio.CancelledError:
            assembly.discard()
            raise

    async def _ready(self, *, write: bool) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
        descriptor = self.sock.fileno()
        if descriptor < 0:
            raise ChannelClosed("control channel", "it was closed")
        add(descriptor, lambda: None if waiter.done() else waiter.set_result(None))
        try:
            await waiter
        finally:
            remove(descriptor)

    def close(self) -> None:
        """Close this end; nobody may be receiving any more."""
        self.sock.close()
