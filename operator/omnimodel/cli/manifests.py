"""`omni validate` and `omni crds`: manifests and their schema, without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from omnimodel.cli import output
from omnimodel.cli.exits import ExitCode
from omnimodel.errors import CURES, ManifestError, Reason

paths_argument = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="PATH..."
)


@click.command()
@paths_argument
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the errors as JSON.")
@click.pass_context
def validate(context: click.Context, paths: tuple[Path, ...], form: str | None) -> None:
    """Check manifests in files and folders: one line an error, with file, line, field and what to write instead.

    Exits with 2 when there is one.
    """
    from omnimodel.catalog import load

    catalog = load(paths)
    errors = [*catalog.errors, *_across(catalog)]
    for note in catalog.notes:
        click.echo(note, err=True)
    if form == "json":
        output.write_json({"items": [error_object(error) for error in errors]})
    else:
        for error in errors:
            click.echo(str(error))
    counted = f"{_several(len(catalog.models), 'model')}, {_several(len(catalog.pools), 'pool')}"
    if errors:
        without = "without it" if len(errors) == 1 else "without them"
        click.echo(f"{_several(len(errors), 'error')}; {without} {counted}", err=True)
        context.exit(ExitCode.USAGE)
    click.echo(f"valid: {counted}", err=True)


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _across(catalog: Any) -> Iterator[ManifestError]:
    """What is wrong between objects that are good by themselves: names that two want, pools that are not there."""
    from omnimodel.controllers.local_snapshot import Snapshot, decide

    desired = decide(Snapshot(catalog, {}, {}, "", None))
    places = {model.key: catalog.places.get(("OmniModel", *model.key.split("/")), "") for model in desired.models}
    wanting: dict[str, list[str]] = {}
    for model in desired.models:
        for name in dict.fromkeys(model.names):
            wanting.setdefault(name, []).append(model.key)
    for model in desired.models:
        file, _, line = places[model.key].rpartition(":")
        at: dict[str, Any] = {"file": file, "line": int(line or 0)}
        for name in dict.fromkeys(model.names):
            problem = ""
            if name in places:
                problem = f'the served name "{name}" is the full name of another model ({places[name]})'
            elif len(wanting[name]) > 1:  # a folder does not say which of them is older
                problem = (
                    f'{len(wanting[name])} models have the served name "{name}": '
                    f"{' and '.join(f'{key} ({places[key]})' for key in wanting[name])}; only the oldest gets it"
                )
            if problem:
                yield ManifestError(
                    model.subject,
                    problem,
                    CURES[Reason.NAME_TAKEN],
                    field="spec.servedNames",
                    reason=Reason.NAME_TAKEN,
                    **at,
                )
        refusal = desired.refused.get(model.key)
        if refusal is None or refusal.reason in {Reason.SUSPENDED, Reason.NAME_TAKEN}:
            continue
        if refusal.reason == Reason.POOL_NOT_FOUND and (catalog.pool_of(model) is not None or not catalog.pools):
            continue  # another machine's, or described in files that were not given
        yield ManifestError(model.subject, refusal.message, reason=Reason(refusal.reason), **at)


def error_object(error: ManifestError) -> dict[str, Any]:
    """An error as JSON values."""
    names = ("file", "line", "subject", "field", "problem", "cure")
    return {**{name: getattr(error, name) for name in names}, "reason": str(error.reason), "message": str(error)}
