"""A model's process for the benchmark and the tests of the cuda backend: a module bound to a window, on command.

Run as a program it is a zygote: it imports torch and transformers, starts no thread and calls no driver, and forks a
process for every channel that it is sent. Each process answers commands, one JSON object a packet, descriptors with
it. No sandbox and no HTTP: what is measured is the memory alone.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from omnimodel.memory.devices.cuda_driver import driver
from omnimodel.memory.devices.cuda_trial_link import Link
from omnimodel.memory.devices.cuda_window import CudaWindow

if TYPE_CHECKING:
    from transformers import LlamaConfig

IMAGE_ALIGNMENT_BYTES = 4096
TENSOR_ALIGNMENT_BYTES = 64
STACK_WIDTH = 2048

Slot = tuple[str, tuple[int, ...], int, int]  # name, shape, offset, bytes


def llama_config(layers: int) -> LlamaConfig:
    """The 8B shape with so many layers; 32 is its own number."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def skeleton(kind: str) -> torch.nn.Module:
    """A module without weights: `llama:<layers>` of the 8B shape, or `stack:<layers>` of square matrices."""
    name, _, layers = kind.partition(":")
    if name == "llama":
        from transformers import LlamaForCausalLM

        config = llama_config(int(layers))
        with torch.device("meta"):
            module: torch.nn.Module = LlamaForCausalLM(config)
        return module.to(torch.bfloat16).eval()
    with torch.device("meta"):
        parts = [torch.nn.Linear(STACK_WIDTH, STACK_WIDTH, bias=False) for _ in range(int(layers))]
        return torch.nn.Sequential(*parts).to(torch.bfloat16).eval()


