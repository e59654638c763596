"""What runs inside a sandbox in these tests: a small server on the control channel that executes what a test sends.

Its messages are those of `protocol.process`; `Ping` is answered, and a `Publish` whose spec has `code` runs that code
with `answer` as its dictionary of results. It stands in for the runtime's `serve`, which is tested in its own room.
"""

from __future__ import annotations

import contextlib
import os
import traceback

from omnimodel.protocol.channel import Channel
from omnimodel.protocol.process import Envelope, Progress, Publish, Reply, Start, Stop, encode

listening = None


def run(channel: Channel, instance: str, descriptors: dict[str, int]) -> int:
    """Answer until told to stop."""
    globals_ = {"os": os, "descriptors": descriptors, "channel": channel, "__name__": "inside"}
    while True:
        message, received = channel.receive()
        envelope = Envelope.from_message(message)
        if envelope.instance != instance:
            channel.send(encode(Reply(envelope.id, ok=False, reason="InternalError", message="meant for another")))
            continue
        command = envelope.command
        if isinstance(command, Stop):
            channel.send(encode(Reply(envelope.id, ok=True)))
            return 0
        answer: dict[str, object] = {"received": len(received)}
        globals_["received"] = received
        try:
            if isinstance(command, Start | Publish) and "code" in command.spec:
                globals_ |= {
                    "answer": answer,
                    "progress": lambda stage, done, total: channel.send(encode(Progress(stage, done, total))),
                }
                exec(compile(command.spec["code"], "code", "exec"), globals_)
            channel.send(encode(Reply(envelope.id, ok=True, values=answer)))
        except Exception as error:
            with contextlib.suppress(Exception):
                channel.send(encode(Reply.failed(envelope.id, error, traceback.format_exc())))
