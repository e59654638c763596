"""What stands for a server of vLLM or SGLang, written from their documents: neither can be installed without a GPU.

As theirs, it is a process that speaks HTTP and a child that has the device. The child's memory on the device is
mappings of memfds named `device`, which the emulated driver counts; its weights are really there, and every answer is
made from them. As theirs, it dies when it is asked something while it sleeps, and when it is told to sleep with a
request under way that it does not wait for. `STANDIN_FAULT` names what else goes wrong.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

CONTEXT_BYTES = 8 << 20
FAULT = os.environ.get("STANDIN_FAULT", "")


def tell(text: str) -> None:
    """Put a line into the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Allocation:
    """Memory on the device."""

    def __init__(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("unseen" if FAULT == "unseen" else "device")
        os.ftruncate(descriptor, size_bytes)
        self.map = mmap.mmap(descriptor, size_bytes)
        os.close(descriptor)

    def free(self) -> None:
        self.map.close()


class Engine:
    """The child: weights, a cache and a context, on the device or not.

    Args:
        weights: the file's bytes.
        cache_bytes: of its cache of keys and values.
        backup: whether weights are kept in host memory while it sleeps.
    """

    def __init__(self, weights: bytes, cache_bytes: int, *, backup: bool) -> None:
        self.context = Allocation(CONTEXT_BYTES)
        self.weights_bytes, self.cache_bytes, self.backup = len(weights), cache_bytes, backup
        self.kept = weights
        self.asleep = True
        self.wake()

    def wake(self) -> None:
        if not self.asleep:
            return
        self.weights, self.cache = Allocation(self.weights_bytes), Allocation(self.cache_bytes)
        self.weights.map[:] = self.kept
        self.asleep = False

    def sleep(self, *, backup: bool) -> None:
        self.kept = bytes(self.weights.map) if backup and FAULT != "garbled" else bytes(self.weights_bytes)
        self.asleep = True
        if FAULT == "keeps":
            return
        if FAULT == "late":
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


def child(engine: Engine, link: socket.socket) -> None:
    """Do what the parent says, one thing after the other."""
    for line in link.makefile():
        said = json.loads(line)
        if said["do"] == "sleep" and FAULT == "late":
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
        cache_bytes: of its cache.
        backup: whether weights are kept in host memory while it sleeps.
    """

    def __init__(self, model: str, names: list[str], cache_bytes: int, *, backup: bool) -> None:
        (path,) = Path(model).glob("*.safetensors")
        self.names, self.sleeping, self.running = names, False, 0
        self.changed = threading.Condition()
        self.turn = threading.Lock()
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            child(Engine(tensors(path), cache_bytes * (2 if FAULT == "greedy" else 1), backup=backup), theirs)
        theirs.close()
        self.link = ours
        self.lines = ours.makefile()
        threading.Thread(target=self.watch, daemon=True).start()
        self.do("generate")  # it has loaded its weights before the server listens
        tell(f"engine starts {os.getpid()}")

    def watch(self) -> None:
        os.wait()
        os._exit(1)  # "EngineCore died", and its API server with it

    def do(self, what: str, **more: object) -> str:
        with self.turn:
            self.link.sendall(json.dumps({"do": what, **more}).encode() + b"\n")
            line = self.lines.readline()
        return json.loads(line) if line else os._exit(1)

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
