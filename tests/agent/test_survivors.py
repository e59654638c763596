"""What an init keeps of an agent, and which processes the next one may go on with."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from omnimodel.agent.descriptors import DescriptorStore, Kept
from omnimodel.agent.journal import Entry, Journal, start_ticks
from omnimodel.agent.survivors import Facts, Served, find_survivors
from omnimodel.isolation import Level, Mount, Reached, SandboxPlan
from omnimodel.protocol.channel import socket_pair

FRAME = 2 << 20


@pytest.fixture
def ends() -> Iterator[tuple[DescriptorStore, Kept, socket.socket]]:
    """An agent's end, an init's, and the socket that the init reads."""
    ours, theirs = socket_pair()
    ours.setblocking(False)
    kept = Kept()
    with ours, theirs:
        yield DescriptorStore(theirs, {}), kept, ours
        for descriptor in kept.descriptors.values():
            os.close(descriptor)


def memory(size_bytes: int = FRAME) -> int:
    descriptor = os.memfd_create("frame", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def test_what_is_put_is_kept_until_it_is_dropped_or_replaced(ends) -> None:
    store, kept, sock = ends
    first, second = memory(), memory()
    store.put({"m.1/channel": first, "m.1/frame/1": first, "m.1/frame/12": second, "m.12/channel": second})
    assert kept.follow(sock)
    assert {name: inode(descriptor) for name, descriptor in kept.descriptors.items()} == {
        "m.1/channel": inode(first),
        "m.1/frame/1": inode(first),
        "m.1/frame/12": inode(second),
        "m.12/channel": inode(second),
    }
    assert not any(os.get_inheritable(descriptor) for descriptor in kept.descriptors.values())
    store.put({"m.1/channel": second})
    store.drop("m.1/frame/1")
    kept.follow(sock)
    assert sorted(kept.descriptors) == ["m.1/channel", "m.1/frame/12", "m.12/channel"]
    assert inode(kept.descriptors["m.1/channel"]) == inode(second)
    store.drop("m.1")
    kept.follow(sock)
    assert sorted(kept.descriptors) == ["m.12/channel"]
    for descriptor in (first, second):
        os.close(descriptor)


def test_more_than_a_packet_takes_is_put_and_dropped(ends) -> None:
    store, kept, sock = ends
    descriptor = memory()
    before = len(os.listdir("/proc/self/fd"))
    store.put({f"m.1/frame/{number}": descriptor for number in range(600)})
    kept.follow(sock)
    assert len(kept.descriptors) == 600
    store.drop("m.1/frame")
    kept.follow(sock)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_what_an_agent_said_right_before_its_end_is_done(ends) -> None:
    store, kept, sock = ends
    descriptor = memory()
    store.put({"m.1/channel": descriptor})
    store._channel.close()
    assert not kept.follow(sock)
    assert list(kept.descriptors) == ["m.1/channel"]
    store.drop("m.1")  # nobody reads it: told in the log, and no error
    os.close(descriptor)


class Process:
    """A process as an agent would have kept it: what `find_survivors` is given."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.frames = [memory(), memory()]
        pidfd = os.pidfd_open(self.process.pid)
        self.found = {"m.1/channel": 0, "m.1/output": 0, "m.1/pidfd": pidfd}
        self.found |= {f"m.1/frame/{7 + number}": descriptor for number, descriptor in enumerate(self.frames)}
        plan = SandboxPlan("m.1", 22000, minimum=Level.LANDLOCK, mounts=(Mount("/a", "/b"),), writable=("/c",))
        frames = tuple((7 + number, inode(descriptor)) for number, descriptor in enumerate(self.frames))
        served = Served(
            "default/m", "hash", 0, "", "", "", "/source", "", "host", FRAME, 2, 32 << 20, 0, True, frames, 12.5
        )  # fmt: skip
        reached = Reached(Level.NAMESPACES, ("a proc of its own",))
        self.facts = Facts("OmniModel default/m", 3, plan, reached, 10.0, "a-1", ("pids",), "/log", 1 << 20, 1, served)
        self.journal = Journal(folder / "journal")

    def survivors(self, facts: Facts | None = None, *, ticks: int | None = None):
        self.journal.record(Entry("m.1", self.process.pid, ticks or start_ticks(self.process.pid) or 0, ()))
        written = (facts or self.facts).write()
        try:
            return find_survivors(self.journal.entries(), {"m.1/facts": written, **self.found})
        finally:
            os.close(written)

    def served(self, **changes: object) -> Facts:
        return replace(self.facts, served=replace(self.facts.served, **changes))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (*self.frames, self.found["m.1/pidfd"]):
            os.close(descriptor)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.end()


def test_a_process_that_is_whole_is_found_with_everything_that_was_known_of_it(left: Process) -> None:
    (found,) = left.survivors()
    assert found.facts == left.facts
    assert dict(found.frames) == dict(zip((7, 8), left.frames, strict=True))
    assert sorted(found.names) == sorted(["m.1/facts", *left.found])


def test_a_process_that_has_ended_is_none(left: Process) -> None:
    ticks = start_ticks(left.process.pid)
    left.process.kill()
    left.process.wait()
    assert left.survivors(ticks=ticks) == []


def test_another_process_with_the_pid_is_none(left: Process) -> None:
    assert left.survivors(ticks=1) == []


@pytest.mark.parametrize("name", ["m.1/channel", "m.1/output", "m.1/pidfd", "m.1/frame/8"])
def test_one_of_which_a_descriptor_is_missing_is_none(left: Process, name: str) -> None:
    given, left.found = left.found, {key: number for key, number in left.found.items() if key != name}
    assert left.survivors() == []
    left.found = given


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"frames": ((7, 1), (8, 2))}, id="frames-that-are-others"),
        pytest.param({"frame_bytes": FRAME // 2}, id="frames-of-another-size"),
        pytest.param({"image": "/nowhere", "digest": "0" * 64}, id="image-that-is-gone"),
    ],
)
def test_one_that_does_not_fit_its_descriptors_or_its_image_is_none(left: Process, changes: dict) -> None:
    assert left.survivors(left.served(**changes)) == []


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"subject": "OmniModel default/m", "colour": "blue"}'])
def test_one_whose_facts_are_of_another_version_is_none(left: Process, text: bytes) -> None:
    written = memory(0)
    os.write(written, text)
    left.found["m.1/facts"] = written
    assert left.survivors() == []
    os.close(left.found.pop("m.1/facts"))


def test_one_that_served_nothing_yet_is_none(left: Process) -> None:
    left.journal.record(Entry("m.1", left.process.pid, start_ticks(left.process.pid) or 0, ()))
    assert find_survivors(left.journal.entries(), left.found) == []


def test_one_that_the_journal_does_not_know_is_none(left: Process) -> None:
    assert left.survivors() != []
    assert find_survivors([], left.found) == []
