"""What `omni bench gpu` measures, one function a row; each adds figures to the report."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from omnimodel.cli.bench.gpu_bench import GIBI, GIGA, MEBI, Bench, Model, Process
from omnimodel.memory.codec_file import pack
from omnimodel.memory.devices.cuda import CudaDevice, CudaWindow
from omnimodel.memory.devices.cuda_checkpoint import park, unpark
from omnimodel.memory.devices.cuda_copy import Staged
from omnimodel.memory.devices.cuda_driver import call, driver
from omnimodel.memory.devices.cuda_trial import llama_config
from omnimodel.memory.index import PACKED_FILE

PROMPT_TOKENS = 512
ROUNDS = 5
FRAME_SIZES = [size * MEBI for size in (16, 32, 64, 128, 256)]


def line(bench: Bench) -> None:
    """The machine's own rate: a plain copy of pinned memory to the device."""
    size = 2 * GIBI
    bench.device.context.enter()
    host, target = call("cuMemAllocHost", size), call("cuMemAlloc", size)
    rates = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _part in range(4):
            call("cuMemcpyHtoDAsync", target, host, size, 0)
        call("cuCtxSynchronize")
        rates.append(4 * size / (time.perf_counter() - began) / GIGA)
    call("cuMemFreeHost", host)
    call("cuMemFree", target)
    bench.line = statistics.median(rates)
    bench.report.add("the line: pinned host to device", bench.line, "GB/s")


def frame_sizes(bench: Bench) -> None:
    """What a frame's size costs: 15 GiB mapped and unmapped, and copied."""
    total = 15 * GIBI // FRAME_SIZES[-1] * FRAME_SIZES[-1]
    source = bench.device.arena.take(2 * GIBI)
    staged = Staged("frames", total, total, tuple(source * 8))  # the same bytes over and over
    try:
        for size in FRAME_SIZES:
            with closing(CudaDevice("cuda:0", size, arena_bytes=0)) as device:
                _one_frame_size(bench, device, staged)
    finally:
        bench.device.arena.give(source)


