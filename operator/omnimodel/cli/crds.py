"""`omni crds`: the custom resource definitions, their admission policy and the manifest reference, from the models."""

from __future__ import annotations

from pathlib import Path

import click

from omnimodel.cli.exits import ExitCode


@click.command()
@click.option("--reference", is_flag=True, help="The manifest reference (Markdown) instead of the definitions.")
@click.option("--policy", is_flag=True, help="The admission policy for what definitions cannot refuse, instead.")
@click.option("--output", "output_path", type=click.Path(path_type=Path), help="Write into this folder (or this file, "
              "for the reference) instead of stdout.")  # fmt: skip
@click.option("--check", "check_path", type=click.Path(path_type=Path), help="Fail when this folder or file differs.")
@click.pass_context
def command(
    context: click.Context, reference: bool, policy: bool, output_path: Path | None, check_path: Path | None
) -> None:
    """Print the custom resource definitions."""
    if output_path is not None and check_path is not None:
        raise click.UsageError("--output and --check exclude each other.", context)
    path = output_path or check_path or Path()
    if reference:
        from omnimodel.api.reference import generate as generate_reference

        texts = {path: generate_reference()}
    elif policy:
        from omnimodel.api.policy import generate as generate_policy

        texts = {path / name: text for name, text in generate_policy().items()}
    else:
        from omnimodel.api.crd import generate as generate_crds

        texts = {path / name: text for name, text in generate_crds().items()}
    if output_path is not None:
        for target, text in texts.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            click.echo(f"wrote {target}", err=True)
    elif check_path is not None:
        stale = [str(target) for target, text in texts.items() if not _is(target, text)]
        if stale:
            click.echo(f"{', '.join(stale)}: not what the models say; run `make generate`", err=True)
            context.exit(ExitCode.FAILED)
    else:
        click.echo("---\n".join(texts.values()), nl=False)


def _is(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
