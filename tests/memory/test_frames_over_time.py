"""The owner table of frames under random wakes, evicts, kills and edits: a frame holds what the table says, always."""

from __future__ import annotations

import asyncio
import ctypes

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omnimodel.errors import LedgerError
from omnimodel.memory.devices.host import HostDevice
from omnimodel.memory.frames import FramePool
from omnimodel.memory.ledger import DeviceAccount, Kind

FRAME = 2 << 20
SIZES = {"a": 1, "b": 3, "c": 5, "d": 7}


class FramesMachine(RuleBasedStateMachine):
    """Random wakes, evicts, kills and edits over real frames; a frame holds what the table says, always."""

    @initialize()
    def begin(self):
        self.loop = asyncio.new_event_loop()
        self.device = HostDevice(FRAME, threads=1)
        self.account = DeviceAccount(8 * FRAME, FRAME)
        self.pool = FramePool(self.device, self.account)
        self.resident: dict[str, list] = {}
        self.apart: dict[str, int] = {}

    def do(self, work):
        return self.loop.run_until_complete(work)

    def mark(self, digest, number):
        return (digest.encode() + bytes([number])) * 4

    @rule(model=st.sampled_from(sorted(SIZES)), working=st.sampled_from([0, 1, FRAME]), fails=st.booleans())
    def wake(self, model, working, fails):
        if model in self.resident:
            return
        try:
            self.account.promise(model, SIZES[model], working)
        except LedgerError:
            return
        self.do(self.pool.make_room(ord))
        allocation = self.pool.take(model, model, ord)
        for number, (frame, valid) in enumerate(zip(allocation.frames, allocation.valid, strict=True)):
            mark = self.mark(model, number)
            if valid:
                assert ctypes.string_at(frame.handle.address, len(mark)) == mark
            elif not fails:
                ctypes.memmove(frame.handle.address, mark, len(mark))
            else:
                ctypes.memmove(frame.handle.address, b"?" * 8, 8)
        if fails:
            self.pool.release(model)
            self.account.set(model, Kind.WORKING, 0)
        else:
            self.pool.arrived(allocation)
            self.resident[model] = list(allocation.frames)

    @rule(model=st.sampled_from(sorted(SIZES)), acknowledges=st.booleans(), keeps=st.booleans())
    def evict(self, model, acknowledges, keeps):
        if model not in self.resident:
            return
        for number, frame in enumerate(self.resident.pop(model)):  # nobody wrote it while the model had it
            mark = self.mark(model, number)
            assert ctypes.string_at(frame.handle.address, len(mark)) == mark
        if acknowledges:
            assert self.pool.release(model) == SIZES[model]
        else:
            self.apart[model] = self.apart.get(model, 0) + self.pool.quarantine(model)
        if not keeps:
            self.account.set(model, Kind.WORKING, 0)

    @rule(model=st.sampled_from(sorted(SIZES)))
    def process_is_gone(self, model):
        assert self.pool.recover(model) == self.apart.pop(model, 0)

    @rule(count=st.integers(0, 9))
    def create_ahead(self, count):
        self.do(self.pool.create_ahead(count))

    @rule(frames=st.integers(0, 10))
    def edit_pool(self, frames):
        if frames * FRAME >= self.account.held_bytes():
            self.account.resize(frames * FRAME)
            self.do(self.pool.make_room(ord))

    @rule(model=st.sampled_from(sorted(SIZES)))
    def forget(self, model):
        self.pool.forget(model)

    @invariant()
    def ledger_and_owner_table_agree(self):
        if not hasattr(self, "pool"):
            return
        owners = self.pool.owners()
        assert len(self.device._frames) == self.account.frames
        assert self.account.free_frames == self.account.frames - len(owners)
        for model, frames in self.resident.items():
            assert [frame.id for frame in self.pool.frames_of(model)] == [frame.id for frame in frames]
            assert self.account.held_bytes(model, Kind.FRAMES) == SIZES[model] * FRAME
        assert self.pool.quarantined() == {model: count for model, count in self.apart.items() if count}
        free = [place for place in self.pool._places.values() if place.owner is None and place.part is not None]
        for digest in SIZES:
            parts = {place.part.number for place in free if place.part.digest == digest}
            assert self.pool.valid_frames(digest) == len(parts)
        assert len(owners) == sum(SIZES[model] for model in self.resident) + sum(self.apart.values())

    def teardown(self):
        if hasattr(self, "device"):
            self.device.close()
            self.loop.close()


TestFramesMachine = FramesMachine.TestCase
TestFramesMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
