"""The ledger: bytes are conserved, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnimodel.errors import LedgerError, Reason
from omnimodel.memory.ledger import Account, DeviceAccount, Kind, Ledger

FRAME = 16


@pytest.fixture
def device():
    return DeviceAccount(160, FRAME)


def test_two_wakes_never_get_the_same_bytes(device):
    device.promise("default/a", 6)
    with pytest.raises(LedgerError) as caught:
        device.promise("default/b", 5)
    assert "80 more bytes" in str(caught.value)
    assert "64 of 160 are free" in str(caught.value)
    assert caught.value.reason == Reason.OUT_OF_MEMORY
    device.promise("default/b", 4)
    assert device.free_bytes == 0


def test_a_model_has_one_promise_at_a_time(device):
    device.promise("default/a", 1)
    with pytest.raises(LedgerError, match="two wakes"):
        device.promise("default/a", 1)


def test_promise_granted_released(device):
    device.promise("default/a", 3, working_bytes=20)
    assert device.missing_frames() == 3
    device.created(3)
    assert device.grant("default/a").frames == 3
    assert device.snapshot().held == {"default/a": {Kind.FRAMES: 48, Kind.WORKING: 20}}
    assert device.release_frames("default/a") == 3
    device.set("default/a", Kind.WORKING, 0)
    assert (device.free_bytes, device.free_frames, device.frames) == (160, 3, 3)


def test_frames_that_do_not_exist_yet_cannot_be_granted(device):
    device.promise("default/a", 3)
    device.created(2)
    with pytest.raises(LedgerError, match="promised 3 frames, 2 are free"):
        device.grant("default/a")
    assert device.promised("default/a").frames == 3


def test_host_memory_over_its_budget_is_told_as_it_is_and_grants_nothing():
    host = Ledger(160, 100, FRAME).host
    host.hold("image a", Kind.ARENA, 60)
    host.set("default/a", Kind.PROCESS, 70)
    assert (host.held_bytes(), host.free_bytes, host.snapshot().free_bytes) == (130, -30, -30)
    with pytest.raises(LedgerError, match="-30 of 100 are free"):
        host.hold("image b", Kind.ARENA, 1)
    host.hold("default/b", Kind.PROCESS, 0)
    host.set("default/a", Kind.PROCESS, 80)
    assert host.free_bytes == -40
    host.give_back("image a", Kind.ARENA)
    host.hold("image b", Kind.ARENA, 20)
    assert host.free_bytes == 0
    host.resize(50)
    assert (host.held_bytes(), host.free_bytes) == (100, -50)


def test_the_device_is_never_over_its_budget(device):
    device.set("default/a", Kind.WORKING, 100)
    with pytest.raises(LedgerError, match="61 more bytes"):
        device.set("default/b", Kind.WORKING, 61)
    with pytest.raises(LedgerError, match="cannot become 99 bytes while 100 are held"):
        device.resize(99)
    assert device.held_bytes() == 100


def test_nothing_can_be_granted_that_was_not_promised(device):
    with pytest.raises(LedgerError, match="nothing"):
        device.grant("default/a")


def test_a_cancelled_promise_is_free_for_the_next(device):
    device.promise("default/a", 10)
    device.cancel("default/a")
    device.cancel("default/a")
    device.promise("default/b", 10)


def test_free_frames_go_for_working_memory(device):
    device.created(10)
    assert device.surplus_frames() == 0
    device.promise("default/a", 6, working_bytes=33)
    assert device.surplus_frames() == 3  # 33 bytes are more than two frames
    with pytest.raises(LedgerError, match="3 frames stand in the way"):
        device.grant("default/a")
    device.destroyed(3)
    device.grant("default/a")
    device.set("default/a", Kind.WORKING, 64)
    assert device.surplus_frames() == 1


def test_working_memory_that_grew_over_the_budget_is_an_error_and_changes_nothing(device):
    device.promise("default/a", 8)
    device.set("default/b", Kind.WORKING, 30)
    with pytest.raises(LedgerError, match="3 more bytes of working on the device, 2 of 160"):
        device.set("default/b", Kind.WORKING, 33)
    assert device.held_bytes("default/b", Kind.WORKING) == 30


def test_quarantined_frames_are_not_free(device):
    device.promise("default/a", 4)
    device.created(4)
    device.grant("default/a")
    assert device.quarantine("default/a") == 4
    assert (device.free_bytes, device.free_frames) == (96, 0)
    with pytest.raises(LedgerError):
        device.destroyed(1)
    assert device.recover("default/a") == 4
    assert (device.free_bytes, device.free_frames) == (160, 4)


def test_more_is_not_given_back_than_is_held():
    account = Account("host", 100)
    account.hold("default/a", Kind.PROCESS, 10)
    with pytest.raises(LedgerError, match=r"11 bytes.*holds 10"):
        account.give_back("default/a", Kind.PROCESS, 11)
    with pytest.raises(LedgerError, match="holds 0"):
        account.give_back("default/b", Kind.PROCESS, 1)
    assert account.give_back("default/b", Kind.PROCESS) == 0


@pytest.mark.parametrize("call", ["hold", "set", "give_back"])
def test_negative_bytes_are_refused(call):
    account = Account("host", 100)
    with pytest.raises(LedgerError, match="below zero"):
        getattr(account, call)("default/a", Kind.PROCESS, -1)


def test_a_budget_grows_and_shrinks_down_to_what_is_held():
    account = Account("host", 100)
    account.hold("zygote", Kind.ZYGOTE, 60)
    account.resize(200)
    assert account.free_bytes == 140
    with pytest.raises(LedgerError, match="59 bytes while 60 are held"):
        account.resize(59)
    account.resize(60)
    assert account.free_bytes == 0


def test_what_processes_were_measured_to_hold_is_told_although_it_is_more_than_there_is():
    host = Ledger(160, 100, FRAME).host
    host.set("default/a", Kind.PROCESS, 70)
    host.set("default/b", Kind.PROCESS, 50)
    assert host.snapshot().held == {"default/a": {Kind.PROCESS: 70}, "default/b": {Kind.PROCESS: 50}}
    assert host.free_bytes == -20
    host.hold("default/c", Kind.PROCESS, 0)
    with pytest.raises(LedgerError, match="1 more bytes of arena on the host"):
        host.hold("image", Kind.ARENA, 1)
    host.set("default/a", Kind.PROCESS, 60)
    assert host.free_bytes == -10
    host.resize(40)
    assert host.free_bytes == -70
    host.give_back("default/a", Kind.PROCESS)
    host.give_back("default/b", Kind.PROCESS)
    host.hold("image", Kind.ARENA, 40)


def test_frames_that_are_free_may_stand_over_a_smaller_budget_until_they_are_destroyed(device):
    device.created(10)
    device.resize(100)
    assert device.surplus_frames() == 4
    device.destroyed(4)
    assert device.surplus_frames() == 0
    assert device.spare_frames() == 0


def test_snapshot_adds_up_and_does_not_change_afterwards():
    ledger = Ledger(160, 100, FRAME)
    ledger.device.created(3)
    ledger.device.promise("default/a", 2)
    ledger.device.grant("default/a")
    ledger.host.hold("default/a", Kind.PROCESS, 7)
    ledger.host.hold("image", Kind.ARENA, 20)
    snapshot = ledger.snapshot()
    ledger.device.release_frames("default/a")
    assert (snapshot.frames, snapshot.free_frames) == (3, 1)
    assert snapshot.device.total_bytes(Kind.FRAMES) == 32
    assert snapshot.host.held == {"default/a": {Kind.PROCESS: 7}, "image": {Kind.ARENA: 20}}
    assert snapshot.host.free_bytes == 73
    assert ledger.held_by("default/a") == (0, 7)


def test_a_forgotten_holder_keeps_only_frames():
    ledger = Ledger(160, 100, FRAME)
    ledger.device.created(2)
    ledger.device.promise("default/a", 1, 8)
    ledger.device.grant("default/a")
    ledger.device.promise("default/a", 1)
    ledger.host.hold("default/a", Kind.PROCESS, 7)
    ledger.forget("default/a")
    assert ledger.device.snapshot().held == {"default/a": {Kind.FRAMES: 16}}
    assert ledger.host.free_bytes == 100


MODELS = ["a", "b", "c", "d"]
models = st.sampled_from(MODELS)
amounts = st.integers(0, 200)


class LedgerMachine(RuleBasedStateMachine):
    """Random promises, grants, releases, growth and edits; a plain dictionary says what must be true."""

    def __init__(self):
        super().__init__()
        self.device = DeviceAccount(160, FRAME)
        self.expected: dict[tuple[str, Kind], int] = {}
        self.promises: dict[str, tuple[int, int]] = {}
        self.frames = 0

    def total(self, *kinds):
        return sum(size for (_, kind), size in self.expected.items() if not kinds or kind in kinds)

    def add(self, model, kind, size):
        self.expected[model, kind] = self.expected.get((model, kind), 0) + size

    @rule(model=models, frames=st.integers(0, 12), working=st.integers(0, 60))
    def promise(self, model, frames, working):
        size = frames * FRAME + working
        fits = self.total() + size <= self.device.capacity_bytes and model not in self.promises
        if fits:
            self.device.promise(model, frames, working)
            self.promises[model] = (frames, working)
            self.add(model, Kind.PROMISE, size)
        else:
            with pytest.raises(LedgerError):
                self.device.promise(model, frames, working)

    @rule(model=models)
    def bring_into_line_and_grant(self, model):
        surplus = self.device.surplus_frames()
        self.device.destroyed(surplus)
        missing = self.device.missing_frames()
        self.device.created(missing)
        self.frames += missing - surplus
        if model not in self.promises:
            with pytest.raises(LedgerError):
                self.device.grant(model)
            return
        frames, working = self.promises.pop(model)
        self.device.grant(model)
        del self.expected[model, Kind.PROMISE]
        self.add(model, Kind.FRAMES, frames * FRAME)
        self.add(model, Kind.WORKING, working)

    @rule(model=models)
    def cancel(self, model):
        self.device.cancel(model)
        self.promises.pop(model, None)
        self.expected.pop((model, Kind.PROMISE), None)

    @rule(model=models, size=amounts, kind=st.sampled_from([Kind.WORKING, Kind.CONTEXT]))
    def measure(self, model, size, kind):
        grown = size - self.expected.get((model, kind), 0)
        if self.total() + grown <= self.device.capacity_bytes:
            self.device.set(model, kind, size)
            self.expected[model, kind] = size
        else:
            with pytest.raises(LedgerError):
                self.device.set(model, kind, size)

    @rule(model=models)
    def evict(self, model):
        held = self.expected.pop((model, Kind.FRAMES), 0)
        assert self.device.release_frames(model) == held // FRAME

    @rule(model=models)
    def does_not_acknowledge(self, model):
        held = self.expected.pop((model, Kind.FRAMES), 0)
        assert self.device.quarantine(model) == held // FRAME
        self.add(model, Kind.QUARANTINE, held)

    @rule(model=models)
    def dies(self, model):
        held = self.expected.pop((model, Kind.QUARANTINE), 0)
        assert self.device.recover(model) == held // FRAME

    @precondition(lambda self: self.device.spare_frames())
    @rule()
    def create_ahead(self):
        self.device.created(1)
        self.frames += 1

    @rule(capacity=st.integers(0, 300))
    def edit_pool(self, capacity):
        if capacity >= self.total():
            self.device.resize(capacity)
        else:
            with pytest.raises(LedgerError):
                self.device.resize(capacity)

    @invariant()
    def bytes_are_conserved(self):
        held = {key: size for key, size in self.expected.items() if size}
        found = {
            (who, kind): size for who, kinds in self.device.snapshot().held.items() for kind, size in kinds.items()
        }
        assert found == held
        assert self.device.free_bytes == self.device.capacity_bytes - self.total()
        assert 0 <= self.device.free_bytes <= self.device.capacity_bytes

    @invariant()
    def frames_are_conserved(self):
        owned = self.total(Kind.FRAMES, Kind.QUARANTINE) // FRAME
        assert self.device.frames == self.frames
        assert self.device.free_frames == self.frames - owned >= 0

    @invariant()
    def what_exists_fits_once_the_surplus_is_gone(self):
        surplus = self.device.surplus_frames()
        promised_frames = sum(frames for frames, _ in self.promises.values())
        assert surplus <= max(0, self.device.free_frames - promised_frames)
        working = self.total(Kind.WORKING, Kind.CONTEXT) + sum(working for _, working in self.promises.values())
        assert (self.frames - surplus) * FRAME + working <= self.device.capacity_bytes


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
