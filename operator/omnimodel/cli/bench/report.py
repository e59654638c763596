"""Results of a benchmark: rows with a goal, as a table on stdout and as JSON in a file."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        name: what was measured.
        value: in `unit`.
        unit: such as `ms` or `GB/s`; empty for a ratio or a count.
        goal: the bound it should keep; None when it is only reported.
        at_least: whether the goal is a lower bound; otherwise an upper one.
        note: how it was measured.
    """

    name: str
    value: float
    unit: str = ""
    goal: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is kept; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


@dataclass
class Report:
    """All figures of one run."""

    benchmark: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str = "", **rest: Any) -> None:
        """Add a figure."""
        self.rows.append(Row(name, value, unit, **rest))

    def show(self) -> None:
        """Print the table on stdout."""
        table = Table(title=f"omni bench {self.benchmark}", title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("what", no_wrap=True)
        table.add_column("measured", justify="right", no_wrap=True)
        table.add_column("goal", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("how")
        for row in self.rows:
            goal = "" if row.goal is None else f"{'≥' if row.at_least else '≤'} {row.goal:g} {row.unit}"
            mark = {None: "", True: "✓", False: "✗"}[row.met]
            table.add_row(row.name, f"{row.value:.4g} {row.unit}", goal, mark, row.note)
        console = Console()
        console.width = max(console.width, 120)  # a file or a pipe has no width that could be exceeded
        console.print(table)
        for failure in self.failures:
            console.print(f"failed: {failure}", style="red", highlight=False)

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "benchmark": self.benchmark,
            "machine": {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()},
            "rows": [{**asdict(row), "met": row.met} for row in self.rows],
            "failures": self.failures,
        }
        path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    def finish(self, json_path: Path | None) -> None:
        """Show and write; end the command with 1 when something failed. A missed goal alone is no failure."""
        self.show()
        if json_path is not None:
            self.write(json_path)
        if self.failures:
            raise SystemExit(1)


def json_option(function: Function) -> Function:
    """Add `--json FILE`."""
    return click.option(
        "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to this file."
    )(function)


def median(values: Sequence[float]) -> float:
    """The median; 0 for none."""
    return statistics.median(values) if values else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all lies at or below; 0 for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
