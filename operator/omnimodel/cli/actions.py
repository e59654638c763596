"""`omni wake`, `evict`, `logs` and `events`."""

from __future__ import annotations

import json
import sys

import click

from omnimodel.cli import output
from omnimodel.cli.client import Client
from omnimodel.cli.describe import event_line
from omnimodel.cli.target import address_options, split_name

timeout_option = click.option(
    "--timeout", "timeout_seconds", type=click.FloatRange(min=0.001), default=120.0, show_default=True,
    help="Seconds to wait for it.",
)  # fmt: skip


@click.command()
@click.argument("model")
@timeout_option
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the result as JSON.")
@address_options
def wake(model: str, timeout_seconds: float, form: str | None, client: Client) -> None:
    """Make MODEL resident and wait for it."""
    result = client.wake(*split_name(model), timeout_seconds)
    if form == "json":
        output.write_json(result)
    else:
        click.echo(f"{model} is {result.get('tier')} (wake {output.seconds(result.get('wakeSeconds'))})")


@click.command()
@click.argument("model")
@timeout_option
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the result as JSON.")
@address_options
def evict(model: str, timeout_seconds: float, form: str | None, client: Client) -> None:
    """Let MODEL finish its requests, then free its device memory."""
    result = client.evict(*split_name(model), timeout_seconds)
    if form == "json":
        output.write_json(result)
    else:
        click.echo(f"{model} is {result.get('tier')} (evict {output.seconds(result.get('evictSeconds'))})")


@click.command()
@click.argument("model")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes.")
@click.option("--tail", type=click.IntRange(min=0), default=200, show_default=True, help="Lines to begin with.")
@address_options
def logs(model: str, follow: bool, tail: int, client: Client) -> None:
    """What the process of MODEL printed."""
    for line in client.logs(*split_name(model), tail=tail, follow=follow):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes.")
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="One JSON object a line.")
@address_options
def events(follow: bool, form: str | None, client: Client) -> None:
    """What happened, oldest first."""
    for event in client.events(follow=follow):
        if form == "json":
            click.echo(json.dumps(event))
        else:
            namespace, name = event["namespace"], event["name"]
            shown = name if namespace in {"", "default"} else f"{namespace}/{name}"
            click.echo(f"{event_line(event)}  ({event['kind']} {shown})")
