"""How results are written: aligned columns, JSON or YAML on stdout; sizes, ages and conditions as words."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

FORMATS = ("wide", "json", "yaml")


def write_json(value: Any) -> None:
    """Write one value, indented, to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def write_yaml(value: Any) -> None:
    """Write one value as a YAML document to stdout."""
    import yaml

    click.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), nl=False)


def write_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows in aligned columns, as kubectl does: no frame, nothing cut off, good for `awk`."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        click.echo("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def size(size_bytes: float | None) -> str:
    """Bytes as a short word, `257 MiB`; `-` for none or unknown."""
    if not size_bytes:
        return "-"
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size_bytes) >= unit:
            value = size_bytes / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    return f"{size_bytes:.0f} B"


def seconds(value: float | None) -> str:
    """A duration as a short word: `21 ms`, `3.2 s`, `4m`; `-` for none."""
    if not value:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms" if value >= 0.001 else f"{value * 1000:.1f} ms"
    if value < 60:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{value / 60:.0f}m"
    return f"{value / 3600:.0f}h" if value < 86400 else f"{value / 86400:.0f}d"


def age(timestamp: str | None, now_seconds: float | None = None) -> str:
    """How long ago an RFC 3339 time was; `-` for none."""
    if not timestamp:
        return "-"
    then = datetime.fromisoformat(timestamp)
    now = datetime.fromtimestamp(time.time() if now_seconds is None else now_seconds, UTC)
    return seconds(max(0.0, (now - then).total_seconds())) if then <= now else "0 s"


def condition(item: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object by its type; empty when it has none."""
    for found in item.get("status", {}).get("conditions", ()):
        if found.get("type") == kind:
            return dict(found)
    return {}


def full_name(item: Mapping[str, Any]) -> str:
    """`name`, or `namespace/name` outside the default namespace."""
    namespace, name = item["metadata"].get("namespace", "default"), item["metadata"]["name"]
    return str(name) if namespace == "default" else f"{namespace}/{name}"


def residency(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of a model's residency that says most: the highest tier of all pods."""
    order = ("resident", "warm", "parked", "cold")
    entries = item.get("status", {}).get("residency", ())
    ranked = sorted(entries, key=lambda entry: order.index(entry["tier"]) if entry.get("tier") in order else len(order))
    return dict(ranked[0]) if ranked else {}
