"""`omni bench gpu`: the goals for a GPU, measured in one run against the machine's own pinned copy rate."""

from __future__ import annotations

import json
import logging
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import click

from omnimodel.cli.bench.gpu_bench import GIBI, Bench, line_of
from omnimodel.cli.bench.gpu_rows import ROWS, driver_version
from omnimodel.errors import OmniError
from omnimodel.memory.devices.cuda_driver import available


@click.command("gpu")
@click.option("--only", default="", help=f"rows to measure, with commas between: {', '.join(ROWS)}")
@click.option("--layers", default=32, show_default=True, help="of the large model; 32 is the shape of an 8B Llama")
@click.option("--arena", "arena_gib", default=30, show_default=True, help="GiB of host memory to pin")
@click.option("--swaps", default=10_000, show_default=True, help="of the row `many`")
@click.option("--vllm", default="", help="an interpreter that has vLLM, for the row `vllm`; left out without one")
@click.option("--folder", default="", help="where images are written; default: a new folder in /dev/shm")
@click.option("--json", "json_path", default="", help="also write the figures to this file")
def command(only: str, layers: int, arena_gib: int, swaps: int, vllm: str, folder: str, json_path: str) -> None:
    """Measure wake, evict, compression, first token, parking, spawning and many models on this machine's first GPU."""
    if not available():
        raise click.ClickException("there is no NVIDIA GPU here that can be used")
    logging.basicConfig(level=logging.WARNING)
    chosen = [name for name in ROWS if name in only.split(",")] if only else list(ROWS)
    if "line" not in chosen:
        chosen.insert(0, "line")  # everything is a ratio of it
    where = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="omni-bench-", dir="/dev/shm"))
    began = time.perf_counter()
    bench = Bench(where, layers, arena_gib * GIBI, swaps, vllm)
    try:
        for name in chosen:
            started = time.perf_counter()
            try:
                ROWS[name](bench)
            except (OmniError, RuntimeError, OSError, EOFError) as error:
                traceback.print_exc()
                bench.report.failures.append(f"{name}: {type(error).__name__}: {error}")
                bench.recover()
            print(f"# {name}: {time.perf_counter() - started:.1f} s", flush=True)
    finally:
        bench.close()
        print()
        for row in bench.report.rows:
            print(line_of(row))
        seconds = time.perf_counter() - began
        print(f"# driver {driver_version()}, {seconds:.0f} s; failed: {bench.report.failures}")
        if json_path:
            figures = [{**asdict(row), "met": row.met} for row in bench.report.rows]
            Path(json_path).write_text(json.dumps({"rows": figures, "failures": bench.report.failures}, indent=1))


if __name__ == "__main__":
    command()
