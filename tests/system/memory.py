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
    frozen_samples: int = 0
    most_frozen_bytes: int = 0
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
        before, _ = self._holders()
        real_bytes = frame_bytes(self.up.process.pid)
        private = {name: private_bytes(pid) for name, (pid, _) in before.items()}
        after, frozen = self._holders()
        # Of those that were on the device all along, each holds what it held when the frames were counted.
        held = {name: found for name, found in private.items() if after.get(name) == before[name]}
        real_bytes += sum(held.values())
        frozen_bytes = sum(held.get(name, 0) for name in frozen)
        self.samples += 1
        self.frozen_samples += frozen_bytes > 0
        self.most_frozen_bytes = max(self.most_frozen_bytes, frozen_bytes)
        self.most_ledger_bytes = max(self.most_ledger_bytes, ledger_bytes)
        self.most_real_bytes = max(self.most_real_bytes, real_bytes)
        if max(ledger_bytes, real_bytes) > budget_bytes:
            self.over.append(f"ledger {ledger_bytes}, real {real_bytes}, budget {budget_bytes}: {private}")

    def _holders(self) -> tuple[dict[str, tuple[int, int]], set[str]]:
        """Process and number of wakes of each model that holds working memory, and which of them are frozen."""
        found, stopped = {}, set()
        for item in self.up.client.objects("omnimodels"):
            name = item["metadata"]["name"]
            for entry in item["status"].get("residency", ()):
                if entry["tier"] == "resident" or frozen(entry):
                    found[name] = (entry["pid"], entry["wakes"])
                    stopped |= {name} if frozen(entry) else set()
        return found, stopped


def frozen(entry: Mapping[str, Any]) -> bool:
    """Whether a model is off the device but for the working memory of requests that go on after its next wake."""
    return entry["tier"] == "warm" and entry["inFlight"] > 0 and entry["deviceBytes"] > 0


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
