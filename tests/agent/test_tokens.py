"""Tokens of a model: each process tells its own count, the agent keeps the sum, and asks nobody who is idle."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from omnimodel.agent import tokens
from omnimodel.agent.line import Line
from omnimodel.agent.tokens import Tokens
from omnimodel.errors import ProcessError
from omnimodel.protocol.process import Reply


class Process:
    """What answers a Ping; `says` is None while it is deaf."""

    def __init__(self, *says: int) -> None:
        self.computed = (0, 0)
        self.says: tuple[int, ...] | None = says
        self.asked = 0

    async def command(self, *_: object) -> Reply:
        self.asked += 1
        if self.says is None:
            raise ProcessError("OmniModel default/a", "it did not answer")
        return reply(*self.says)


def reply(prompt: int, generated: int) -> Reply:
    return Reply(1, ok=True, values={"promptTokens": prompt, "generatedTokens": generated})


def line() -> Line:
    return Line(None, 4, 4, lambda: None)


def model(process: Process) -> SimpleNamespace:
    """What is asked of an instance."""
    return SimpleNamespace(line=line(), process=process, freezable=True, resident=True)


def test_each_process_counts_from_nothing_and_what_is_said_twice_or_late_counts_once():
    found, first, second = Tokens(), Process(), Process()
    for process, said in ((first, (10, 5)), (first, (10, 9)), (second, (1, 2)), (first, (10, 5)), (first, (12, 9))):
        found.hear(process, reply(*said))
    assert found == Tokens(13, 11)


def test_a_status_can_hold_whatever_processes_say():
    found = Tokens()
    for _ in range(3):
        found.hear(Process(), reply((1 << 62) - 1, (1 << 62) - 1))
    assert found == Tokens(1 << 62, 1 << 62)


def test_a_process_that_tells_none_counts_for_none():
    found, process = Tokens(), Process()
    found.hear(process, reply(3, 4))
    found.hear(process, Reply(1, ok=True))
    assert found == Tokens(3, 4)


async def test_revisions_add_up_with_what_the_ones_before_them_have_in_flight():
    first, second, third = line(), line(), line()
    process = Process()
    first.tokens.hear(process, reply(10, 5))
    second.tokens.hear(Process(), reply(1, 1))
    first.hand_over(second)
    second.hand_over(third)
    first.tokens.hear(process, reply(10, 25))
    assert third.tokens == Tokens(11, 26)


async def test_who_computes_is_asked_and_once_more_after_and_nobody_else(monkeypatch):
    monkeypatch.setattr(tokens, "_SECONDS", 0.001)
    busy, idle, deaf, warm = Process(7, 1), Process(9, 9), Process(5, 5), Process(3, 3)
    models = {name: model(process) for name, process in zip("abcd", (busy, idle, deaf, warm), strict=True)}
    models["d"].resident = False
    deaf.says = None
    waiters = {name: models[name].line.arrive(0.0) for name in "acd"}
    for it in models.values():
        it.line.admit()
    for name in "cd":
        waiters[name].leave()
    running = asyncio.create_task(tokens.run(models))

    async def asked_again(process: Process, times: int) -> None:
        wanted = process.asked + times
        async with asyncio.timeout(30):
            while process.asked < wanted:  # noqa: ASYNC110 - it is asked every moment
                await asyncio.sleep(0.001)

    await asked_again(busy, 5)
    await asked_again(deaf, 5)
    deaf.says = (5, 5)
    await asked_again(deaf, 1)
    await asked_again(busy, 5)
    counts = deaf.asked
    await asked_again(busy, 5)
    assert (deaf.asked, idle.asked, warm.asked) == (counts, 0, 0), "nobody asks again who has told all"
    busy.says = (7, 20)
    waiters["a"].leave()
    async with asyncio.timeout(30):
        while models["a"].line.tokens != Tokens(7, 20):  # noqa: ASYNC110 - it is asked every moment
            await asyncio.sleep(0.001)
    assert models["c"].line.tokens == Tokens(5, 5)
    running.cancel()
