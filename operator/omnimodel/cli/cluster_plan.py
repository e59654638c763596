"""`kubectl omni plan`: which pods hold which models, how full they are, why, and what excludes what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from omnimodel.cli import output
from omnimodel.cli.client import Client
from omnimodel.cli.plan import exclusive_objects, never_together
from omnimodel.cli.target import address_options
from omnimodel.placement.assignment import ModelDemand, PodPlan, PoolSupply, pod_plan
from omnimodel.quantity import AUTO, parse_bytes

DEFAULT = "default"
_HEADS = ("MODEL", "SIZE", "POOL", "PODS", "")


@click.command()
@click.argument("pools", nargs=-1, metavar="[POOL]...")
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the plan as JSON.")
@address_options
def command(pools: tuple[str, ...], form: str | None, client: Client) -> None:
    """Show each pool's budget and pods, where each model is assigned and why, and what can never be resident together.

    With names, only those pools.
    """
    models = [item for item in client.objects("omnimodels") if not pools or _pool(item) in pools]
    found = [item for item in client.objects("omnipools") if not pools or item["metadata"]["name"] in pools]
    rows = [_row(item) for item in models]
    if form == "json":
        output.write_json(
            {"pools": [_as_json(item, _models_of(item, found, models)) for item in found], "models": rows}
        )
        return
    for item in found:
        for line in _pool_lines(item):
            click.echo(line)
    output.write_columns(
        _HEADS, [(r["model"], output.size(r["bytes"]), r["pool"], ", ".join(r["pods"]) or "-", r["why"]) for r in rows]
    )
    for item in found:
        for pod in _pods(item, _models_of(item, found, models)):
            for line in never_together(pod, f" in {pod.pod}"):
                click.echo(line)


def _pool(item: Mapping[str, Any]) -> str:
    return str(item.get("spec", {}).get("pool") or DEFAULT)


def _bytes(item: Mapping[str, Any]) -> int:
    """The footprint of a model on the device: as measured, else as its manifest says; 0 while neither is known."""
    footprint = (item.get("status") or {}).get("footprint") or {}
    measured = int(footprint.get("weightsBytes", 0)) + int(footprint.get("workingBytes", 0))
    declared = ((item.get("spec") or {}).get("resources") or {}).get("deviceMemory", AUTO)
    return measured or (0 if declared == AUTO else parse_bytes(declared))


def _pod_names(item: Mapping[str, Any]) -> list[str]:
    status = item.get("status") or {}
    return sorted({str(entry["pod"]) for name in ("assigned", "residency") for entry in status.get(name) or ()})


def _models_of(
    pool: Mapping[str, Any], pools: Iterable[Mapping[str, Any]], models: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The models that mean a pool: of their own namespace, else of namespace `default`."""
    name, namespace = pool["metadata"]["name"], pool["metadata"].get("namespace", DEFAULT)
    others = {item["metadata"].get("namespace", DEFAULT) for item in pools if item["metadata"]["name"] == name}
    return [
        item
        for item in models
        if _pool(item) == name
        and (
            (own := item["metadata"].get("namespace", DEFAULT)) == namespace
            or (namespace == DEFAULT and own not in others)
        )
    ]


def _pods(pool: Mapping[str, Any], models: Iterable[Mapping[str, Any]]) -> Iterator[PodPlan]:
    """The pods of a pool with the models that each holds or is to hold."""
    name = str(pool["metadata"]["name"])
    for entry in (pool.get("status") or {}).get("pods") or ():
        pod, budget_bytes = str(entry["pod"]), int(entry.get("budgetBytes", 0))
        load = [_demand(item) for item in models if pod in _pod_names(item)]
        yield pod_plan(PoolSupply(name, budget_bytes), pod, load)


def _demand(item: Mapping[str, Any]) -> ModelDemand:
    metadata, residency = item["metadata"], (item.get("spec") or {}).get("residency") or {}
    kept = bool(residency.get("keepResident"))
    namespace, name = str(metadata.get("namespace", DEFAULT)), str(metadata["name"])
    return ModelDemand(namespace, name, _pool(item), _bytes(item), keep_resident=kept)


def _row(item: Mapping[str, Any]) -> dict[str, Any]:
    status = item.get("status") or {}
    stalled = output.condition(item, "Stalled")  # what was refused may serve as it was before
    said = stalled if stalled.get("status") == "True" else output.condition(item, "Ready")
    placed = "; ".join(str(entry.get("why", "")) for entry in status.get("assigned") or ())
    ready = said.get("type") == "Ready" and said.get("status") == "True"
    why = placed if ready else f"{said.get('reason', 'Pending')}: {said.get('message', '')}"
    return {
        "model": output.full_name(item),
        "bytes": _bytes(item),
        "pool": _pool(item),
        "pods": _pod_names(item),
        "why": why.rstrip(": "),
    }


def _as_json(item: Mapping[str, Any], models: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    status = item.get("status") or {}
    names = ("budgetBytes", "footprintBytes", "overcommitRatio", "residentBytes", "models", "replicas", "readyReplicas")
    return {
        "pool": output.full_name(item),
        **{name: status.get(name, 0) for name in names},
        "pods": status.get("pods") or [],
        "neverTogether": [{"pod": pod.pod, **group} for pod in _pods(item, models) for group in exclusive_objects(pod)],
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
