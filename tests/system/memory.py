"""Watches device memory from outside: what the ledger says of it, and what processes and frames really hold."""

from __future__ import annotations

import glob
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from running import Up

BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system
PAUSE_SECONDS = 0.01


@dataclass
class Watch:
    """Samples until it is stopped; a context manager.

    Args:
        up: the running system.
    """

    up: Up
    samples: int = 0
    most_ledger_bytes: int = 0
    most_real_bytes: int = 0
    over: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._sample()
            time.sleep(PAUSE_SECONDS)

    def _sample(self) -> None:
        (pool,) = (item["status"] for item in self.up.client.objects("omnipools"))
        budget_bytes = pool["budgetBytes"]
        ledger_bytes = pool["residentBytes"] + pool["promisedBytes"] + pool["workingBytes"]
        before = self._residents()
        real_bytes = frame_bytes(self.up.process.pid)
        private = {name: private_bytes(pid) for name, (pid, _) in before.items()}
        after = self._residents()
        # Of those resident all along, each holds what it held when the frames were counted.
        real_bytes += sum(held for name, held in private.items() if after.get(name) == before[name])
        self.samples += 1
        self.most_ledger_bytes = max(self.most_ledger_bytes, ledger_bytes)
        self.most_real_bytes = max(self.most_real_bytes, real_bytes)
        if max(ledger_bytes, real_bytes) > budget_bytes:
            self.over.append(f"ledger {ledger_bytes}, real {real_bytes}, budget {budget_bytes}: {private}")

    def _residents(self) -> dict[str, tuple[int, int]]:
        """Process and number of wakes of each resident model."""
        return {
            item["metadata"]["name"]: (entry["pid"], entry["wakes"])
            for item in self.up.client.objects("omnimodels")
            for entry in resident(item["status"])
        }


def resident(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where a model is resident."""
    return [entry for entry in status.get("residency", ()) if entry["tier"] == "resident"]


def frame_bytes(pid: int) -> int:
    """Memory that the frames of an agent take: each is a file without a name, seen among its descriptors."""
    found = 0
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            if os.readlink(descriptor.path).startswith("/memfd:frame"):
                found += os.stat(descriptor.path).st_blocks * BLOCK_BYTES
    return found


def private_bytes(pid: int) -> int:
    """Memory that a process and everything it started share with no other."""
    found = 0
    for one in (pid, *children(pid)):
        with suppress(OSError), open(f"/proc/{one}/smaps_rollup", encoding="ascii") as file:
            found += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))
    return found


def children(pid: int) -> list[int]:
    """All processes below one, whichever of its threads started them."""
    found = []
    for tasks in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(tasks, encoding="ascii") as file:
            for child in map(int, file.read().split()):
                found += [child, *children(child)]
    return found
