"""`omni describe`: one model in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from omnimodel.cli import output
from omnimodel.cli.client import Client
from omnimodel.cli.target import address_options, split_name

EVENTS_SHOWN = 15


@click.command()
@click.argument("model")
@address_options
def command(model: str, client: Client) -> None:
    """Everything known about MODEL: what it is, where it is, why, and what happened to it."""
    namespace, name = split_name(model)
    item = client.model(namespace, name)
    pool_name = item.get("spec", {}).get("pool") or "default"
    pools = [pool for pool in client.objects("omnipools") if pool["metadata"]["name"] == pool_name]
    processes = [
        process
        for process in client.objects("omniprocesses")
        if (process["metadata"].get("namespace", "default"), process["metadata"]["name"]) == (namespace, name)
    ]
    for line in _model_lines(item):
        click.echo(line)
    for pool in pools:
        for line in _pool_lines(pool):
            click.echo(line)
    for process in processes:
        for line in _process_lines(process):
            click.echo(line)
    happened = [
        event for event in client.events(follow=False) if (event["namespace"], event["name"]) == (namespace, name)
    ]
    click.echo("Events:" if happened else "Events: none")
    for event in happened[-EVENTS_SHOWN:]:
        click.echo(f"  {event_line(event)}")


def event_line(event: Mapping[str, Any]) -> str:
    """One event as one line."""
    from datetime import datetime

    moment = datetime.fromtimestamp(float(event["time_seconds"])).astimezone().strftime("%H:%M:%S")
    return f"{moment}  {event['type']:<7}  {event['reason']:<20}  {event['message']}"


def _field(name: str, value: Any) -> str:
    return f"{name + ':':<18}{value}"


def _model_lines(item: Mapping[str, Any]) -> Iterator[str]:
    metadata, spec, status = item["metadata"], item.get("spec", {}), item.get("status", {})
    runtime, footprint = spec.get("runtime", {}), status.get("footprint") or {}
    yield _field("Name", metadata["name"])
    yield _field("Namespace", metadata.get("namespace", "default"))
    yield _field("Pool", spec.get("pool") or "default")
    names = [served if isinstance(served, str) else served.get("name") for served in spec.get("servedNames") or ()]
    yield _field("Served as", ", ".join([metadata["name"], *map(str, names)]))
    if spec.get("description"):
        yield _field("Description", spec["description"])
    yield _field("Source", _source(spec.get("source") or {}))
    yield _field("Engine", f"{runtime.get('engine', '-')}, task {runtime.get('task', '-')}")
    observed = max(0, status.get("observedGeneration", 0))
    yield _field("Generation", f"{metadata.get('generation', 1)}, observed {observed}")
    weights, working = footprint.get("weightsBytes"), footprint.get("workingBytes")
    yield _field("Footprint", f"{output.size(weights)} weights, {output.size(working)} working memory")
    yield "Conditions:"
    for entry in status.get("conditions", ()):
        since = output.age(entry.get("lastTransitionTime"))
        yield f"  {entry['type']:<12} {entry['status']:<6} {entry.get('reason', ''):<20} {since:>6}"
        if entry.get("message"):
            yield f"    {entry['message']}"
    yield "Residency:"
    for entry in status.get("residency", ()):
        yield (
            f"  {entry.get('pod', '-')}: {entry.get('tier')}, {_held(entry.get('deviceBytes'))} of device memory "
            f"({entry.get('device') or '-'}), {_held(entry.get('hostBytes'))} of other host memory, "
            f"{entry.get('wakes', 0)} wakes (last {output.seconds(entry.get('lastWakeSeconds'))}{_rate(entry)}), "
            f"{entry.get('waiting', 0)} waiting, {entry.get('inFlight', 0)} in flight, "
            f"{entry.get('requests', 0)} served{_tokens(entry)}"
        )
        if entry.get("message"):
            yield f"    {entry['message']}"
        if entry.get("store"):
            yield f"    its image is in the published store {entry['store']}"


def _tokens(entry: Mapping[str, Any]) -> str:
    """What was computed, where tokens are counted."""
    prompt, generated = int(entry.get("promptTokens") or 0), int(entry.get("generatedTokens") or 0)
    return f", {prompt} tokens of prompts, {generated} generated" if prompt or generated else ""


def _held(size_bytes: float | None) -> str:
    """Bytes that are held, none too."""
    return output.size(size_bytes) if size_bytes else "0 B"


def _rate(entry: Mapping[str, Any]) -> str:
    """How fast the last wake copied, where it had to."""
    rate = entry.get("lastWakeBytesPerSecond")
    return f" at {rate / 1e9:.1f} GB/s" if rate else ""


def _source(source: Mapping[str, Any]) -> str:
    for kind, value in source.items():
        if value:
            return f"{kind} {value}" if isinstance(value, str) else f"{kind} " + " ".join(map(str, value.values()))
    return "-"


def _pool_lines(pool: Mapping[str, Any]) -> Iterator[str]:
    status = pool.get("status", {})
    isolation = status.get("isolation") or {}
    yield "Pool memory:"
    budget_bytes = int(status.get("budgetBytes") or 0)
    yield (
        f"  {_held(budget_bytes - int(status.get('freeBytes', budget_bytes)))} of {output.size(budget_bytes)} held on "
        f"{status.get('device', '-')}, over-commit {float(status.get('overcommitRatio') or 0):.2f}"
    )
    parts = {
        "residentBytes": "weights",
        "workingBytes": "working memory",
        "promisedBytes": "promised to a wake",
        "contextBytes": "contexts",
    }
    told = [f"{output.size(status[field])} {what}" for field, what in parts.items() if status.get(field)]
    if told:
        yield f"  of that {', '.join(told)}"
    if status.get("powerWatts"):
        yield f"  draws {status['powerWatts']:.0f} W, {float(status.get('energyJoules') or 0) / 3.6e6:.2f} kWh so far"
    for device in status.get("perDevice") or ():
        held, budget = output.size(device.get("residentBytes")), output.size(device.get("budgetBytes"))
        yield f"  {device['name']}: {held} of {budget} resident, {output.size(device.get('freeBytes'))} free"
    store = status.get("store") or {}
    if store.get("path"):
        free, capacity = output.size(store.get("freeBytes")), output.size(store.get("capacityBytes"))
        yield "Store:"
        yield f"  {store['path']}, {free} of {capacity} free"
    yield "Isolation:"
    yield f"  level {isolation.get('level') or '-'}"
    for missing in isolation.get("missing") or ():
        yield f"  lacks {missing}"


def _process_lines(process: Mapping[str, Any]) -> Iterator[str]:
    status = process.get("status", {})
    if not status.get("pid"):
        yield "Process:          none"
        return
    yield "Process:"
    yield (
        f"  pid {status['pid']}, {status.get('state')}, {output.size(status.get('privateBytes'))} private, "
        f"{status.get('restarts', 0)} restarts, isolation {status.get('isolationLevel', '-')}"
    )
    for missing in status.get("isolationMissing") or ():
        yield f"  lacks {missing}"
    for path in (status.get("cgroup") or "").split(","):
        if path:
            yield f"  cgroup {path}"
