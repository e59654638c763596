"""`omni publish`: fills a store with the images and environments of models, without a system that serves them."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnimodel.cli import output
from omnimodel.cli.exits import ExitCode

if TYPE_CHECKING:
    from omnimodel.agent.forms import Forms
    from omnimodel.agent.preparation import Preparation
    from omnimodel.api import OmniProcess
    from omnimodel.catalog import Catalog
    from omnimodel.controllers.local_snapshot import Desired

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Published:
    """What became of one model.

    Args:
        digest, bytes: of its image; none for an engine that reads its source itself.
        environment: key of its environment.
        source: digest of its source, where it is needed beside the image.
        message: why there is none of it; `failed` tells a fault from what is left out.
    """

    model: str
    dtype: str = ""
    digest: str = ""
    bytes: int = 0
    environment: str = ""
    source: str = ""
    message: str = ""
    failed: bool = False


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--store", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Where to publish; made when it is not there.")  # fmt: skip
@click.option("--pool", default="", metavar="NAME", help="Whose models, sources and volumes, when DIR has several.")
@click.option("--dtype", default="", type=click.Choice(["", *DTYPES]), metavar="|".join(DTYPES), help="What `auto` "
              "stands for where the store will be used.  [default: what suits this machine]")  # fmt: skip
@click.option("-o", "--output", "form", type=click.Choice(["json"]), help="Write the result as JSON.")
@click.pass_context
def command(context: click.Context, folder: Path, store: Path, pool: str, dtype: str, form: str | None) -> None:
    """Publish the models of DIR into a store that pools can name in spec.store.published.

    What is there already stays and is checked. One line a model, with the digest and the bytes of its image.
    """
    from omnimodel.catalog import load
    from omnimodel.cli.up import raise_open_files
    from omnimodel.controllers.local_snapshot import Snapshot, decide

    catalog = load([folder])
    for error in catalog.errors:
        click.echo(f"error: {error}", err=True)
    if catalog.errors:
        context.exit(ExitCode.USAGE)
    desired = decide(Snapshot(catalog, {}, {}, pool, None))
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="omni-publish-") as run:
        Path(run).chmod(0o711)  # publishers have users of their own
        found = asyncio.run(_publish(catalog, desired, Path(run), store.resolve(), dtype))
    if form == "json":
        output.write_json({"store": str(store.resolve()), "models": [vars(item) for item in found]})
    else:
        heads = ("MODEL", "DTYPE", "SIZE", "DIGEST")
        rows = [
            (item.model, item.dtype or "-", output.size(item.bytes), item.digest or item.source or "-")
            for item in found
        ]
        output.write_columns(heads, rows)
    for item in found:
        if item.message:
            click.echo(f"error: {item.message}" if item.failed else item.message, err=True)
    if any(item.failed for item in found):
        context.exit(ExitCode.FAILED)


async def _publish(catalog: Catalog, desired: Desired, run: Path, store: Path, dtype: str) -> list[Published]:
    from omnimodel.agent.kept import KeptLock
    from omnimodel.agent.layout import Layout
    from omnimodel.agent.origins import write_files
    from omnimodel.agent.preparation import Preparation
    from omnimodel.agent.spawner import Spawner
    from omnimodel.agent.supply import HOST_FRAME_BYTES, auto_threads, forms_elsewhere
    from omnimodel.errors import Reason
    from omnimodel.render import files_of_sources

    pool = desired.pool
    found = [
        Published(key, message=f"OmniModel {key}: {refusal.message}", failed=refusal.reason != Reason.POOL_NOT_FOUND)
        for key, refusal in desired.refused.items()
    ]
    with closing(KeptLock(pool.subject, store)):
        layout = Layout(run, store)
        layout.make()
        write_files(layout.origins, files_of_sources(pool, catalog.config(pool.metadata.namespace)))
        spawner = await Spawner.open(layout.root)
        try:
            forms = forms_elsewhere(pool, dtype)
            preparation = Preparation(layout, spawner, "host", HOST_FRAME_BYTES, auto_threads(), forms=lambda: forms)
            preparation.origins.follow(pool.spec.sources)
            found += [await _one(preparation, process, catalog, forms) for process in desired.processes]
        finally:
            await spawner.close()
    return sorted(found, key=lambda item: item.model)


async def _one(preparation: Preparation, process: OmniProcess, catalog: Catalog, forms: Forms) -> Published:
    """Publish one model; what fails is said, and keeps no other from being published."""
    from omnimodel.agent.preparation import FOREIGN_ENGINES
    from omnimodel.errors import OmniError
    from omnimodel.render import fill_secrets

    subject, told = f"OmniModel {process.key}", ""

    def tell(phase: str, _share: float) -> None:
        nonlocal told
        if phase != told:
            click.echo(f"{process.key}: {phase}", err=True)
        told = phase

    spec = fill_secrets(process.spec.to_dict(), catalog.secrets(process.metadata.namespace))
    foreign = spec["engine"] in FOREIGN_ENGINES
    fetched = any(spec["source"].get(kind) for kind in ("package", "huggingFace", "url"))
    if foreign and not fetched:
        message = f"engine {spec['engine']} reads its source where it is: have it there, or in a volume of the pool"
        return Published(process.key, message=f"{subject}: {message}")
    source = ""
    try:
        prepared = await preparation.prepare(subject, spec, tell)
        if fetched and prepared.source is not None:  # which the engine reads, or a mount shows
            source = await preparation.seal_source(spec)
        elif fetched:
            await preparation.forget_source(spec)
    except OmniError as error:
        return Published(process.key, message=str(error), failed=True)
    environment = prepared.environment.parent.name if prepared.environment else ""
    image = prepared.image
    if image is None:
        return Published(process.key, source=source, environment=environment)
    return Published(process.key, forms.dtype(spec), image.digest, image.bytes, environment, source)
