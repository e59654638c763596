"""`omni plan`: what would be placed where, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnimodel.cli import output
from omnimodel.cli.exits import ExitCode
from omnimodel.cli.manifests import error_object, paths_argument
from omnimodel.cli.target import state_dir_option
from omnimodel.cli.up import Memory

if TYPE_CHECKING:
    from omnimodel.api import OmniPool
    from omnimodel.catalog import Catalog
    from omnimodel.controllers.local_snapshot import Desired
    from omnimodel.placement.assignment import PodPlan

THREES_SHOWN = 10  # only where no two exclude each other: their number grows with the third power


@click.command()
@paths_argument
@click.option("--memory", type=Memory(), help="Try this device budget instead of the pools' own.")
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the plan as JSON.")
@state_dir_option
@click.pass_context
def command(
    context: click.Context, paths: tuple[Path, ...], memory: str | None, form: str | None, state_dir: Path
) -> None:
    """Show where each model of PATH... would go, how far that over-commits, and what can never be resident together.

    Sizes are those of the manifests, or what a system with this state directory has measured.
    """
    from omnimodel.catalog import load
    from omnimodel.controllers.local_state import OBJECTS_FILE, IdentityFile

    # With the identities of an earlier run the hashes are those by which sizes were remembered.
    catalog = load(paths, identities=IdentityFile(state_dir / OBJECTS_FILE).read())
    plans = [_plan(catalog, name, memory, state_dir) for name in _pool_names(catalog)]
    if form == "json":
        pools = [_as_json(found) for found in plans]
        output.write_json({"pools": pools, "errors": [error_object(error) for error in catalog.errors]})
    else:
        for number, found in enumerate(plans):
            if number:
                click.echo()
            for line in _as_text(found):
                click.echo(line)
        for error in catalog.errors:
            click.echo(f"error: {error}", err=True)
    if catalog.errors:
        context.exit(ExitCode.USAGE)


def _pool_names(catalog: Catalog) -> list[str]:
    """The pools there are; without one, that of this machine."""
    return list(dict.fromkeys(pool.metadata.name for pool in catalog.pools)) or [""]


def _plan(catalog: Catalog, pool: str, memory: str | None, state_dir: Path) -> Desired:
    """The decision a controller of that pool would make."""
    from omnimodel.controllers.local_snapshot import Snapshot, decide

    # Once without sizes: only rendered processes have the hashes by which sizes are known.
    blind = Snapshot(catalog, {}, {}, pool, memory)
    desired = decide(blind)
    budgets = {desired.pool.metadata.name: _budget_bytes(desired.pool)}
    return decide(replace(blind, budgets=budgets, footprints=_known_sizes(desired, state_dir)))


def _budget_bytes(pool: OmniPool) -> int:
    """The device budget of a pool on this machine."""
    from omnimodel.agent.supply import supply

    return supply(pool).budget_bytes


def _known_sizes(desired: Desired, state_dir: Path) -> dict[str, int]:
    """Footprints that were measured on this state directory, by `namespace/name@generation`."""
    from omnimodel.agent.kept import kept_folder
    from omnimodel.agent.layout import Layout
    from omnimodel.agent.preparation import FOREIGN_ENGINES, Footprint
    from omnimodel.agent.supply import supply
    from omnimodel.memory.store import Store

    layout = Layout(state_dir, kept_folder(desired.pool, state_dir))
    if not layout.store.is_dir():
        return {}
    store, supplied = Store(layout.store), supply(desired.pool)
    sizes = {}
    for process in desired.processes:
        spec = process.spec.to_dict()
        footprint = Footprint.load(layout, spec["hash"])
        image = next(filter(None, map(store.lookup, supplied.forms.keys(spec))), None)
        if footprint is None or (image is None and spec["engine"] not in FOREIGN_ENGINES):
            continue
        frames = 0 if image is None else -(-image.bytes // supplied.frame_bytes)
        size_bytes = frames * supplied.frame_bytes + footprint.working_bytes
        sizes[f"{process.key}@{process.metadata.generation}"] = size_bytes
    return sizes


def _rows(desired: Desired) -> Iterator[tuple[str, str, str, str]]:
    """(model, size, where, remark) of each model that is meant for this pool."""
    from omnimodel.errors import Reason

    demands = {pod.pool: pod for pod in desired.plan.pods}
    for model in desired.models:
        refusal = desired.refused.get(model.key)
        size_bytes = desired.sizes.get(model.key, 0)
        shown = output.size(size_bytes) if size_bytes else "unknown"
        if refusal is None:
            told = (Reason.NAME_TAKEN, Reason.AFFINITY_CONFLICT)
            remarks = [message for reason, message in desired.notes.get(model.key, ()) if reason in told]
            yield _short(model.key), shown, next(iter(demands), "-"), "; ".join(remarks)
        elif refusal.reason != Reason.POOL_NOT_FOUND or model.spec.pool == desired.pool.metadata.name:
            yield _short(model.key), shown, "-", f"{refusal.reason}: {refusal.message}"


def _as_text(desired: Desired) -> Iterator[str]:
    for pod in desired.plan.pods:
        budget, footprints = output.size(pod.budget_bytes), output.size(pod.footprint_bytes)
        yield (
            f"pool {pod.pool}: {len(pod.models)} models, {footprints} of footprints on a budget of {budget}, "
            f"over-commit {pod.overcommit_ratio:.2f}; at most {pod.together} resident at once"
        )
        if unknown := sum(not desired.sizes.get(key) for key in pod.models):
            rest = (
                "are not counted: nobody has measured their sizes"
                if unknown > 1
                else "is not counted: nobody has measured its size"
            )
            yield f"  {unknown} of them {rest} yet"
    rows = [("MODEL", "SIZE", "POOL", ""), *_rows(desired)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "   ".join(["  " + cells[0], *cells[1:], row[3]]).rstrip()
    for pod in desired.plan.pods:
        yield from never_together(pod)


def never_together(pod: PodPlan, where: str = "") -> Iterator[str]:
    """What can never be resident together: one line a model, with all those that it excludes.

    Args:
        pod: with its models.
        where: words for the pod, where there are several.
    """
    if not pod.exclusive:
        return
    kept = f" less {output.size(pod.kept_bytes)} for the kept models" if pod.kept_bytes else ""
    yield f"never resident together{where} ({output.size(pod.budget_bytes)}{kept}):"
    partners: dict[str, list[str]] = {}
    threes: list[str] = []
    for group in pod.exclusive:
        first, *others = map(_short, group.models)
        if len(others) == 1:
            partners.setdefault(first, []).extend(others)
        else:
            threes.append(" + ".join((first, *others)))
    width = max(map(len, partners), default=0)
    for first, others in partners.items():
        yield f"  {first:<{width}}   not with {', '.join(others)}"
    shown = THREES_SHOWN if not partners else 0
    for names in threes[:shown]:
        yield f"  {names}"
    if len(threes) > shown or pod.exclusive_more:
        yield "  … and sets of three: see -o json"


def _short(key: str) -> str:
    """A model's name as all commands take it."""
    return key.removeprefix("default/")


def _as_json(desired: Desired) -> dict[str, Any]:
    pod = desired.plan.pods[0]
    return {
        "pool": pod.pool,
        "budgetBytes": pod.budget_bytes,
        "footprintBytes": pod.footprint_bytes,
        "keptBytes": pod.kept_bytes,
        "overcommitRatio": round(pod.overcommit_ratio, 3),
        "residentTogether": pod.together,
        "models": [
            {"model": key, "footprintBytes": desired.sizes.get(key, 0), "servedNames": list(names)}
            for key, names in desired.plan.served_names.items()
            if key in pod.models
        ],
        "refused": [
            {"model": key, "reason": str(refusal.reason), "message": refusal.message}
            for key, refusal in desired.refused.items()
        ],
        "neverTogether": exclusive_objects(pod),
    }


def exclusive_objects(pod: PodPlan) -> list[dict[str, Any]]:
    """What can never be resident together, as JSON values."""
    return [{"models": list(group.models), "message": group.message} for group in pod.exclusive]
