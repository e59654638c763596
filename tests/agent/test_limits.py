"""Control groups, for real where this machine has them, and the words for what it has not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.children import until
from omnimodel.agent import hierarchies, limits
from omnimodel.agent.hierarchies import Hierarchy
from omnimodel.agent.limits import Group, GroupLimits, Groups

EAT = "import sys; held = bytearray(b'x') * (int(sys.argv[1]) << 20); print('full', flush=True); sys.stdin.read()"


def has(controller: str) -> bool:
    groups = Groups.detect("/nowhere")
    groups.close()
    return os.geteuid() == 0 and any(controller in found.controllers for found in groups.hierarchies)


needs_memory = [
    pytest.mark.root,
    pytest.mark.skipif(not has("memory"), reason="no memory controller that may be used here"),
]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    found = Groups.detect(tmp_path)
    yield found
    found.clean()
    found.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


class TestReal:
    pytestmark = needs_memory

    def test_a_group_holds_its_limits_and_goes_without_a_trace(self, groups: Groups) -> None:
        group = groups.create("smollm2")
        group.limit(GroupLimits(memory_bytes=64 << 20, processes=7, cpu_millis=1500))
        assert group.missing == ()
        texts = {
            path.name: path.read_text().strip()
            for folder in group.paths
            for path in Path(folder).iterdir()
            if path.name in {"memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max"}
        }
        assert set(texts.values()) <= {str(64 << 20), "7", "150000", "150000 100000"}
        assert len(texts) == 3
        assert group.remove()
        assert not any(os.path.exists(path) for path in group.paths)

    def test_freezing_stops_and_thawing_continues(self, groups: Groups) -> None:
        group = groups.create("frozen")
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        group.add(process.pid)
        assert group.freeze()
        assert group.freeze(frozen=False)
        assert process.communicate(b"alive", timeout=60)[0] == b"alive"

    async def test_kill_reaches_everything_in_it(self, groups: Groups, sleeper: subprocess.Popen[bytes]) -> None:
        group = groups.create("doomed")
        group.add(sleeper.pid)
        assert group.pids() == {sleeper.pid}
        group.kill()
        assert sleeper.wait(60) == -signal.SIGKILL
        await until(group.remove)

    def test_usage_is_what_it_holds(self, groups: Groups) -> None:
        group = groups.create("eater")
        group.limit(GroupLimits(memory_bytes=256 << 20))
        command = 'echo $$ > "$0"/cgroup.procs; exec "$@"'
        folder = next(path for path in group.paths if "memory" in path or len(group.paths) == 1)
        eater = subprocess.Popen(
            ["sh", "-c", command, folder, sys.executable, "-c", EAT, "64"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert eater.stdout is not None
        assert eater.stdout.readline() == b"full\n"
        usage = group.usage_bytes()
        assert usage is not None
        assert 64 << 20 <= usage + (1 << 20) < 128 << 20
        eater.communicate()
        assert group.out_of_memory_kills() == 0

    def test_going_over_the_limit_is_counted(self, groups: Groups) -> None:
        group = groups.create("greedy")
        group.limit(GroupLimits(memory_bytes=32 << 20))
        command = 'for folder in $0; do echo $$ > "$folder"/cgroup.procs; done; exec "$@"'
        greedy = subprocess.run(
            ["sh", "-c", command, " ".join(group.paths), sys.executable, "-c", EAT, "200"],
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert greedy.returncode == -signal.SIGKILL
        assert group.out_of_memory_kills() >= 1

    def test_a_group_of_the_same_name_is_made_anew(self, groups: Groups, sleeper: subprocess.Popen[bytes]) -> None:
        groups.create("again").add(sleeper.pid)
        assert groups.create("again").pids() == set()
        assert sleeper.wait(60) == -signal.SIGKILL

    def test_two_state_directories_do_not_touch_each_other(self, groups: Groups, tmp_path: Path) -> None:
        group = groups.create("mine")
        other = Groups.detect(tmp_path / "other")
        assert other.clean() == 0
        other.close()
        assert all(os.path.isdir(path) for path in group.paths)


def test_a_machine_without_control_groups_says_what_is_missing(tmp_path: Path) -> None:
    found = Groups.detect(tmp_path, tmp_path / "no-such-mount")
    assert found.hierarchies == ()
    assert len(found.missing) == 3
    assert any("the agent watches it instead" in sentence for sentence in found.missing)
    group = found.create("x")
    group.limit(GroupLimits(memory_bytes=1))
    assert not group.limits_memory
    assert group.usage_bytes() is None
    assert group.out_of_memory_kills() == 0
    assert not group.freeze()
    group.kill()
    assert group.remove()


def test_groups_that_may_not_be_written_are_missing_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "cgroup.procs").touch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(Path, "mkdir", refuse)
    found = Groups.detect(tmp_path, tmp_path)
    assert any(sentence.startswith("a memory limit") and "Read-only" in sentence for sentence in found.missing)


@pytest.mark.parametrize(
    ("version", "rows"),
    [
        pytest.param(
            1,
            {
                "memory.limit_in_bytes": "1048576",
                "memory.memsw.limit_in_bytes": "1048576",
                "pids.max": "9",
                "cpu.cfs_period_us": "100000",
                "cpu.cfs_quota_us": "25000",
            },
            id="version 1",
        ),
        pytest.param(
            2,
            {
                "memory.max": "1048576",
                "memory.swap.max": "0",
                "memory.oom.group": "1",
                "pids.max": "9",
                "cpu.max": "25000 100000",
            },
            id="version 2",
        ),
    ],
)
def test_what_is_written_for_each_version(version: int, rows: dict[str, str]) -> None:
    hierarchy = Hierarchy(version, frozenset({"memory", "pids", "cpu"}), Path("/"))
    settings = limits._settings(hierarchy, GroupLimits(memory_bytes=1 << 20, processes=9, cpu_millis=250))
    assert {file: value for _, file, value in settings} == rows


@pytest.mark.parametrize(("millis", "quota"), [(0, None), (1, "1000"), (10, "1000"), (100, "10000"), (2500, "250000")])
def test_a_quota_is_never_below_what_the_kernel_takes(millis: int, quota: str | None) -> None:
    hierarchy = Hierarchy(1, frozenset({"cpu"}), Path("/"))
    rows = {file: value for _, file, value in limits._settings(hierarchy, GroupLimits(cpu_millis=millis))}
    assert rows.get("cpu.cfs_quota_us") == quota


@pytest.mark.parametrize(
    ("version", "files"),
    [
        pytest.param(
            1,
            {"memory.stat": "cache 9\nrss 100\nshmem 20\n", "memory.oom_control": "under_oom 0\noom_kill 2\n"},
            id="1",
        ),
        pytest.param(
            2, {"memory.stat": "anon 100\nfile 9\nshmem 20\n", "memory.events": "oom 3\noom_kill 2\n"}, id="2"
        ),
    ],
)
def test_what_is_read_of_each_version(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    (tmp_path / "x").mkdir()
    for name, text in files.items():
        (tmp_path / "x" / name).write_text(text)
    group = Group("x", (Hierarchy(version, frozenset({"memory"}), tmp_path),))
    assert group.usage_bytes() == 120
    assert group.out_of_memory_kills() == 2


@pytest.mark.parametrize(
    ("folder", "full", "where", "moved"),
    [
        pytest.param("", [], "", False, id="nothing in the way"),
        pytest.param("", [""], "", True, id="a container: its processes move to a leaf"),
        pytest.param("user/shell", ["user/shell"], "user", False, id="a host: a neighbour of the shell's group"),
    ],
)
def test_where_groups_of_version_2_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, full: list[str], where: str, moved: bool
) -> None:
    """The kernel's rule (a group with controllers holds no process), played by files."""
    own = tmp_path / folder
    own.mkdir(parents=True, exist_ok=True)
    (own / "cgroup.procs").write_text("41\n42\n")
    written: list[tuple[str, str]] = []

    def write(path: Path, text: str) -> None:
        busy = str(path.parent.relative_to(tmp_path)).removeprefix(".") in full and not any(
            "leaf" in w for w, _ in written
        )
        if path.name == "cgroup.subtree_control" and busy:
            raise OSError(16, os.strerror(16))
        written.append(("leaf" if path.parent.name == hierarchies._AGENT_LEAF else path.name, text))

    monkeypatch.setattr(hierarchies, "write", write)
    found, enabled = hierarchies.enable(own, ("cpu", "memory", "io", "pids"), tmp_path)
    assert found == tmp_path / where
    assert enabled == ("memory", "pids", "cpu")
    assert [text for name, text in written if name == "leaf"] == (["41", "42"] if moved else [])
