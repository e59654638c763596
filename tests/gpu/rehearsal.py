"""The GPU benchmark on a CPU: agent and model processes on emulated drivers, with real memfds between them.

What is real: the frames that pass between processes, the fence page, mapping and unmapping, the commands, the models
(small ones). Run as a program it is the zygote, in place of `cuda_trial`.
"""

# ruff: noqa: N802  (functions have the driver's own names)
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gpu.emulated import EmulatedDriver
from gpu.emulated_book import Book
from omnimodel.memory.devices import cuda_driver
from omnimodel.memory.devices.cuda_window import CudaWindow


class RehearsalDriver(EmulatedDriver):
    """Adds what the benchmark calls beyond the backend, and streams that proceed by themselves while they may."""

    def __init__(
        self,
        capacity_bytes: int,
        devices: int = 1,
        product: str = "NVIDIA H200",
        book_of: Callable[[int], Book] | None = None,
    ) -> None:
        super().__init__(capacity_bytes, devices=devices, product=product, book_of=book_of)
        self.flows = threading.Event()
        self.flows.set()

    def step(self) -> bool:
        return self.flows.is_set() and super().step()

    def lose(self) -> None:
        """Fail as a device does that has had a fault: what was queued never runs."""
        with self.lock:
            self.fail["cuEventQuery"] = 0
            for queue in self.streams.values():
                queue.clear()

    def do_cuMemAllocHost(self, size):
        (address,) = self.do_cuMemAlloc(size)
        self.registered[address] = size
        return (address,)

    def do_cuMemFreeHost(self, address):
        del self.registered[address]
        self.do_cuMemFree(address)

    def do_cuMemsetD8(self, address, value, size):
        ctypes.memset(address, value, size)

    def do_cuDriverGetVersion(self):
        return (13000,)

    def run(self) -> None:
        """Let the streams proceed in a thread."""

        def pump() -> None:
            while True:
                with self.lock:
                    busy = self.step()
                if not busy:
                    time.sleep(0.0005)

        threading.Thread(target=pump, daemon=True).start()


class RehearsalMeter:
    """NVML of the emulated driver."""

    def __init__(self, bus_id: str) -> None:
        (self.driver,) = cuda_driver._loaded

    def used_bytes(self) -> int:
        return self.driver.used_bytes

    def process_bytes(self) -> dict[int, int]:
        return {}


def bind(window: CudaWindow) -> Any:
    """A tensor over host memory in place of `CudaWindow._bind`."""
    import torch

    return torch.frombuffer((ctypes.c_ubyte * window.size_bytes).from_address(window._base), dtype=torch.uint8)


def wait(window: CudaWindow, end_offset: int, stream: int | None = None) -> None:
    """A CPU computes at once, so that the wait is the host's."""
    if window._page is None or not window._waiting:
        return
    wanted = window._fence_base + -(-end_offset // window._frame_bytes)
    deadline = time.monotonic() + 30
    while (window._page.value() - wanted) % (1 << 32) >= 1 << 31:
        assert time.monotonic() < deadline, "the copy never came"
        time.sleep(0.0005)


def on_the_cpu() -> Any:
    """The module `cuda_trial` with small models and no GPU under torch."""
    import torch
    import transformers

    from omnimodel.memory.devices import cuda_trial

    class Stream:
        cuda_stream = 0

        def synchronize(self) -> None:
            pass

    class Trial(cuda_trial.Trial):
        def __init__(self) -> None:
            super().__init__()
            self.device = torch.device("cpu")

        def capture(self, command, descriptors):
            generator = torch.Generator().manual_seed(3)
            self.static_in = torch.randn(8, 512, generator=generator).to(torch.bfloat16)
            return self.replay(command, descriptors)

        def replay(self, command, descriptors):
            self.window.wait(self.image_bytes)
            with torch.inference_mode():
                output = self.module(self.static_in)
            return {"digest": hashlib.sha256(output.view(torch.int16).numpy().tobytes()).hexdigest()}

    def skeleton(kind: str) -> Any:
        name, _, layers = kind.partition(":")
        with torch.device("meta"):
            if name == "llama":
                config = transformers.LlamaConfig(
                    hidden_size=128,
                    intermediate_size=256,
                    num_hidden_layers=int(layers),
                    num_attention_heads=1,
                    num_key_value_heads=1,
                    vocab_size=128256,
                    tie_word_embeddings=False,
                )
                module = transformers.LlamaForCausalLM(config)
            else:
                module = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(int(layers))])
            return module.to(torch.bfloat16).eval()

    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    CudaWindow._bind = bind
    CudaWindow.wait = wait
    cuda_trial.Trial = Trial
    cuda_trial.skeleton = skeleton
    return cuda_trial


if __name__ == "__main__":
    cuda_driver._loaded[:] = [RehearsalDriver(capacity_bytes=1 << 40)]
    trial = on_the_cpu()
    trial.zygote(trial.Link(socket.socket(fileno=int(sys.argv[1]))))
