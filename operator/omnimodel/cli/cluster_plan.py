"""`kubectl omni plan`: which pods hold which models, how full they are, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from omnimodel.cli import output
from omnimodel.cli.client import Client
from omnimodel.cli.target import address_options

_HEADS = ("MODEL", "SIZE", "POOL", "PODS", "")


@click.command()
@click.argument("pools", nargs=-1, metavar="[POOL]...")
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the plan as JSON.")
@address_options
def command(pools: tuple[str, ...], form: str | None, client: Client) -> None:
    """Show each pool's budget and pods, and where each model is assigned; with names, only those pools."""
    models = [item for item in client.objects("omnimodels") if not pools or _pool(item) in pools]
    found = [item for item in client.objects("omnipools") if not pools or item["metadata"]["name"] in pools]
    rows = [_row(item) for item in models]
    if form == "json":
        output.write_json({"pools": [_as_json(item) for item in found], "models": rows})
        return
    for item in found:
        for line in _pool_lines(item):
            click.echo(line)
    output.write_columns(
        _HEADS, [(r["model"], output.size(r["bytes"]), r["pool"], ", ".join(r["pods"]) or "-", r["why"]) for r in rows]
    )


def _pool(item: Mapping[str, Any]) -> str:
    return str(item.get("spec", {}).get("pool") or "default")


def _row(item: Mapping[str, Any]) -> dict[str, Any]:
    status = item.get("status") or {}
    footprint = status.get("footprint") or {}
    ready = output.condition(item, "Ready")
    placed = "; ".join(str(entry.get("why", "")) for entry in status.get("assigned") or ())
    why = placed if ready.get("status") == "True" else f"{ready.get('reason', 'Pending')}: {ready.get('message', '')}"
    return {
        "model": output.full_name(item),
        "bytes": int(footprint.get("weightsBytes", 0)) + int(footprint.get("workingBytes", 0)),
        "pool": _pool(item),
        "pods": sorted({str(entry["pod"]) for name in ("assigned", "residency") for entry in status.get(name) or ()}),
        "why": why.rstrip(": "),
    }


def _as_json(item: Mapping[str, Any]) -> dict[str, Any]:
    status = item.get("status") or {}
    names = ("budgetBytes", "footprintBytes", "overcommitRatio", "residentBytes", "models", "replicas", "readyReplicas")
    return {
        "pool": output.full_name(item),
        **{name: status.get(name, 0) for name in names},
        "pods": status.get("pods") or [],
    }


def _pool_lines(item: Mapping[str, Any]) -> Iterator[str]:
    status = item.get("status") or {}
    yield (
        f"pool {output.full_name(item)}: {status.get('models', 0)} models, "
        f"{output.size(status.get('footprintBytes'))} of footprints on a budget of "
        f"{output.size(status.get('budgetBytes'))}, over-commit {float(status.get('overcommitRatio') or 0):.2f}"
    )
    for pod in status.get("pods") or ():
        state = "" if pod.get("ready") else f"; {pod.get('reason') or 'not ready'}: {pod.get('message') or ''}"
        yield (
            f"  {pod['pod']}: {output.size(pod.get('residentBytes'))} resident of "
            f"{output.size(pod.get('budgetBytes'))}{state}".rstrip(": ")
        )
