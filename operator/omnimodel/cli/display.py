"""What `omni up` shows while it runs: a live table, plain lines, or JSON."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from omnimodel.cli import live, output
from omnimodel.cli.aside import Aside, Lines
from omnimodel.cli.describe import event_line

if TYPE_CHECKING:
    from omnimodel.controllers.local import LocalController

REFRESH_SECONDS = 0.25


class Display:
    """Shows one controller until cancelled. Who stops reading misses what happens meanwhile, and stops nothing.

    Args:
        controller: whose objects are shown.
        address: of the gateway.
        form: `json`, or None for people.
        out, errors: standard output and standard error.
    """

    def __init__(
        self, controller: LocalController, address: str, *, form: str | None, out: Lines, errors: Lines
    ) -> None:
        self._controller = controller
        self._address = address
        self._form = form
        self._out = out
        self._errors = errors
        self._console = Console(stderr=True)

    async def run(self) -> None:
        """Show until cancelled."""
        if self._form == "json":
            await self._json()
        elif self._console.is_terminal:
            await self._table()
        else:
            await self._lines()

    async def _settled(self) -> None:
        while self._controller.unsettled():
            await self._controller.wait_changed()

    async def _json(self) -> None:
        await self._settled()
        await self._out.write(_json({"ready": True, "address": self._address, **self._summary()}))
        async for event in self._controller.events(follow=True):
            await self._out.write(_json(asdict(event)))

    async def _lines(self) -> None:
        lines = asyncio.create_task(self._event_lines())
        try:
            await self._settled()
            await self._say_ready()
            await lines
        finally:
            lines.cancel()

    async def _event_lines(self) -> None:
        async for event in self._controller.events(follow=True):
            await self._errors.write(f"{event_line(asdict(event))}  ({event.kind} {event.name})")

    async def _table(self) -> None:
        terminal = Aside()  # one whose output is paused takes nothing
        picture = Live(console=self._console, auto_refresh=False, transient=False)
        told = False
        try:
            await terminal.run(picture.start)
            while True:
                models, pools = self._controller.objects("OmniModel"), self._controller.objects("OmniPool")
                errors = self._controller.status_lines()["errors"]
                rows = live.rows_that_fit(self._console, len(pools), errors)
                screen = live.screen(models, pools, errors, rows=rows)
                await terminal.run(partial(picture.update, screen, refresh=True))
                if not told and not self._controller.unsettled():
                    told = True
                    await terminal.run(partial(self._print_ready, live.curl_line(self._address, models)))
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            terminal.begin(picture.stop)
            await terminal.finish()

    def _print_ready(self, curl: str) -> None:
        self._console.print(Text(f"Ready at {self._address}", style="bold"))
        self._console.print(curl, soft_wrap=True, highlight=False)

    def _summary(self) -> dict[str, Any]:
        """How many models there are, and those that cannot serve."""
        models = self._controller.objects("OmniModel")
        failed = []
        for item in models:
            ready = output.condition(item, "Ready")
            if ready.get("status") != "True":
                name = output.full_name(item)
                failed.append({"model": name, "reason": ready.get("reason"), "message": ready.get("message")})
        return {"models": len(models), "failed": failed, "errors": self._controller.status_lines()["errors"]}

    async def _say_ready(self) -> None:
        models = self._controller.objects("OmniModel")
        summary = self._summary()
        for failure in summary["failed"]:
            await self._errors.write(f"{failure['model']}: {failure['reason']}: {failure['message']}")
        for error in summary["errors"]:
            await self._errors.write(f"error: {error['message']}")
        await self._out.write(f"Ready at {self._address}")
        await self._out.write(live.curl_line(self._address, models))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
