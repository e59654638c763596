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
import time
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


class Allowance:
    """How much a side that is not trusted may say: so much at once, and so much a second from then on.

    Args:
        packets_per_second, burst_packets: packets of it.
        bytes_per_second, burst_bytes: bytes in them.
    """

    def __init__(
        self,
        packets_per_second: float = 200.0,
        burst_packets: float = 2000.0,
        bytes_per_second: float = 256 << 10,
        burst_bytes: float = 4 << 20,
    ) -> None:
        self._rates = (packets_per_second, bytes_per_second)
        self._bursts = (burst_packets, burst_bytes)
        self._left = list(self._bursts)
        self._counted_seconds = time.monotonic()

    def take(self, packet_bytes: int) -> None:
        """Count a packet.

        Raises:
            OmniError: it is too much.
        """
        now = time.monotonic()
        passed_seconds, self._counted_seconds = now - self._counted_seconds, now
        for index, amount in enumerate((1, packet_bytes)):
            refilled = self._left[index] + passed_seconds * self._rates[index]
            self._left[index] = min(self._bursts[index], refilled) - amount
        if min(self._left) < 0:
            raise OmniError("control channel", "it is flooded", "the other side is broken or hostile")


class _Assembly:
    """Packets of one message while they arrive.

    Args:
        descriptors: how many may come with it; the kernel drops what is more, without opening it here.
        allowance: of the other side; None when it is trusted.
    """

    def __init__(self, descriptors: int, allowance: Allowance | None = None) -> None:
        self.body = b""
        self.descriptors: list[int] = []
        self.packets = 0
        self._limit = descriptors
        self._allowance = allowance

    def receive(self, sock: socket.socket) -> bool:
        """Read one packet; True when the message is whole."""
        room = min(self._limit - len(self.descriptors), DESCRIPTORS_PER_PACKET)
        # CMSG_LEN, not CMSG_SPACE: the padding of the latter has room for another descriptor.
        room_bytes = socket.CMSG_LEN(room * array.array("i").itemsize) if room else 0
        packet, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES + 1, room_bytes, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self.descriptors.extend(received)
        if not packet:
            raise ChannelClosed("control channel", "the other side has closed it")
        if self._allowance is not None:
            self._allowance.take(len(packet))
        if flags & socket.MSG_CTRUNC and room < DESCRIPTORS_PER_PACKET:
            raise OmniError("control channel", f"a message came with more than the {self._limit} descriptors allowed")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise OmniError("control channel", "a message arrived cut off", "raise the limit of open files (ulimit -n)")
        self.body += packet[1:]
        self.packets += 1
        if self.packets > PACKETS_PER_MESSAGE or len(self.body) > PACKET_BYTES:
            raise OmniError("control channel", "a message has no end", "the other side is broken or hostile")
        return packet[0] == 0

    def discard(self) -> None:
        """Close what came."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def message(self) -> tuple[dict[str, Any], list[int]]:
        """The whole message.

        Raises:
            OmniError: it is no JSON object.
        """
        try:
            message = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise OmniError("control channel", f"what came is no JSON ({type(error).__name__})") from error
        if not isinstance(message, dict):
            raise OmniError("control channel", "what came is no JSON object")
        return message, self.descriptors


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
        assembly = _Assembly(PACKETS_PER_MESSAGE * DESCRIPTORS_PER_PACKET)
        try:
            while not assembly.receive(self.sock):
                pass
            return assembly.message()
        except BaseException as error:
            assembly.discard()
            if isinstance(error, ConnectionResetError):
                raise ChannelClosed("control channel", "the other side has closed it") from error
            raise

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


class AsyncChannel:
    """The agent's end. One task receives; any task may send (packets of one message are never mixed with another's).

    Args:
        sock: of the pair.
        descriptors: how many may come with one message.
        allowance: what the other side may say, when it is not trusted.
    """

    def __init__(self, sock: socket.socket, *, descriptors: int = 0, allowance: Allowance | None = None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._descriptors = descriptors
        self._allowance = allowance
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
            OmniError: what came is no message, has more descriptors than are allowed, or is too much.
        """
        assembly = _Assembly(self._descriptors, self._allowance)
        try:
            while not await self._packet(assembly):
                pass
            return assembly.message()
        except BaseException as error:
            assembly.discard()
            if isinstance(error, OSError):
                raise ChannelClosed("control channel", "the other side has closed it") from error
            raise

    async def _packet(self, assembly: _Assembly) -> bool:
        """Add one packet; True when the message is whole. Others get their turn although more packets are there."""
        await asyncio.sleep(0)
        while True:
            if self.sock.fileno() < 0:
                raise ChannelClosed("control channel", "it was closed")
            try:
                return assembly.receive(self.sock)
            except BlockingIOError:
                await self._ready(write=False)

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
