"""Engine `command`: any HTTP server, by its command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from omnimodel.runtime.engines.foreign import ForeignEngine, check_command, socket_path

if TYPE_CHECKING:
    from omnimodel.runtime.engines import Setting


def create(setting: Setting, ended: Callable[[int], None]) -> ForeignEngine:
    """The engine of `runtime.command`, where `{port}` or `{socket}` stands for the address to listen on."""
    command = [*(setting.spec.get("command") or ()), *(setting.spec.get("args") or ())]
    check_command(setting, command)

    def argv(port: int) -> list[str]:
        return [part.replace("{port}", str(port)).replace("{socket}", socket_path()) for part in command]

    return ForeignEngine(setting, argv, setting.spec.get("healthPath") or "", ended)
