"""`omni top`: the live table of a system that runs elsewhere."""

from __future__ import annotations

import time

import click
from rich.console import Console
from rich.live import Live

from omnimodel.cli import live
from omnimodel.cli.client import Client
from omnimodel.cli.target import address_options


@click.command()
@click.option("--interval", type=click.FloatRange(min=0.1), default=0.5, show_default=True,
              help="Seconds between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print one picture and end.")
@address_options
def command(interval: float, once: bool, client: Client) -> None:
    """Watch models and memory, live; Ctrl-C ends it."""
    console = Console()
    if once or not console.is_terminal:
        models, pools, errors = _look(client)
        console.print(live.screen(models, pools, errors))
        return
    with Live(console=console, auto_refresh=False, screen=True) as picture:
        while True:
            models, pools, errors = _look(client)
            rows = live.rows_that_fit(console, len(pools), errors)
            picture.update(live.screen(models, pools, errors, rows=rows), refresh=True)
            time.sleep(interval)


def _look(client: Client) -> tuple[list[dict[str, object]], list[dict[str, object]], list[object]]:
    errors = client.status().get("errors", ())
    return client.objects("omnimodels"), client.objects("omnipools"), list(errors)
