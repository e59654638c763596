"""`omni get`: models, pools and processes, as columns or as whole objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from omnimodel.cli import output
from omnimodel.cli.client import Client
from omnimodel.cli.target import address_options, split_name
from omnimodel.errors import DispatchError, Reason

PLURALS = {"models": "omnimodels", "pools": "omnipools", "processes": "omniprocesses"}
SHORT = {"model": "models", "pool": "pools", "process": "processes"}


class _Kind(click.Choice[str]):
    """Plural or singular."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(super().convert(SHORT.get(value, value), param, ctx))


@click.command()
@click.argument("kind", type=_Kind(list(PLURALS)), metavar="models|pools|processes")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("-o", "--output", "form", type=click.Choice(output.FORMATS), help="More columns, or whole objects.")
@address_options
def command(kind: str, names: tuple[str, ...], form: str | None, client: Client) -> None:
    """List models, pools or processes; with names, only those.

    JSON is {"items": [...]} of whole objects with metadata, spec and status. Errors of manifests go to stderr.
    """
    items = client.objects(PLURALS[kind])
    if names:
        items = [_find(items, kind, name) for name in names]
    if form == "json":
        output.write_json({"items": items})
    elif form == "yaml":
        output.write_yaml({"items": items})
    elif not items:
        click.echo(f"no {kind} there", err=True)
    else:
        rows = {"models": _model_row, "pools": _pool_row, "processes": _process_row}[kind]
        heads = {"models": MODEL_HEADS, "pools": POOL_HEADS, "processes": PROCESS_HEADS}[kind]
        narrow = {"models": 9, "pools": 8, "processes": 7}[kind]
        cut = None if form == "wide" else narrow
        output.write_columns(heads[:cut], [rows(item)[:cut] for item in items])
    for error in client.status().get("errors", ()):
        click.echo(f"error: {error_text(error)}", err=True)


def _find(items: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """An object by `name` or `namespace/name`.

    Raises:
        DispatchError: there is none (status 404).
    """
    wanted = split_name(name)
    for item in items:
        if (item["metadata"].get("namespace", "default"), item["metadata"]["name"]) == wanted:
            return item
    known = ", ".join(output.full_name(item) for item in items) or "none"
    raise DispatchError(
        f"{kind} {name}", "there is no such object", f"there are: {known}", reason=Reason.MODEL_NOT_FOUND, status=404
    )


def error_text(error: Any) -> str:
    """A manifest error as one line: text, or an object with `message`; the file as seen from here, when it is below."""
    text = str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
    return text.removeprefix(f"{Path.cwd()}/")


MODEL_HEADS = (
    "NAME", "READY", "TIER", "DEVICE", "WEIGHTS", "WAITING", "SERVED", "LAST WAKE", "REASON",
    "POOL", "ENGINE", "TASK", "HOST", "WORKING", "WAKES", "PID", "LAST REQUEST", "GENERATION", "MESSAGE",
)  # fmt: skip


def _model_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    status, spec = item.get("status", {}), item.get("spec", {})
    ready, here = output.condition(item, "Ready"), output.residency(item)
    footprint = status.get("footprint") or {}
    failed = ready.get("status") != "True"
    generation = str(item["metadata"].get("generation", 1))
    observed = str(max(0, status.get("observedGeneration", 0)))
    return (
        output.full_name(item),
        str(ready.get("status", "Unknown")),
        here.get("tier") or "-",
        output.size(here.get("deviceBytes")),
        output.size(footprint.get("weightsBytes")),
        str(here.get("waiting", 0)),
        str(here.get("requests", 0)),
        output.seconds(here.get("lastWakeSeconds")),
        str(ready.get("reason") or "-") if failed else "-",
        str(spec.get("pool") or "default"),
        str(spec.get("runtime", {}).get("engine", "-")),
        str(spec.get("runtime", {}).get("task", "-")),
        output.size(here.get("hostBytes")),
        output.size(footprint.get("workingBytes")),
        str(here.get("wakes", 0)),
        str(here.get("pid") or "-"),
        output.age(here.get("lastRequest")),
        generation if generation == observed else f"{observed} of {generation}",
        str(ready.get("message") or here.get("message") or "-"),
    )


POOL_HEADS = (
    "NAME", "READY", "DEVICE", "BUDGET", "RESIDENT", "FREE", "OVER-COMMIT", "ISOLATION",
    "HOST", "HOST BUDGET", "MODELS", "MISSING",
)  # fmt: skip


def _pool_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    status = item.get("status", {})
    isolation = status.get("isolation") or {}
    return (
        str(item["metadata"]["name"]),
        str(output.condition(item, "Ready").get("status", "Unknown")),
        str(status.get("device", "-")),
        output.size(status.get("budgetBytes")),
        output.size(status.get("residentBytes")),
        output.size(status.get("freeBytes")),
        f"{float(status.get('overcommitRatio') or 0):.2f}",
        str(isolation.get("level") or "-"),
        output.size(status.get("hostBytes")),
        output.size(status.get("hostBudgetBytes")),
        str(status.get("models", 0)),
        ", ".join(isolation.get("missing") or ()) or "-",
    )


PROCESS_HEADS = (
    "MODEL", "STATE", "TIER", "PID", "PRIVATE", "RESTARTS", "AGE", "ISOLATION", "INSTANCE", "CGROUP", "HASH",
)  # fmt: skip


def _process_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    status = item.get("status", {})
    return (
        output.full_name(item),
        str(status.get("state") or "stopped"),
        str(status.get("tier") or "-"),
        str(status.get("pid") or "-"),
        output.size(status.get("privateBytes")),
        str(status.get("restarts", 0)),
        output.age(status.get("started")),
        str(status.get("isolationLevel") or "-"),
        str(status.get("instance") or "-"),
        str(status.get("cgroup") or "-"),
        str(item.get("spec", {}).get("hash", "-"))[:12],
    )
