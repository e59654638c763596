"""Which system a command talks to: options, environment variables, and the state directory's address file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from omnimodel.cli.client import Client
from omnimodel.cli.exits import ConnectionFailed
from omnimodel.errors import OmniError

Command = TypeVar("Command", bound=Callable[..., Any])
ADDRESS_FILE = "address"


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/omnimodel`, or `~/.local/state/omnimodel`.

    Source: XDG Base Directory Specification; a relative path in the variable is to be ignored.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "omnimodel"


def state_dir_option(function: Command) -> Command:
    """Add `--state-dir`."""
    return click.option(
        "--state-dir",
        envvar="OMNI_STATE_DIR",
        type=click.Path(file_okay=False, path_type=Path),
        default=default_state_dir,
        show_default="XDG state directory",
        help="Where a system on this machine keeps its state.",
    )(function)


def address_options(function: Command) -> Command:
    """Add `--address`, `--token-file` and `--state-dir`, given to the command as one `client`."""

    @functools.wraps(function)
    def with_client(*args: Any, address: str | None, state_dir: Path, token_file: Path | None, **kwargs: Any) -> Any:
        return function(*args, client=Client(address or read_address(state_dir), read_token(token_file)), **kwargs)

    option = click.option(
        "--address",
        envvar="OMNI_ADDRESS",
        metavar="URL",
        help="The system to talk to.  [default: the one on this machine]",
    )
    token = click.option(
        "--token-file",
        envvar="OMNI_TOKEN_FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The token of an agent that asks for one.",
    )
    return cast("Command", option(token(state_dir_option(with_client))))


def read_address(state_dir: Path) -> str:
    """The address of the system that runs on a state directory.

    Raises:
        ConnectionFailed: none runs there.
    """
    try:
        return (state_dir / ADDRESS_FILE).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise ConnectionFailed(
            f"state directory {state_dir}",
            "no system runs on it",
            "start one with `omni up DIR`, or name another with --address or OMNI_ADDRESS",
        ) from None


def read_token(file: Path | None) -> str:
    """The token in a file; empty without one.

    Raises:
        OmniError: it cannot be read.
    """
    try:
        return "" if file is None else file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise OmniError(f"token file {file}", str(error), "name a file that can be read, or none") from None


def split_name(model: str) -> tuple[str, str]:
    """Namespace and name of `smollm2` or `team-a/smollm2`; `OMNI_NAMESPACE` is that of names without one."""
    namespace, slash, name = model.partition("/")
    return (namespace, name) if slash else (os.environ.get("OMNI_NAMESPACE") or "default", namespace)
