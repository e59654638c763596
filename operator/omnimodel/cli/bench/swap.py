"""`omni bench swap`: how fast weights come and go, and whether every answer stays right over many swaps."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.progress import track

from omnimodel.cli import output
from omnimodel.cli.bench.contention import contention
from omnimodel.cli.bench.report import Report, json_option, median
from omnimodel.cli.bench.system import System, frame_bytes, running, system_options
from omnimodel.memory.devices import pages
from omnimodel.memory.devices.host import HostDevice

CHUNK_BYTES = 4 << 20
CONNECTION_SECONDS = 20.0  # an idle connection has been closed by then
TOKENIZING_TASKS = {"text-generation", "embeddings", "text-classification", "automatic-speech-recognition"}
VOLATILE = {"id", "created", "system_fingerprint", "seconds", "timings"}  # of an answer, different each time


@click.command()
@click.option("--swaps", type=click.IntRange(min=0), default=1000, show_default=True, help="Random swaps.")
@click.option("--image-mib", type=click.IntRange(min=16), default=256, show_default=True, help="Size of the image that "
              "is copied for the comparison with the machine's own copy rate.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Repetitions of each timing.")
@click.option("--questions", type=click.IntRange(min=0), default=300, show_default=True, help="Asked by many clients "
              "at once.")  # fmt: skip
@click.option("--clients", type=click.IntRange(min=1), default=8, show_default=True, help="How many they are.")
@click.option("--seed", default=1, show_default=True, help="Of the random order.")
@json_option
@system_options
def command(
    swaps: int,
    image_mib: int,
    rounds: int,
    questions: int,
    clients: int,
    seed: int,
    json_path: Path | None,
    address: str | None,
    catalog: Path,
    state_dir: Path,
) -> None:
    """Measure wakes and evicts, then swap at random and compare every answer with the first one."""
    report = Report("swap")
    size_bytes = frame_bytes(catalog)
    for threads in sorted({1, len(os.sched_getaffinity(0))}):  # the agent copies on all cores
        _copy(report, image_mib << 20, size_bytes, threads, rounds)
    with running(address, catalog, state_dir) as system:
        _timings(report, system, rounds)
        if swaps:
            _rotation(report, system, swaps, seed)
        _idle(report, system)
        if questions:
            contention(report, system, questions, clients, seed)
    report.finish(json_path)


def _copy(report: Report, image_bytes: int, size_bytes: int, threads: int, rounds: int) -> None:
    """An image into frames, against a plain copy of the same bytes by as many threads; taken in turn."""
    device = HostDevice(size_bytes, threads=threads)
    try:
        with tempfile.NamedTemporaryFile(dir=os.environ.get("TMPDIR", "/var/tmp")) as file:  # noqa: S108
            block = os.urandom(1 << 20)
            for _ in range(image_bytes >> 20):
                file.write(block)
            file.flush()
            staged = device.stage(file.name, image_bytes)
            frames = device.create(-(-image_bytes // size_bytes))
            target = pages.reserve(image_bytes)
            plain_file = os.memfd_create("plain")
            os.ftruncate(plain_file, image_bytes)
            pages.map_shared(plain_file, image_bytes, address=target, writable=True, populate=True)
            pages.collapse(target, image_bytes)  # the same kind of pages as the frames have
            wakes, plain = [], []
            for _ in range(rounds + 1):
                wakes.append(device.copy(staged, frames).wait())
                plain.append(_plain_copy(target, staged.address, image_bytes, threads))
            pages.release(target, image_bytes)
            os.close(plain_file)
            device.unstage(staged)
    finally:
        device.close()
    wake_seconds, plain_seconds = median(wakes[1:]), median(plain[1:])
    rate = image_bytes / 1e9
    report.add(f"copy rate of the machine, {threads} threads", rate / plain_seconds, "GB/s", note="memcpy, same pages")
    note = f"{image_bytes >> 20} MiB in frames of {size_bytes >> 20} MiB"
    report.add(f"image into frames, {threads} threads", rate / wake_seconds, "GB/s", note=note)
    report.add(
        f"their ratio, {threads} threads",
        plain_seconds / wake_seconds,
        goal=0.8,
        at_least=True,
        note="in turn",
    )


def _plain_copy(target: int, source: int, size_bytes: int, threads: int) -> float:
    """Seconds that a plain copy takes, shared out in chunks among threads."""
    offsets = iter(range(0, size_bytes, CHUNK_BYTES))

    def work() -> None:
        for offset in offsets:
            pages.copy(target + offset, source + offset, min(CHUNK_BYTES, size_bytes - offset))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def _timings(report: Report, system: System, rounds: int) -> None:
    """Wake and evict each model in turn, round after round: by its next turn others have overwritten its frames."""
    models = system.evictable()
    wakes: dict[str, list[float]] = {}
    evicts: dict[str, list[float]] = {}
    for _ in _progress(range(rounds), "wakes and evicts"):
        for item in models:
            name, namespace = item["metadata"]["name"], item["metadata"].get("namespace", "default")
            woken, evicted = system.client.wake(namespace, name, 300.0), system.client.evict(namespace, name, 60.0)
            wakes.setdefault(name, []).append(float(woken.get("wakeSeconds") or 0))
            evicts.setdefault(name, []).append(float(evicted.get("evictSeconds") or 0))
    for item in models:
        name = item["metadata"]["name"]
        weights_bytes = (item["status"].get("footprint") or {}).get("weightsBytes") or 0
        report.add(f"wake {name}", median(wakes[name]) * 1000, "ms", note=output.size(weights_bytes))
        report.add(f"evict {name}", median(evicts[name]) * 1000, "ms", goal=5.0)
    every = [seconds for found in evicts.values() for seconds in found]
    report.add("evict, all models", median(every) * 1000, "ms", goal=5.0, note="median")


def _idle(report: Report, system: System) -> None:
    """Private memory of each model's process once it has answered and was evicted."""
    if not system.pid:
        return
    found: dict[bool, list[float]] = {True: [], False: []}  # by whether it has a tokenizer
    for item in system.evictable():
        name, namespace = item["metadata"]["name"], item["metadata"].get("namespace", "default")
        system.ask(item)
        system.client.evict(namespace, name, 60.0)
        (entry,) = system.client.model(namespace, name)["status"]["residency"]
        if entry["pid"]:
            private_mib = psutil.Process(entry["pid"]).memory_full_info().uss / (1 << 20)
            found[item["spec"]["runtime"]["task"] in TOKENIZING_TASKS].append(private_mib)
            report.add(f"idle private memory {name}", private_mib, "MiB", note="after an answer and an evict")
    for with_tokenizer, every in found.items():
        if every:
            text = f"idle private memory, median {'with' if with_tokenizer else 'without'} a tokenizer"
            report.add(text, median(every), "MiB", goal=None if with_tokenizer else 30.0, note=f"{len(every)} models")