def layout(module: torch.nn.Module) -> tuple[list[Slot], int]:
    """Where each parameter lies in the image, in the module's order, and the image's bytes."""
    slots: list[Slot] = []
    offset = 0
    for name, parameter in module.named_parameters():
        size = parameter.numel() * parameter.element_size()
        slots.append((name, tuple(parameter.shape), offset, size))
        offset += -(-size // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
    return slots, -(-offset // IMAGE_ALIGNMENT_BYTES) * IMAGE_ALIGNMENT_BYTES


class Trial:
    """One process's model and window."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.window: CudaWindow | None = None
        self.module: torch.nn.Module | None = None
        self.image_bytes = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static_in: torch.Tensor | None = None
        self.static_out: torch.Tensor | None = None

    def ready(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Start CUDA."""
        began = time.perf_counter()
        torch.ones(1, device=self.device).add_(1)
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - began}

    def generate(self, command: dict[str, Any], _: list[int]) -> dict[str, Any]:
        """Write an image of random weights."""
        slots, size = layout(skeleton(command["kind"]))
        generator = torch.Generator(device=self.device).manual_seed(command["seed"])
        with open(command["path"], "wb") as stream:
            stream.truncate(size)
        image = torch.from_file(command["path"], shared=True, size=size, dtype=torch.uint8)
        total = 0
        for name, shape, offset, length in slots:
            weights = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            if "norm" in name:
                weights.fill_(1)
            else:
                weights.normal_(0, 0.02, generator=generator)
            part = weights.view(-1).view(torch.uint8)
            image[offset : offset + length].copy_(part)
            total += int(part.view(torch.int64).sum())
            del weights, part
        torch.cuda.empty_cache()
        return {"bytes": size, "sum": total & (2**63 - 1), "slots": slots}

    def build(self, command: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Bind a skeleton to a window; the descriptor is the fence's."""
        began = time.perf_counter()
        self.module = module = skeleton(command["kind"])
        slots, self.image_bytes = layout(module)
        frame_bytes = command["frame_bytes"]
        self.window = window = CudaWindow("cuda:0", -(-self.image_bytes // frame_bytes), frame_bytes)
        window.follow(descriptors.pop())
        ends: dict[int, int] = {}
        for name, shape, offset, size in slots:
            owner_name, _, leaf = name.rpartition(".")
            owner = module.get_submodule(owner_name)
            weights = window.tensor(offset, size).view(torch.bfloat16).view(shape)
            owner.register_parameter(leaf, torch.nn.Parameter(weights, requires_grad=False))
            ends[id(owner)] = max(ends.get(id(owner), 0), offset + size)
        for part in module.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                if buffer.is_meta:  # only the rotary embedding's frequencies, which are no weights
                    inverse = 1.0 / (10000.0 ** (torch.arange(0, 128, 2, device=self.device).float() / 128))
                    part.register_buffer(name, inverse, persistent=False)
        self._wait_before_use(module, ends)
        return {"seconds": time.perf_counter() - began, "frames": -(-self.image_bytes // frame_bytes)}

    def _wait_before_use(self, module: torch.nn.Module, ends: dict[int, int]) -> None:
        window = self.window
        assert window is not None
        layers = getattr(getattr(module, "model", None), "layers", None)
        groups = list(layers) if layers is not None else []
        inner = {id(part) for group in groups for part in group.modules()}
        groups += [part for part in module.modules() if id(part) in ends and id(part) not in inner]
        for group in groups:
            end = max(ends.get(id(part), 0) for part in group.modules())
            group.register_forward_pre_hook(lambda *_, end=end: window.wait(end))

    def wake(self, command: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Map frames; with `prefill` answer a prompt as well, layer by layer behind the copy."""
        assert self.window is not None
        began = time.perf_counter()
        self.window.map(descriptors, fence_base=command.get("fence_base"))
        mapped = time.perf_counter()
        reply: dict[str, Any] = {"map_seconds": mapped - began}
        if "prefill" in command:
            reply |= self.prefill(command, [])
        return reply

    def evict(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Unmap."""
        assert self.window is not None
        began = time.perf_counter()
        self.window.unmap()
        return {"seconds": time.perf_counter() - began}

    def prefill(self, command: dict[str, Any], _: list[int]) -> dict[str, Any]:
        """One forward pass over a prompt of so many tokens; the last position's logits, as a digest."""
        assert self.module is not None
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(7)
        prompt = torch.randint(0, 128256, (1, command["prefill"]), generator=generator).to(self.device)
        with torch.inference_mode():
            logits = self.module(prompt, use_cache=False, logits_to_keep=1).logits
        digest = hashlib.sha256(logits.view(torch.int16).cpu().numpy().tobytes()).hexdigest()
        return {"seconds": time.perf_counter() - began, "digest": digest, "argmax": int(logits.argmax())}

    def sum(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Sum of the image as 64-bit integers, as `generate` said it; waits for the copy."""
        assert self.window is not None
        self.window.wait(self.image_bytes)
        whole = self.window.tensor(0, self.image_bytes).view(torch.int64)
        return {"sum": int(whole.sum()) & (2**63 - 1)}

    def capture(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Capture a graph of one forward pass of a stack."""
        assert self.module is not None
        assert self.window is not None
        generator = torch.Generator().manual_seed(3)
        self.static_in = torch.randn(8, STACK_WIDTH, generator=generator).to(torch.bfloat16).to(self.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), torch.inference_mode():
            for _attempt in range(2):
                self.module(self.static_in)
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph):
            self.static_out = self.module(self.static_in)
        return self.replay({}, [])

    def replay(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Replay the graph behind the copy; its output as a digest."""
        assert self.graph is not None
        assert self.static_out is not None
        assert self.window is not None
        self.window.wait(self.image_bytes)
        self.graph.replay()
        output = self.static_out.view(torch.int16).cpu().numpy().tobytes()
        return {"digest": hashlib.sha256(output).hexdigest()}

    def cycle(self, command: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Wake and replay in one command."""
        return self.wake(command, descriptors) | self.replay(command, [])

    def stuck(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Wait for a copy that never comes, and answer at once."""
        assert self.window is not None
        assert self.window._page is not None  # noqa: SLF001
        stream = torch.cuda.current_stream().cuda_stream
        self.window._page.wait(stream, self.window._page.value() + 1000)  # noqa: SLF001
        return {}

    def write(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Write into the window, which must fail."""
        assert self.window is not None
        self.window.tensor(0, 64).fill_(1)
        torch.cuda.synchronize()
        return {}

    def memory(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        """Resident bytes of the process."""
        with open("/proc/self/status") as lines:
            rss = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
        return {"rss": rss, "descriptors": len(os.listdir("/proc/self/fd"))}


def serve(link: Link) -> None:
    """Answer commands until the other side is gone."""
    trial = Trial()
    while True:
        try:
            command, descriptors = link.receive()
        except (EOFError, ConnectionResetError):
            return
        handler: Callable[[dict[str, Any], list[int]], dict[str, Any]] = getattr(trial, command["op"])
        try:
            reply = handler(command, descriptors)
        except Exception as error:  # goes back to the one who asked
            reply = {"error": f"{type(error).__name__}: {error}"}
        link.send(reply)


def zygote(link: Link) -> None:
    """Fork a process for each channel that arrives."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    skeleton("llama:1")
    skeleton("stack:1")
    driver()  # loads the bindings, not libcuda
    link.send({"ready": True})
    while True:
        try:
            _, descriptors = link.receive()
        except (EOFError, ConnectionResetError):
            return
        child = os.fork()
        if child == 0:
            link.sock.close()
            serve(Link(socket.socket(fileno=descriptors[0])))
            os._exit(0)
        os.close(descriptors[0])
        link.send({"pid": child})


if __name__ == "__main__":
    zygote(Link(socket.socket(fileno=int(sys.argv[1]))))
