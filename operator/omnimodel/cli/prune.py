"""`omni prune`: frees disk space that no model needs."""

from __future__ import annotations

import time

import click

from omnimodel.cli import output
from omnimodel.cli.client import Client
from omnimodel.cli.target import address_options


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the result as JSON.")
@address_options
def command(dry_run: bool, form: str | None, client: Client) -> None:
    """Remove images, sources and environments that no model needs."""
    result = client.prune(dry_run=dry_run)
    if form == "json":
        output.write_json(result)
        return
    removed = result["removed"]
    if removed:
        several = any("pod" in item for item in removed)
        heads = ("KIND", "WHAT", "SIZE", "USED", *(("POD",) if several else ()))
        output.write_columns(
            heads,
            [
                (
                    item["kind"],
                    item["what"] or item["name"][:12],
                    output.size(item["bytes"]),
                    f"{output.seconds(max(0.0, time.time() - item['lastUsedSeconds']))} ago",
                    *((item.get("pod", ""),) if several else ()),
                )
                for item in removed
            ],
        )
    size = output.size(result["bytes"]) if result["bytes"] else "nothing"
    click.echo(f"{size} would come free" if dry_run else f"{size} came free", err=True)
    for pod in result.get("unreached", ()):
        click.echo(f"pod {pod} did not answer: nothing was removed there", err=True)
