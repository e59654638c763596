"""Engine `command`: any HTTP server, by its command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from omnimodel.runtime.engines.foreign import ForeignEngine, check_command, socket_path

if TYPE_CHECKING:
    from omnimodel.runtime.engines import Setting


def create(setting: Setting, ended: Callable[[int], None]) -> ForeignEngine:
    """The engine of `runtime.command`.

    `{port}` or `{socket}` stands for the address to listen on there, and `{devices}` for how many devices it sees.
    """
    command = [*(setting.spec.get("command") or ()), *(setting.spec.get("args") or ())]
    check_command(setting, command)

    def argv(port: int) -> list[str]:
        filled = {"{port}": str(port), "{socket}": socket_path(), "{devices}": str(setting.devices)}
        return [functools.reduce(lambda text, name: text.replace(name, filled[name]), filled, part) for part in command]

    return ForeignEngine(setting, argv, setting.spec.get("healthPath") or "", ended)
