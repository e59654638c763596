"""The live table that `omni up` and `omni top` show: memory, models, progress, and manifests that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from omnimodel.cli import output
from omnimodel.cli.get import error_text

TIER_STYLES = {"resident": "bold green", "warm": "yellow", "parked": "cyan", "cold": "dim"}
TIER_ORDER = ("resident", "warm", "parked", "cold")


def screen(
    models: Sequence[Mapping[str, Any]],
    pools: Sequence[Mapping[str, Any]],
    errors: Sequence[Any],
    *,
    rows: int | None = None,
) -> RenderableType:
    """The whole picture.

    Args:
        models: objects with status.
        pools: objects with status.
        errors: of manifests.
        rows: how many models fit; the rest is counted in one line. None for all.
    """
    parts: list[RenderableType] = [_memory(pool) for pool in pools]
    parts.append(_table(models, rows))
    parts.extend(Text(f"✗ {error_text(error)}", style="red") for error in errors)
    return Group(*parts)


def _memory(pool: Mapping[str, Any]) -> RenderableType:
    """One line; where the terminal is narrow the bar gives way first, then the end of the line."""
    status = pool.get("status", {})
    budget = int(status.get("budgetBytes") or 0)
    held = budget - int(status.get("freeBytes", budget))
    ratio = float(status.get("overcommitRatio") or 0)
    isolation = (status.get("isolation") or {}).get("level") or "-"
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(max_width=30)
    for _ in range(3):
        line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(
        Text(f"pool {pool['metadata']['name']}", style="bold"),
        ProgressBar(total=max(1, budget), completed=held, complete_style="green"),
        f"{output.size(held) if held else '0 B'} of {output.size(budget)} on {status.get('device', '-')}",
        f"over-commit {ratio:.2f}",
        f"isolation {isolation}",
    )
    return line


def _table(models: Sequence[Mapping[str, Any]], rows: int | None) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("model")  # it and the last one could wrap, and so give way; if none could, all would
    table.add_column("tier", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("last wake", justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    shown = sorted(models, key=_urgency)[: rows or len(models)]
    for item in sorted(shown, key=output.full_name):
        table.add_row(*_cells(item))
    if len(shown) < len(models):
        return Group(table, Text(f"… and {len(models) - len(shown)} more", style="dim"))
    return table


def _urgency(item: Mapping[str, Any]) -> tuple[int, int, str]:
    """Who is shown when not all fit: what fails or works, then the highest tier."""
    settled = output.condition(item, "Ready").get("status") == "True"
    tier = output.residency(item).get("tier")
    return (int(settled), TIER_ORDER.index(tier) if tier in TIER_ORDER else len(TIER_ORDER), output.full_name(item))


def _cells(item: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    here, ready = output.residency(item), output.condition(item, "Ready")
    footprint = item.get("status", {}).get("footprint") or {}
    tier = str(here.get("tier") or "-")
    served, waiting = int(here.get("requests", 0)), int(here.get("waiting", 0)) + int(here.get("inFlight", 0))
    requests = f"{served} +{waiting}" if waiting else str(served)
    note: RenderableType = ""
    if ready.get("status") == "True":
        if here.get("phase") in {"waking", "draining", "evicting"}:
            note = _words(str(here["phase"]), "dim")
    elif output.condition(item, "Reconciling").get("status") == "True":
        note = _progress(str(here.get("phase") or ready.get("reason", "")), float(here.get("progress", -1)))
    else:
        message = f"{ready.get('reason', '')}: {ready.get('message', '')}"
        note = _words(message, "red" if ready.get("reason") != "Suspended" else "dim")
    return (
        _words(output.full_name(item), ""),
        Text(tier, style=TIER_STYLES.get(tier, "")),
        output.size(footprint.get("weightsBytes")),
        requests,
        output.seconds(here.get("lastWakeSeconds")),
        note,
    )


def _words(text: str, style: str) -> Text:
    """One line, cut off where the terminal ends."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _progress(phase: str, share: float) -> RenderableType:
    """What is being done; a bar that only moves where nobody knows how far it is (`share` below 0)."""
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1, completed=max(0.0, share), width=20, pulse=share < 0)
    line.add_row(Text(phase, style="blue"), bar, f"{share:.0%}" if share >= 0 else "")
    return line


def curl_line(address: str, models: Sequence[Mapping[str, Any]]) -> str:
    """One line to paste: a chat when a model can chat, else the list of models."""
    for item in models:
        if item.get("spec", {}).get("runtime", {}).get("task") == "text-generation":
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            body = json.dumps({"model": item["metadata"]["name"], "messages": messages})
            return f"curl -s {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    return f"curl -s {address}/v1/models"


def rows_that_fit(console: Console, pools: int, errors: Sequence[Any]) -> int:
    """How many models the terminal has lines for, beside the pools and the errors, which may take several lines."""
    lines = sum(1 + len(error_text(error)) // max(1, console.width - 2) for error in errors)
    return max(3, console.height - pools - lines - 4)
