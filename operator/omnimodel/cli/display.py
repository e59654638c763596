"""What `omni up` shows while it runs: a live table, plain lines, or JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from omnimodel.cli import live, output
from omnimodel.cli.describe import event_line

if TYPE_CHECKING:
    from omnimodel.controllers.local import LocalController

REFRESH_SECONDS = 0.25


class Display:
    """Shows one controller until cancelled.

    Args:
        controller: whose objects are shown.
        address: of the gateway.
        form: `json`, or None for people.
    """

    def __init__(self, controller: LocalController, address: str, *, form: str | None) -> None:
        self._controller = controller
        self._address = address
        self._form = form
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
        _write({"ready": True, "address": self._address, **self._summary()})
        async for event in self._controller.events(follow=True):
            _write(asdict(event))

    async def _lines(self) -> None:
        lines = asyncio.create_task(self._event_lines())
        try:
            await self._settled()
            self._say_ready()
            await lines
        finally:
            lines.cancel()

    async def _event_lines(self) -> None:
        async for event in self._controller.events(follow=True):
            print(f"{event_line(asdict(event))}  ({event.kind} {event.name})", file=sys.stderr, flush=True)

    async def _table(self) -> None:
        told = False
        with Live(console=self._console, auto_refresh=False, transient=False) as picture:
            while True:
                models, pools = self._controller.objects("OmniModel"), self._controller.objects("OmniPool")
                errors = self._controller.status_lines()["errors"]
                rows = live.rows_that_fit(self._console, len(pools), errors)
                picture.update(live.screen(models, pools, errors, rows=rows), refresh=True)
                if not told and not self._controller.unsettled():
                    told = True
                    self._console.print(Text(f"Ready at {self._address}", style="bold"))
                    self._console.print(live.curl_line(self._address, models), soft_wrap=True, highlight=False)
                await asyncio.sleep(REFRESH_SECONDS)

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

    def _say_ready(self) -> None:
        models = self._controller.objects("OmniModel")
        summary = self._summary()
        for failure in summary["failed"]:
            print(f"{failure['model']}: {failure['reason']}: {failure['message']}", file=sys.stderr)
        for error in summary["errors"]:
            print(f"error: {error['message']}", file=sys.stderr)
        print(f"Ready at {self._address}", flush=True)
        print(live.curl_line(self._address, models), flush=True)


def _write(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)
