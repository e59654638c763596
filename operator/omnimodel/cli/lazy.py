"""A click group whose commands are imported only when they run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that lists its commands from a table.

    Args:
        lazy_commands: name -> (`module` or `module:attribute`, one line of help). The attribute is `command` unless
            it is given.
    """

    def __init__(self, *args: Any, lazy_commands: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the table."""
        del ctx
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        del ctx
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(module), attribute or "command")
        if not isinstance(found, click.Command):
            raise TypeError(f"{module}:{attribute or 'command'} is no command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest one there is."""
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            near = get_close_matches(name, self._table, 1)
            hint = f" Did you mean `{near[0]}`?" if near else f" There are: {', '.join(self._table)}."
            raise click.UsageError(f"No such command `{name}`.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing one."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])
