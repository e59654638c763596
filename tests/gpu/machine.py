"""A machine with emulated GPUs: a real agent finds them, and its model processes share their memory."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.world import MIB, World
from gpu import emulated_book, rehearsal
from gpu.emulated_book import Book
from gpu.nvml import EmulatedNvml
from omnimodel.agent import contexts, spawner, supply
from omnimodel.agent.broker import Broker
from omnimodel.agent.zygotes import Zygotes
from omnimodel.api import OmniPool
from omnimodel.memory.devices import cuda, cuda_driver
from omnimodel.memory.ledger import Kind
from omnimodel.runtime.preload import PRELOAD

TESTS = Path(__file__).parents[1]
DEVICE_BYTES = 256 * MIB
CONTEXT_BYTES = 4 * MIB
SPARE_BYTES = 4 * MIB


@dataclass
class Machine:
    """The driver of the agent's process, what all processes have, and NVML."""

    driver: rehearsal.RehearsalDriver
    books: list[Book]
    nvml: EmulatedNvml

    @property
    def book(self) -> Book:
        """Of the first device."""
        return self.books[0]

    @asynccontextmanager
    async def served_by(self, world: World) -> AsyncIterator[None]:
        """The agent runs, and leaves nothing on any device."""
        await world.agent.start()
        yield
        await world.agent.stop(5.0)
        assert self.driver.left() == {}


@contextmanager
def machine(
    folder: Path,
    *,
    devices: int = 1,
    product: str = "NVIDIA H200",
    instances: dict[str, tuple[int, int]] | None = None,
    counts_imports: bool = False,
) -> Iterator[Machine]:
    """Make this machine one with GPUs, for as long as the context lasts.

    Args:
        folder: for its files.
        devices: how many it has.
        product: what they are called.
        instances: see `EmulatedNvml`.
        counts_imports: see `Book`.
    """
    for number in range(devices):
        gpu = folder / "gpus" / f"0000:{number:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t Emulated\nDevice Minor: \t {number}\n")
    options = f"{DEVICE_BYTES}, {CONTEXT_BYTES}, counts_imports={counts_imports}"
    places = [folder / f"book-{number}" for number in range(devices)]
    (folder / "emulated_place.py").write_text(
        "from pathlib import Path\nfrom gpu.emulated_book import Book\n"
        f"BOOKS = [Book(Path(place), {options}) for place in {[str(place) for place in places]!r}]\n"
    )
    books = [Book(place, DEVICE_BYTES, CONTEXT_BYTES, counts_imports=counts_imports) for place in places]
    nvml = EmulatedNvml(devices, instances, books)
    with pytest.MonkeyPatch.context() as patch:
        driver = rehearsal.RehearsalDriver(DEVICE_BYTES, devices, product, books.__getitem__)
        patch.setattr(cuda_driver, "_loaded", [driver])
        patch.setattr(cuda_driver, "CONTROL_NODE", "/dev/null")
        patch.setattr(cuda_driver, "MEMORY_NODE", "/dev/zero")
        patch.setattr(cuda_driver, "GPUS", folder / "gpus")
        patch.setattr(cuda, "TritonDecoder", lambda _context: driver.decode)
        patch.setattr(cuda.CudaDevice, "context_bytes", CONTEXT_BYTES)
        patch.setattr(contexts, "SPARE_BYTES", SPARE_BYTES)
        patch.setitem(sys.modules, "pynvml", nvml)
        zygotes = functools.partial(
            Zygotes, preload=[*PRELOAD, "gpu.served"], import_path=[str(TESTS), str(folder)]
        )  # fmt: skip
        patch.setattr(spawner, "Zygotes", zygotes)
        patch.setattr(supply, "ARENA_SHARE", 0.25)
        driver.run()
        yield Machine(driver, books, nvml)


def pool(**device) -> OmniPool:
    """A pool on its GPU."""
    spec = {"device": {"type": "cuda", "frameSize": 4 * MIB, **device}, "hostMemory": 2048 * MIB}
    return OmniPool.model_validate({"metadata": {"name": "default"}, "spec": spec})


def check(world: World, gpu: Machine) -> None:
    """The ledger says of each process what the driver says, and no more is held than there is."""
    world.check_ledger()
    for book, broker in zip(gpu.books, world.brokers.values(), strict=True):
        held = dict(book.processes())
        device = broker.memory.ledger.device
        for instance in broker.instances.values():
            process = instance.process
            slot = held.get(process.pid) if process else None
            context_bytes = device.held_bytes(instance.name, Kind.CONTEXT)
            working_bytes = device.held_bytes(instance.name, Kind.WORKING)
            assert (slot.bytes if slot else 0) <= context_bytes + working_bytes, instance.name
            if process is None:
                assert (context_bytes, working_bytes) == (0, 0), instance.name
        physical_bytes = device.frames * device.frame_bytes + sum(
            device.held_bytes(kind=kind) for kind in (Kind.WORKING, Kind.CONTEXT)
        )
        assert physical_bytes <= device.capacity_bytes


@contextmanager
def somebody_else(book: Book) -> Iterator[None]:
    """A process of somebody else that has all of a device that is free."""
    process = subprocess.Popen(["sleep", "600"])
    slot = book.claim(emulated_book._identity(Path(f"/proc/{process.pid}")))
    slot.bytes = DEVICE_BYTES - book.used_bytes()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        dict(book.processes())  # what it had is free


async def give_frames_up(broker: Broker) -> None:
    """Have a device keep no frames that are free, so that somebody else can have their room."""
    account = broker.memory.ledger.device
    account.hold("default/other", Kind.CONTEXT, account.free_bytes)
    await broker.memory.frames.make_room()
    account.give_back("default/other", Kind.CONTEXT)
