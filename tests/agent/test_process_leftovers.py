"""After a SIGKILL of the agent: the next start finds exactly what was left, ends it and removes it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.children import NOTHING, alive, children, until
from omnimodel.agent.journal import Entry, Journal, clean_leftovers, kill_exactly, start_ticks
from omnimodel.agent.limits import Groups

AGENT = """
import asyncio, contextlib, sys
from pathlib import Path
from agent.children import busy, children

async def main():
    async with children(Path(sys.argv[1])) as many:
        processes = [await many.make() for _ in range(3)]
        stack = contextlib.AsyncExitStack()
        for process in processes:
            await stack.enter_async_context(busy(process, "import time\\nwhile True: time.sleep(1)"))
        print(many.spawner.zygotes.processes()[0][0], *(process.pid for process in processes), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces and control groups")


@pytest.mark.root
@root
async def test_what_a_killed_agent_left_is_ended_and_removed(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    agent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        AGENT,
        str(tmp_path),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent / 'operator'}"},
    )
    assert agent.stdout is not None
    zygote, *pids = [int(word) for word in (await agent.stdout.readline()).split()]
    agent.kill()
    await agent.wait()
    await until(lambda: not alive(zygote))
    assert all(alive(pid) for pid in pids)
    assert len(os.listdir(tmp_path / "journal")) == 4  # and the zygote
    async with children(tmp_path) as many:
        await until(lambda: not any(alive(pid) for pid in pids))
        assert many.left() == NOTHING
    assert not any(os.path.exists(found.parent) for found in many.spawner.groups.hierarchies)  # noqa: ASYNC240


def test_a_process_that_only_has_the_pid_is_left_alone(tmp_path: Path) -> None:
    innocent = subprocess.Popen(["sleep", "600"])
    try:
        ticks = start_ticks(innocent.pid)
        assert ticks is not None
        Journal(tmp_path / "journal").record(Entry("gone", innocent.pid, ticks - 1, ()))
        assert clean_leftovers(tmp_path).processes == 0
        assert innocent.poll() is None
        assert kill_exactly([(innocent.pid, ticks)]) == 1
        assert innocent.wait(60) == -signal.SIGKILL
    finally:
        innocent.kill()
        innocent.wait()


def test_entries_of_an_earlier_boot_name_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr("omnimodel.agent.journal.boot_id", lambda: "an-earlier-boot")
    journal.record(Entry("old", os.getpid(), start_ticks(os.getpid()) or 0, ()))
    monkeypatch.undo()
    assert [entry.pid for entry in journal.entries()] == [0]
    assert clean_leftovers(tmp_path).processes == 0
    assert journal.entries() == []


def test_half_written_entries_are_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    (tmp_path / "journal" / "torn.json").write_text('{"instance": "to')
    (tmp_path / "journal" / ".new.draft").write_text("{")
    assert journal.entries() == []
    assert os.listdir(tmp_path / "journal") == []


def test_paths_outside_the_run_folder_are_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "store"
    precious.mkdir()
    Journal(tmp_path / "journal").record(Entry("x", 0, 0, (str(precious),)))
    clean_leftovers(tmp_path)
    assert precious.is_dir()


@pytest.mark.root
@root
def test_groups_without_a_journal_are_emptied_too(tmp_path: Path) -> None:
    groups = Groups.detect(tmp_path)
    group = groups.create("orphan")
    orphan = subprocess.Popen(["sleep", "600"])
    try:
        group.add(orphan.pid)
        assert clean_leftovers(tmp_path).groups == 1
        assert orphan.wait(60) == -signal.SIGKILL
    finally:
        orphan.kill()
        orphan.wait()
    assert not any(os.path.exists(path) for path in group.paths)
    groups.close()
