"""Host memory: the account says what the kernel says, and what is too much is given up, no more."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from omnimodel.agent import accounting
from omnimodel.agent.accounting import Accounting
from omnimodel.agent.history import History
from omnimodel.agent.instance import State
from omnimodel.errors import ProcessError
from omnimodel.memory.ledger import Kind, Ledger

MIB = 1 << 20


def model(name: str, private_bytes: int, state: State = State.WARM) -> SimpleNamespace:
    """What is asked of an instance."""
    process = SimpleNamespace(private_bytes=lambda: private_bytes)
    line, history = SimpleNamespace(busy=False, changed=lambda: None), History()
    return SimpleNamespace(name=name, process=process, state=state, private_bytes=0, line=line, history=history)


@pytest.fixture
def ledger():
    return Ledger(0, 100 * MIB, 4 * MIB)


def kept(
    ledger: Ledger, *models: SimpleNamespace, zygote_bytes: int = 0, on_host: bool = True
) -> tuple[Accounting, list[int]]:
    given_up: list[int] = []
    memory = SimpleNamespace(ledger=ledger, device=SimpleNamespace(on_host=on_host))
    found = Accounting(memory, {m.name: m for m in models}, lambda: zygote_bytes, given_up.append)
    return found, given_up


async def test_a_process_that_grows_by_a_little_gives_up_a_little(ledger):
    ledger.host.hold("image a", Kind.ARENA, 60 * MIB)  # the arena may hold all that is free
    ledger.host.set("default/a", Kind.PROCESS, 40 * MIB)
    grown = model("default/a", 41 * MIB)
    accounts, given_up = kept(ledger, grown)
    await accounts.measure(grown)
    assert given_up == [1 * MIB]
    assert ledger.host.held_bytes("default/a", Kind.PROCESS) == grown.private_bytes == 41 * MIB
    assert ledger.host.free_bytes == -1 * MIB


async def test_all_that_is_over_the_budget_is_told_until_it_is_not(ledger):
    models = [model(f"default/{number}", 30 * MIB) for number in range(5)]
    accounts, given_up = kept(ledger, *models)
    for each in models:
        await accounts.measure(each)
    assert given_up == [20 * MIB, 50 * MIB]
    assert ledger.host.held_bytes(kind=Kind.PROCESS) == 150 * MIB
    for each in models[:2]:
        ledger.forget(each.name)
    await accounts.measure(models[4])
    assert len(given_up) == 2


@pytest.mark.parametrize("state", [State.RESIDENT, State.FROZEN, State.WAKING, State.EVICTING])
async def test_on_the_device_it_is_covered_by_what_it_was_granted(ledger, state):
    resident = model("default/a", 500 * MIB, state)
    accounts, given_up = kept(ledger, resident)
    await accounts.measure(resident)
    assert (resident.private_bytes, ledger.host.held_bytes(), given_up) == (500 * MIB, 0, [])


async def test_beside_a_device_with_memory_of_its_own_it_is_held_on_the_host(ledger):
    resident = model("default/a", 50 * MIB, State.RESIDENT)
    accounts, _ = kept(ledger, resident, on_host=False)
    await accounts.measure(resident)
    assert ledger.host.held_bytes("default/a", Kind.PROCESS) == 50 * MIB


async def test_what_a_process_holds_at_rest_is_remembered_and_no_small_change_of_it(ledger):
    held, news = [], []
    idle = model("default/a", 0, State.RESIDENT)
    idle.line.changed = lambda: news.append(idle.history.idle_bytes // MIB)
    accounts, _ = kept(ledger, idle)
    for state, busy, private_mib in (
        (State.RESIDENT, True, 90),  # it computes
        (State.RESIDENT, False, 50),  # the first that is known
        (State.RESIDENT, False, 70),  # it may keep there what it computed with
        (State.EVICTING, False, 60),
        (State.WARM, False, 30),
        (State.WARM, False, 33),
        (State.WARM, False, 45),
    ):
        idle.state, idle.line.busy, held_bytes = state, busy, private_mib * MIB
        idle.process.private_bytes = lambda held_bytes=held_bytes: held_bytes
        await accounts.measure(idle)
        held.append(idle.history.idle_bytes // MIB)
    assert held == [0, 50, 50, 50, 30, 30, 45]
    assert news == [50, 30, 45]


async def test_one_process_that_cannot_be_measured_does_not_end_the_measuring(ledger, monkeypatch):
    def gone() -> int:
        raise ProcessError("default/a", "it is gone")

    raised = threading.Event()

    def odd() -> int:
        raised.set()
        raise RuntimeError("not thought of")

    monkeypatch.setattr(accounting, "_SECONDS", 0.001)
    first, second, third = (model(f"default/{name}", 10 * MIB) for name in "abc")
    first.process.private_bytes, second.process.private_bytes = gone, odd
    accounts, _ = kept(ledger, first, second, third, zygote_bytes=7 * MIB)
    running = asyncio.create_task(accounts.run())
    assert await asyncio.to_thread(raised.wait, 60)
    second.process.private_bytes = lambda: 20 * MIB
    async with asyncio.timeout(60):
        while ledger.host.held_bytes() != 37 * MIB:  # noqa: ASYNC110 - it is measured every moment
            await asyncio.sleep(0.005)
    assert not running.done()
    running.cancel()
