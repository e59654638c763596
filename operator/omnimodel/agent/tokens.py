"""Tokens that the processes of a model have computed: each says how many it has, and the agent keeps the sum.

A process is asked every second while it has requests, once more after the last of them, and says it with each evict.
Nobody waits for it, nothing is asked of an idle model, and a process that dies takes along only what it has not told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnimodel.errors import OmniError
from omnimodel.protocol.process import Ping, Reply

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.process import ModelProcess

_SECONDS = 1.0
_PING_SECONDS = 2.0
_MOST = 1 << 62  # a status takes no more, and a stranger's code says it


@dataclass
class Tokens:
    """Of one model since the agent began, whichever of its revisions and processes computed them."""

    prompt: int = 0
    generated: int = 0

    def add(self, prompt: int, generated: int) -> None:
        """So many more."""
        self.prompt = min(self.prompt + prompt, _MOST)
        self.generated = min(self.generated + generated, _MOST)

    def hear(self, process: ModelProcess, reply: Reply) -> None:
        """Add what a process has computed since it told last."""
        prompt, generated = process.computed
        process.computed = max(prompt, told(reply)[0]), max(generated, told(reply)[1])
        self.add(process.computed[0] - prompt, process.computed[1] - generated)


def told(reply: Reply) -> tuple[int, int]:
    """Tokens of prompts, and generated, since its process began."""
    return reply.number("promptTokens"), reply.number("generatedTokens")


async def run(instances: Mapping[str, Instance]) -> None:
    """Ask again and again whoever may have computed since."""
    while True:
        await asyncio.sleep(_SECONDS)
        await asyncio.gather(*(_ask(it) for it in list(instances.values()) if not it.line.tokens_asked))


async def _ask(instance: Instance) -> None:
    line, process = instance.line, instance.process
    if not (instance.freezable and instance.resident and process is not None):  # others do not count, or tell later
        return
    line.tokens_asked = not line.in_flight
    try:
        line.tokens.hear(process, await process.command(Ping(), (), _PING_SECONDS))
    except OmniError:
        line.tokens_asked = False
