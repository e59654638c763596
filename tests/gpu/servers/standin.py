"""What stands for a server of vLLM or SGLang, written from their documents: neither can be installed without a GPU.

As theirs, it is a process that speaks HTTP and a child for each device. A child's memory on its device is mappings of
memfds named by the device, which the emulated driver counts; its part of the weights is really there, and every answer
is made from all parts. As theirs, it dies when it is asked something while it sleeps, and when it is told to sleep with
a request under way that it does not wait for. `STANDIN_FAULT` names what else goes wrong: in every child, or with
`FAULT@1` in that of the second device.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

CONTEXT_BYTES = 8 << 20
FAULT, _, FAULTY_RANK = os.environ.get("STANDIN_FAULT", "").partition("@")
# The numbers of the devices that it is shown, which the emulated driver has for the last bytes of their UUIDs.
DEVICES = [int(shown[-2:], 16) for shown in os.environ.get("CUDA_VISIBLE_DEVICES", "00").split(",")]


def tell(text: str) -> None:
    """Put a line into the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Allocation:
    """Memory on a device that it is shown, the first unless another is said."""

    def __init__(self, size_bytes: int, rank: int = 0) -> None:
        self.rank = rank
        self.take(size_bytes)
        allocations.append(self)

    def take(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("unseen" if FAULT == "unseen" else f"device-{DEVICES[self.rank]}")
        os.ftruncate(descriptor, size_bytes)
        self.map = mmap.mmap(descriptor, size_bytes)
        os.close(descriptor)

    def free(self) -> None:
        allocations.remove(self)
        self.map.close()


allocations: list[Allocation] = []


def checkpointed(*_: object) -> None:
    """Be without memory on any device until told to restore it, as the driver does with a process from outside."""
    saved = [(each, bytes(each.map)) for each in allocations]
    for each in allocations:
        each.map.close()
    signal.sigwait({signal.SIGUSR2})
    for each, content in saved:
        each.take(len(content))
        each.map[:] = content


class Engine:
    """A child: weights, a cache and a context, on its device or not.

    Args:
        weights: its part of the file's bytes.
        cache_bytes: of its part of the cache of keys and values.
        backup: whether weights are kept in host memory while it sleeps.
        rank: number of its device among those that it is shown.
    """

    def __init__(self, weights: bytes, cache_bytes: int, *, backup: bool, rank: int = 0) -> None:
        self.rank, self.fault = rank, "" if FAULTY_RANK and rank != int(FAULTY_RANK) else FAULT
        self.context = Allocation(CONTEXT_BYTES, rank)
        if self.fault == "dies":
            os._exit(1)
        if self.fault == "greedy":
            cache_bytes *= 2
        self.weights_bytes, self.cache_bytes, self.backup = len(weights), cache_bytes, backup
        self.kept = weights
        self.asleep = True
        self.wake()

    def wake(self) -> None:
        if not self.asleep:
            return
        self.weights, self.cache = Allocation(self.weights_bytes, self.rank), Allocation(self.cache_bytes, self.rank)
        self.weights.map[:] = self.kept
        self.asleep = False

    def sleep(self, *, backup: bool) -> None:
        self.kept = bytes(self.weights.map) if backup and self.fault != "garbled" else bytes(self.weights_bytes)
        self.asleep = True
        if self.fault == "keeps":
            return
        if self.fault == "late":
            time.sleep(0.3)
        self.weights.free()
        self.cache.free()

    def generate(self) -> str:
        if self.asleep:
            tell("CUDA error: an illegal memory access was encountered")
            os._exit(1)
        return hashlib.sha256(self.weights.map).hexdigest()[:16]


def tensors(path: Path) -> bytes:
    """What a checkpoint holds behind its header."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def parts(content: bytes, count: int) -> list[bytes]:
    """Content cut into equal parts."""
    size = len(content) // count
    return [content[rank * size : (rank + 1) * size] for rank in range(count)]


def child(engine: Engine, link: socket.socket) -> None:
    """Do what the parent says, one thing after the other."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.signal(signal.SIGUSR1, checkpointed)
    for line in link.makefile():
        said = json.loads(line)
        if said["do"] == "sleep" and engine.fault == "late":
            link.sendall(b'""\n')
            engine.sleep(backup=said["backup"])
            continue
        answer = ""
        if said["do"] == "sleep":
            engine.sleep(backup=said["backup"])
        elif said["do"] == "wake":
            engine.wake()
        else:
            answer = engine.generate()
        link.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


class Server:
    """The parent's view of the child.

    Args:
        model: folder of the weights.
        names: that it answers to; empty for any.
        cache_bytes: of its cache on each device.
        backup: whether weights are kept in host memory while it sleeps.
        ranks: how many devices it is spread over.
    """

    def __init__(self, model: str, names: list[str], cache_bytes: int, *, backup: bool, ranks: int) -> None:
        (path,) = Path(model).glob("*.safetensors")
        if ranks > len(DEVICES):
            raise SystemExit(f"ValueError: World size ({ranks}) is larger than the number of GPUs ({len(DEVICES)})")
        self.names, self.sleeping, self.running = names, False, 0
        self.changed = threading.Condition()
        self.turn = threading.Lock()
        self.links = []
        if FAULT == "frontend":
            self.context = Allocation(1 << 20)
        for rank, part in enumerate(parts(tensors(path), ranks)):
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                ours.close()
                child(Engine(part, cache_bytes, backup=backup, rank=rank), theirs)
            theirs.close()
            self.links.append((ours, ours.makefile()))
        threading.Thread(target=self.watch, daemon=True).start()
        self.do("generate")  # it has loaded its weights before the server listens
        tell(f"engine starts {os.getpid()}")

    def watch(self) -> None:
        os.wait()
        os._exit(1)  # "EngineCore died", and its API server with it

    def do(self, what: str, **more: object) -> str:
        with self.turn:
            for link, _ in self.links:
                link.sendall(json.dumps({"do": what, **more}).encode() + b"\n")
            lines = [answers.readline() for _, answers in self.links]
        return "+".join(map(json.loads, lines)) if all(lines) else os._exit(1)

    def answer(self, seconds: float = 0.0) -> str:
        with self.changed:
            self.running += 1
        try:
            time.sleep(seconds)
            return self.do("generate")
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def sleep(self, *, wait: bool, backup: bool) -> None:
        with self.changed:
            if wait:
                self.changed.wait_for(lambda: not self.running)
            elif self.running:
                tell("CUDA error: an illegal memory access was encountered")
                os._exit(1)
        self.do("sleep", backup=backup)
        self.sleeping = True

    def wake(self) -> None:
        self.do("wake")
        self.sleeping = False


class Handler(BaseHTTPRequestHandler):
    """The OpenAI endpoint of both."""

    protocol_version = "HTTP/1.1"
    server_of: Server

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def say(self, status: int, value: object = None) -> None:
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def chat(self) -> None:
        asked = json.loads(self.body())
        model = asked.get("model")
        if self.server_of.names and model and model not in self.server_of.names:
            self.say(404, {"error": {"message": f"The model `{model}` does not exist."}})
            return
        text = asked["messages"][-1]["content"]
        seconds = float(text.removeprefix("slow ")) if text.startswith("slow ") else 0.0
        content = f"{self.server_of.answer(seconds)} {text}"
        self.say(200, {"choices": [{"message": {"role": "assistant", "content": content}}]})


class Threads(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True


class UnixThreads(Threads):
    address_family = socket.AF_UNIX

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, _ = super().get_request()
        return connection, ("unix", 0)