def _one_frame_size(bench: Bench, device: CudaDevice, staged: Staged) -> None:
    frames = device.create(staged.image_bytes // device.frame_bytes)
    maps, unmaps = [], []
    with closing(CudaWindow("cuda:0", len(frames), device.frame_bytes)) as window:
        for _ in range(3):
            descriptors = [os.dup(frame.descriptor) for frame in frames]
            began = time.perf_counter()
            window.map(descriptors)
            mapped = time.perf_counter()
            window.unmap()
            maps.append(mapped - began)
            unmaps.append(time.perf_counter() - mapped)
    seconds = [device.copy(staged, frames).wait(60) for _ in range(3)]
    name = f"frames of {device.frame_bytes // MEBI} MiB, {staged.image_bytes / GIBI:.0f} GiB:"
    bench.report.add(f"{name} map", 1e3 * min(maps), "ms")
    bench.report.add(f"{name} unmap", 1e3 * min(unmaps), "ms")
    bench.report.add(f"{name} copy", staged.image_bytes / statistics.median(seconds) / GIGA, "GB/s")


def wake(bench: Bench) -> None:
    """Wake and evict, raw: from the decision until the copy is over and the process has mapped."""
    model = bench.large()
    size = model.staged.image_bytes
    wakes, evicts, maps, copies = [], [], [], []
    equal = True
    for _ in range(ROUNDS):
        bench.poison(model.frames)
        began = time.perf_counter()
        copy = model.start(bench.device)
        reply = model.process.link.answer()
        copies.append(copy.wait(60))
        wakes.append(time.perf_counter() - began)
        maps.append(reply["map_seconds"])
        equal &= model.process.ask("sum")["sum"] == bench.image_sum
        began = time.perf_counter()
        model.process.ask("evict")
        evicts.append(time.perf_counter() - began)
    seconds = statistics.median(wakes)
    report = bench.report
    report.add("wake raw", seconds, "s")
    report.add("wake raw, rate", size / seconds / GIGA, "GB/s")
    report.add("wake raw, of the line", size / seconds / GIGA / bench.line, "ratio", 0.97)
    report.add("wake raw, copy alone of the line", size / statistics.median(copies) / GIGA / bench.line, "ratio")
    report.add("map in the process (during the copy)", 1e3 * statistics.median(maps), "ms")
    report.add("evict, first", 1e3 * evicts[0], "ms", 10, at_least=False)
    report.add("evict, later (the slowest)", 1e3 * max(evicts[1:]), "ms", 10, at_least=False)
    report.check("every byte equal after each wake", equal)
    half = [index % 2 == 0 for index in range(len(model.frames))]
    began = time.perf_counter()
    bench.device.copy(model.staged, model.frames, valid=half).wait(60)
    report.add("wake with half of the frames still there, of a whole", (time.perf_counter() - began) / seconds, "ratio")


def compressed(bench: Bench) -> None:
    """Wake from the packed form."""
    model = bench.large()
    packed = _packed(bench)
    size = model.staged.image_bytes
    raw, model.staged = model.staged, packed
    wakes, equal = [], True
    for _ in range(ROUNDS):
        bench.poison(model.frames)
        began = time.perf_counter()
        copy = model.start(bench.device)
        model.process.link.answer()
        copy.wait(60)
        wakes.append(time.perf_counter() - began)
        equal &= model.process.ask("sum")["sum"] == bench.image_sum
        model.process.ask("evict")
    model.staged = raw
    seconds = statistics.median(wakes)
    report = bench.report
    report.add("packed over unpacked bytes", packed.stored_bytes / size, "ratio")
    report.add("bits a weight", 16 * packed.stored_bytes / size, "bits")
    report.add("wake compressed", seconds, "s")
    report.add("wake compressed, effective", size / seconds / GIGA, "GB/s")
    report.add("wake compressed, of the line", size / seconds / GIGA / bench.line, "ratio", 1.30)
    report.check("every byte equal after each compressed wake", equal)


@dataclass(frozen=True)
class _Entry:
    dtype: str
    offset: int
    bytes: int


def _packed(bench: Bench) -> Staged:
    model = bench.large()
    if bench.packed is None:
        image = bench.folder / "image"
        tensors = [_Entry("bfloat16", offset, size) for _, _, offset, size in bench.slots]
        began = time.perf_counter()
        path = str(bench.folder / PACKED_FILE)
        pack(str(image), tensors, bench.device.frame_bytes, path, threads=len(os.sched_getaffinity(0)))
        bench.report.add("packing", model.staged.image_bytes / (time.perf_counter() - began) / GIGA, "GB/s")
        image.unlink()
        bench.packed = bench.device.stage(path, model.staged.image_bytes)
        os.unlink(path)
    return bench.packed


def first_token(bench: Bench) -> None:
    """Prompt to first token through a wake, the layers computing behind the copy."""
    model = bench.large()
    bench.device.copy(model.staged, model.frames).wait(60)
    descriptors = [frame.descriptor for frame in model.frames]
    model.process.ask("wake", descriptors)
    resident = [model.process.ask("prefill", prefill=PROMPT_TOKENS) for _ in range(4)]
    model.process.ask("evict")
    prefill = min(answer["seconds"] for answer in resident[1:])
    digest = resident[-1]["digest"]
    bench.report.add("prefill of 512 tokens, resident", prefill, "s")
    forms = [("raw", model.staged)] + ([("compressed", bench.packed)] if bench.packed else [])
    raw = model.staged
    for name, staged in forms:
        model.staged = staged
        totals, copies, equal = [], [], True
        for _ in range(ROUNDS):
            bench.poison(model.frames)
            began = time.perf_counter()
            copy = model.start(bench.device, prefill=PROMPT_TOKENS)
            answer = model.process.link.answer()
            totals.append(time.perf_counter() - began)
            copies.append(copy.wait(60))
            equal &= answer["digest"] == digest
            model.process.ask("evict")
        seconds, floor = statistics.median(totals), max(statistics.median(copies), prefill)
        bench.report.add(f"first token after wake, {name}", seconds, "s")
        bench.report.add(f"first token, {name}, of max(copy, prefill)", seconds / floor, "ratio", 1.1, at_least=False)
        bench.report.check(f"logits equal, {name}", equal)
    model.staged = raw


def parking(bench: Bench) -> None:
    """Park and unpark the process of the large model, evicted."""
    model = bench.large()
    pid = model.process.pid
    before = bench.meter.process_bytes().get(pid, 0)
    parks, unparks, left = [], [], 0
    for _ in range(3):
        parks.append(park(pid, frames_mapped=False))
        left = max(left, bench.meter.process_bytes().get(pid, 0))
        unparks.append(unpark(pid))
    bench.report.add("device bytes of an evicted process", before / MEBI, "MiB")
    bench.report.add("park", max(parks), "s", 0.5, at_least=False)
    bench.report.add("unpark", max(unparks), "s", 0.35, at_least=False)
    bench.report.add("device bytes left when parked", left / MEBI, "MiB", 0, at_least=False)
    copy = model.start(bench.device)
    model.process.link.answer()
    copy.wait(60)
    bench.report.check("wakes with equal bytes after unpark", model.process.ask("sum")["sum"] == bench.image_sum)
    model.process.ask("evict")


def spawn(bench: Bench) -> None:
    """Fork from the zygote until the process has used the GPU."""
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        process = Process(bench)
        process.ask("ready")
        seconds.append(time.perf_counter() - began)
        process.kill()
    bench.report.add("spawn to CUDA ready", statistics.median(seconds), "s", 0.25, at_least=False)


def faults(bench: Bench) -> None:
    """A process killed while its stream waits for a copy, and one that writes into its frames."""
    device = bench.device
    path = str(bench.folder / "small")
    process = Process(bench)
    process.ask("ready")
    made = process.ask("generate", path=path, kind="stack:7", seed=5)
    model = Model(process, device.stage(path, made["bytes"]))
    model.frames = device.create(process.build(device, "stack:7")["frames"])
    process.ask("stuck")
    used = bench.meter.used_bytes()
    began = time.perf_counter()
    device.copy(model.staged, model.frames).wait(30)
    bench.report.add("copy of 64 MiB beside a stuck process", 1e3 * (time.perf_counter() - began), "ms")
    began = time.perf_counter()
    process.kill()
    bench.report.add("killed while its stream waits: gone after", time.perf_counter() - began, "s")
    bench.report.add("its device bytes back", (used - bench.meter.used_bytes()) / MEBI, "MiB")
    process = Process(bench)
    process.build(device, "stack:7")
    model.process = process
    copy = model.start(device)
    process.link.answer()
    copy.wait(30)
    bench.report.check("equal bytes in the next process", process.ask("sum")["sum"] == made["sum"])
    try:
        process.ask("write")
        refused = False
    except (RuntimeError, EOFError):  # an error of the kernel, or the end of the process
        refused = True
    bench.report.check("writing into a frame is refused", refused)
    process.kill()
    began = time.perf_counter()
    device.copy(model.staged, model.frames).wait(30)
    device.destroy(model.frames)
    device.unstage(model.staged)


def many(bench: Bench) -> None:
    """24 small models on a budget that holds a quarter of them, one swap after another, graphs replayed."""
    device, count, budget = bench.device, 24, 9
    maker = Process(bench)
    models: dict[str, Model] = {}
    digests: dict[str, str] = {}
    for number in range(count):
        kind, path = ("stack:7", "stack:15")[number % 2], str(bench.folder / f"small{number}")
        made = maker.ask("generate", path=path, kind=kind, seed=100 + number)
        process = Process(bench)
        process.build(device, kind)
        models[path] = Model(process, device.stage(path, made["bytes"]))
        os.unlink(path)
    maker.kill()
    free = device.create(budget)
    resident: list[str] = []
    needs = {path: -(-model.staged.image_bytes // device.frame_bytes) for path, model in models.items()}
    bench.report.add("models on one budget", count, "models", 20)
    bench.report.add("over-commit", 100 * sum(needs.values()) / budget, "%", 400)
    wrong, latencies, flat = 0, [], {}
    rng = random.Random(11)  # noqa: S311
    began = time.perf_counter()
    for swap in range(bench.swaps + count):
        path = list(models)[swap] if swap < count else rng.choice([p for p in models if p not in resident])
        model = models[path]
        started = time.perf_counter()
        while len(free) < needs[path]:
            victim = models[resident.pop(0)]
            victim.process.ask("evict")
            free += victim.frames
            victim.frames = []
        model.frames = [free.pop(0) for _ in range(needs[path])]
        if swap < count:
            copy = model.start(device)
            model.process.link.answer()
            copy.wait(30)
            digests[path] = model.process.ask("capture")["digest"]
        else:
            copy = model.start(device, "cycle")
            wrong += model.process.link.answer()["digest"] != digests[path]
            copy.wait(30)
            latencies.append(time.perf_counter() - started)
        resident.append(path)
        if swap == count + bench.swaps // 10:
            flat = _memory(bench, models)
    seconds = time.perf_counter() - began
    after = _memory(bench, models)
    report = bench.report
    report.add("swaps", bench.swaps, "swaps", 10000)
    report.add("swaps a second", (bench.swaps + count) / seconds, "1/s")
    report.add("swap: evict, wake, graph replay; median", 1e3 * statistics.median(latencies), "ms")
    report.add("outputs that differ from the first", wrong, "swaps", 0, at_least=False)
    for name, value in after.items():
        report.add(f"growth over the last nine tenths: {name}", (value - flat[name]) / MEBI, "MiB", 64, at_least=False)
    for path in resident:
        models[path].process.ask("evict")
    for model in models.values():
        model.process.kill()
        device.unstage(model.staged)
    device.destroy(free + [frame for model in models.values() for frame in model.frames])


def _memory(bench: Bench, models: dict[str, Model]) -> dict[str, int]:
    with open("/proc/self/status") as lines:
        own = next(int(text.split()[1]) << 10 for text in lines if text.startswith("VmRSS"))
    return {
        "device": bench.meter.used_bytes(),
        "agent": own,
        "processes": sum(model.process.ask("memory")["rss"] for model in models.values()),
    }


def vllm(bench: Bench) -> None:
    """What is used today for the same, beside ours: vLLM's sleep of level 1, of weights of the same shape."""
    if not bench.vllm:
        print("# vllm: not measured; name an interpreter that has it with --vllm", flush=True)
        return
    folder = bench.folder / "vllm"
    llama_config(bench.layers).save_pretrained(folder)
    program = Path(__file__).with_name("vllm_sleep.py")
    done = subprocess.run(
        [bench.vllm, str(program), str(folder), str(ROUNDS + 1)], stdout=subprocess.PIPE, check=False, timeout=600
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} ended with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    bench.report.add("vLLM, first sleep (it pins memory)", found["sleepSeconds"][0], "s")
    bench.report.add("vLLM, sleep", statistics.median(found["sleepSeconds"][1:]), "s")
    bench.report.add("vLLM, wake", statistics.median(found["wakeSeconds"][1:]), "s")


ROWS: dict[str, Callable[[Bench], None]] = {
    "line": line,
    "vllm": vllm,  # while the device is empty but for a context
    "spawn": spawn,
    "frames": frame_sizes,
    "wake": wake,
    "compressed": compressed,
    "first_token": first_token,
    "park": parking,
    "faults": faults,
    "many": many,
}


def driver_version() -> str:
    """The CUDA version that the driver speaks."""
    version = int(call("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10} ({driver().__name__})"
