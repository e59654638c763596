"""Many clients over more models than the device holds: how long requests are held, and what it costs a resident one."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from omnimodel.cli import output
from omnimodel.cli.bench.report import Report, median, percentile
from omnimodel.cli.bench.system import System
from omnimodel.cli.client import Answer
from omnimodel.placement.state import Constants
from omnimodel.protocol.dispatch import WAITED_HEADER

REFUSED = {429, 503, 504}  # answers that a client may send again after
QUIET_REQUESTS = 200  # to a resident model before anybody else asks
RESIDENT_TIMES = 1.5  # how much longer its p99 may be beside swaps


@dataclass
class Seen:
    """What clients saw, all together."""

    held_seconds: list[float] = field(default_factory=list)  # of those that had to wait
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def take(self, system: System, item: dict[str, Any], answer: Answer) -> None:
        """Note an answer."""
        waited_seconds = float(answer.headers.get(WAITED_HEADER) or 0)
        if waited_seconds > 0:
            self.held_seconds.append(waited_seconds)
        if answer.status in REFUSED:
            self.refused += 1
        else:
            self.wrong += [f"{output.full_name(item)}: {text}" for text in system.wrong(item, answer)]


def contention(report: Report, system: System, questions: int, clients: int, seed: int) -> None:
    """Ask models at random from many clients at once, and a model that is kept resident all the while."""
    models = system.evictable()
    names = {output.full_name(item) for item in models}
    kept = next((item for item in system.models() if output.full_name(item) not in names), None)
    order = random.Random(seed)  # noqa: S311 - an order, no secret
    asked = [order.choice(models) for _ in range(questions)]
    seen, of_kept = Seen(), Seen()
    quiet = [_seconds(system, kept, of_kept) for _ in range(QUIET_REQUESTS)] if kept is not None else []
    busy: list[float] = []
    ended = threading.Event()

    def keep_asking() -> None:
        while kept is not None and not ended.is_set():
            busy.append(_seconds(system, kept, of_kept))

    resident = threading.Thread(target=keep_asking)
    wakes_before = system.wakes()
    began = time.perf_counter()
    resident.start()
    try:
        with ThreadPoolExecutor(clients) as threads:
            for item, answer in threads.map(lambda item: (item, system.ask(item)), asked):
                seen.take(system, item, answer)
    finally:
        ended.set()
        resident.join()
    seconds = time.perf_counter() - began
    wakes = system.wakes() - wakes_before
    report.failures += [*seen.wrong, *of_kept.wrong][:10]
    report.add("questions of many clients", questions, note=f"{clients} clients, {seconds:.0f} s")
    report.add("wrong answers among them", len(seen.wrong), goal=0)
    report.add("refused, to be sent again", seen.refused, note="429, 503 or 504")
    report.add("held, median", median(seen.held_seconds), "s", note=f"of {len(seen.held_seconds)} that had to wait")
    report.add("held, p99", percentile(seen.held_seconds, 0.99), "s", goal=Constants().fair_seconds)
    report.add("swaps", 60 * wakes / seconds, "1/min")
    report.add("swaps for each question", wakes / questions, goal=1.0, note="no model is woken and asked nothing")
    if quiet and busy:
        alone, beside = percentile(quiet, 0.99), percentile(busy, 0.99)
        report.add("kept model alone, p99", alone * 1000, "ms", note=output.full_name(kept or {}))
        report.add("kept model beside swaps, p99", beside * 1000, "ms", note=f"{len(busy)} requests")
        report.add("their ratio", beside / alone, goal=RESIDENT_TIMES, note="others compute on the same cores")


def _seconds(system: System, item: dict[str, Any], seen: Seen) -> float:
    began = time.perf_counter()
    answer = system.ask(item)
    seconds = time.perf_counter() - began
    seen.take(system, item, answer)
    return seconds
