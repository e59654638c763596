"""`omni bench`: what this machine does, each measured against a baseline of the same run."""

from __future__ import annotations

import click

from omnimodel.cli.lazy import LazyGroup

BENCHMARKS = {
    "swap": ("omnimodel.cli.bench.swap", "Wakes and evicts, against the machine's own copy rate."),
    "spawn": ("omnimodel.cli.bench.spawn", "Fork to ready, against a fresh interpreter; memory of idle processes."),
    "gateway": ("omnimodel.cli.bench.gateway", "Added latency, and 64 streaming clients."),
    "gpu": ("omnimodel.cli.bench.gpu", "Wakes of a large image on a CUDA device."),
}


@click.group(cls=LazyGroup, lazy_commands=BENCHMARKS)
def command() -> None:
    """Measure this machine."""
