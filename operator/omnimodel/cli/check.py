"""`omni check`: known answers, asked through the front door."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from omnimodel.cli import output
from omnimodel.cli.client import Client
from omnimodel.cli.get import _find
from omnimodel.cli.target import address_options
from omnimodel.errors import OmniError
from omnimodel.protocol import probe as known_answer
from omnimodel.protocol.dispatch import DEADLINE_HEADER, WAITED_HEADER


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--timeout", "timeout_seconds", type=click.FloatRange(min=0.001), default=300.0, show_default=True,
              help="Seconds for each model, its wake included.")  # fmt: skip
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the results as JSON.")
@address_options
@click.pass_context
def command(
    context: click.Context, models: tuple[str, ...], timeout_seconds: float, form: str | None, client: Client
) -> None:
    """Send each MODEL (all, when none is named) its spec.probe and compare the answer.

    Exits with 1 and names the failed expectation when one is wrong.
    """
    items = client.objects("omnimodels")
    chosen = [_find(items, "models", name) for name in models] if models else items
    results = []
    for item in chosen:
        result = _check(client, item, timeout_seconds)
        results.append(result)
        if form is None:
            _report(result)
    if form == "json":
        output.write_json({"items": results})
    failed = [result["model"] for result in results if result["result"] == "failed"]
    if failed:
        click.echo(f"{len(failed)} of {len(results)} failed: {', '.join(failed)}", err=True)
        context.exit(1)


def _check(client: Client, item: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Ask one model: its `result` (`passed`, `failed`, `skipped`), `failures`, `seconds` and `waitedSeconds`."""
    name = output.full_name(item)
    spec = item.get("spec", {})
    probe = spec.get("probe")
    if spec.get("suspend"):
        return {"model": name, "result": "skipped", "failures": ["it is suspended"]}
    if not probe:
        return {"model": name, "result": "skipped", "failures": ["its manifest has no probe"]}
    asked = known_answer.request(addressed(probe, name))
    headers = {**asked.headers, DEADLINE_HEADER: f"{timeout_seconds:g}"}
    began = time.monotonic()
    try:
        answer = client.request(asked.method, asked.path, asked.body, headers, timeout_seconds + 5)
    except OmniError as error:
        return {"model": name, "result": "failed", "failures": [str(error)], "seconds": time.monotonic() - began}
    wrong = known_answer.failures(probe, answer.status, answer.headers, answer.body)
    return {
        "model": name,
        "result": "failed" if wrong else "passed",
        "failures": wrong,
        "seconds": round(time.monotonic() - began, 4),
        "waitedSeconds": float(answer.headers.get(WAITED_HEADER) or 0),
    }


def addressed(probe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The probe with the name by which a gateway knows the model; the process itself needs none.

    That is NAMESPACE/NAME, which no other model can take: in the body under /v1, in the path under /v2.

    Args:
        probe: of the manifest.
        name: of the model, with its namespace outside of `default`.
    """
    key = name if "/" in name else f"default/{name}"
    path, own = str(probe.get("path", "")), f"/v2/models/{key.partition('/')[2]}/"
    if path.startswith(own):
        return {**probe, "path": f"/v2/models/{key}/{path.removeprefix(own)}"}
    for kind in ("json", "form"):
        if path.startswith("/v1/") and isinstance(probe.get(kind), Mapping):
            return {**probe, kind: {"model": key, **probe[kind]}}
    return probe


def _report(result: Mapping[str, Any]) -> None:
    timing = f"{output.seconds(result.get('seconds'))}, held {output.seconds(result.get('waitedSeconds'))}"
    if result["result"] == "passed":
        click.echo(f"passed   {result['model']}  ({timing})")
        return
    for failure in result["failures"]:
        click.echo(f"{result['result']:<8} {result['model']}: {failure}")