def _rotation(report: Report, system: System, swaps: int, seed: int) -> None:
    """Ask models in random order, so that nearly every question is a swap, and compare each answer with the first."""
    models = system.models()
    goldens: dict[str, bytes] = {}
    for item in models:
        answer = system.ask(item)
        report.failures += [f"{output.full_name(item)}: {text}" for text in system.wrong(item, answer)]
        goldens[output.full_name(item)] = comparable(answer.body)
    wakes_before = system.wakes()
    order = random.Random(seed)  # noqa: S311 - an order, no secret
    failed = 0
    early: tuple[int, int] = (0, 0)
    began = time.perf_counter()
    asked = 0
    for _ in _progress(range(swaps), "random swaps"):
        item = order.choice(models)
        answer = system.ask(item)
        asked += 1
        if answer.status != 200 or comparable(answer.body) != goldens[output.full_name(item)]:
            failed += 1
            wrong = system.wrong(item, answer) or ["another answer than the first time"]
            report.failures.append(f"swap {asked}, {output.full_name(item)}: {wrong[0]}")
        if asked == max(1, swaps // 4):
            paused, woken = time.perf_counter(), system.wakes()
            early = _at_rest(system, models)
            began += time.perf_counter() - paused
            wakes_before += system.wakes() - woken
    seconds = time.perf_counter() - began
    wakes = system.wakes() - wakes_before
    late = _at_rest(system, models)
    report.add("questions in random order", asked, note=f"{len(models)} models, seed {seed}, {seconds:.0f} s")
    report.add("wakes they took", wakes)
    report.add("answers that were not the first one", failed, goal=0)
    if not system.pid:  # another machine's: nobody here can measure it
        return
    note = "of all processes, with every model evicted"
    report.add("private memory, 1/4 of the way", early[0] / (1 << 20), "MiB", note=note)
    report.add("private memory, at the end", late[0] / (1 << 20), "MiB", goal=1.05 * early[0] / (1 << 20) + 16)
    report.add("descriptors, 1/4 of the way", early[1], note=f"{note}; frames left out")
    report.add("descriptors, at the end", late[1], goal=early[1] + 16)


def _at_rest(system: System, models: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """The footprint when every model has a process and none a request, a weight or a connection."""
    for item in models:
        system.ask(item)
    for item in system.evictable():
        system.client.evict(item["metadata"].get("namespace", "default"), item["metadata"]["name"], 60.0)
    time.sleep(CONNECTION_SECONDS)
    return system.footprint()


def comparable(body: bytes) -> bytes:
    """An answer without what differs each time; bytes that are no JSON stay as they are."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body
    return json.dumps(_without_volatile(parsed), sort_keys=True).encode()


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(item) for key, item in value.items() if key not in VOLATILE}
    return [_without_volatile(item) for item in value] if isinstance(value, list) else value


def _progress(items: Sequence[Any], text: str) -> Any:
    console = Console(stderr=True)
    return track(items, text, console=console) if console.is_terminal else iter(items)
