"""Imports the heavy libraries once and forks a model's process per request, without a sandbox.

`python forkserver.py DESCRIPTOR`: a message with three descriptors (control channel, listening socket, log) forks a
child that runs `serve.run` on them; the answer is its pid.
"""

import gc
import os
import signal
import socket
import sys

from omnimodel.protocol.channel import Channel, ChannelClosed
from omnimodel.runtime.preload import preload

MODULES = (
    "torch",
    "aiohttp.web",
    "jinja2",
    "tokenizers",
    "transformers",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.models.whisper.modeling_whisper",
    "omnimodel.runtime.serve",
    "omnimodel.runtime.engines.own",
    "omnimodel.runtime.generation.serving",
)


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    assert preload(MODULES, lambda *_: None) == []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.collect()
    gc.freeze()
    channel.send({"up": True})
    while True:
        try:
            message, descriptors = channel.receive()
        except ChannelClosed:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            run(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send({"pid": pid})


def run(message: dict, descriptors: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control, listen, log = descriptors
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        from omnimodel.runtime import serve

        status = serve.run(Channel(socket.socket(fileno=control)), message["instance"], {"listen": listen})
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


main()
