"""Zygotes: single-threaded, blind to what environments hold, replaced when they die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from agent.children import NOTHING, Children, alive, busy, children, children_of, run, until, zygotes
from omnimodel.agent.limits import Group
from omnimodel.agent.zygotes import Zygotes
from omnimodel.errors import ProcessError, Reason
from omnimodel.protocol.process import Ping

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces and users"),
]


KEPT_BYTES = 4 << 20  # pages that the zygote has copied for itself since the fork: its child alone has the old ones
REHEARSED_BYTES = 6 << 20  # what a spare has touched by then; one that only waits has less


def package(folder: Path, name: str, text: str) -> str:
    """A folder of packages with one module in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return str(folder)


def first(zygotes: Zygotes) -> int:
    return zygotes.processes()[0][0]


async def test_a_zygote_has_one_thread_and_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-agent")
    async with children(tmp_path) as many:
        report = await many.spawner.zygotes.start()
        assert report.threads == 1
        with open(f"/proc/{report.pid}/environ", "rb") as file:  # noqa: ASYNC230
            environment = file.read()
        assert b"of-the-agent" not in environment
        assert b"OPENBLAS_NUM_THREADS=1" in environment
        assert b"OMP_WAIT_POLICY=PASSIVE" in environment
        assert b"TQDM_DISABLE=1" in environment


async def test_a_zygote_with_a_second_thread_refuses_to_fork(tmp_path: Path) -> None:
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    folder = package(tmp_path / "site", "starts_a_thread", text)
    async with children(tmp_path, preload=("starts_a_thread",), import_path=(folder,)) as many:
        with pytest.raises(ProcessError, match="the zygote has 2 threads"):
            await many.make()
        assert many.left() == NOTHING


async def test_a_burst_of_35_forks(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        await many.spawner.zygotes.start()
        processes = await asyncio.gather(*(many.make() for _ in range(35)))
        assert len({process.pid for process in processes}) == 35
        users = await asyncio.gather(*(run(process, "answer['uid'] = os.getuid()") for process in processes))
        assert len({answer["uid"] for answer in users}) == 35
        assert len(many.left()["journal"]) == 35
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.released for process in processes))
        assert many.left() == NOTHING


async def test_processes_see_the_packages_of_their_environment_and_cannot_write_them(tmp_path: Path) -> None:
    overlay = package(tmp_path / "overlay", "tokenizer_of_the_overlay", "answer = 42\n")
    look = "import tokenizer_of_the_overlay as t; answer.update(x=t.answer, file=t.__file__)"
    async with children(tmp_path) as many:
        plain = await many.make()
        one = await many.make(environment=(overlay,), read_only=(overlay,))
        answer = await run(one, look)
        assert (answer["x"], answer["file"]) == (42, f"{overlay}/tokenizer_of_the_overlay.py")
        with pytest.raises(ProcessError, match="ModuleNotFoundError"):
            await run(plain, look)
        with pytest.raises(ProcessError, match="Read-only file system"):
            await run(one, f"open({overlay!r} + '/evil.py', 'w')")
        (base,) = (pid for pid, _ in many.spawner.zygotes.processes())
        assert {one.pid, plain.pid} <= set(children_of(base)), "one zygote is enough"


async def test_an_environment_with_its_own_copy_of_what_is_imported_gets_a_bare_zygote(tmp_path: Path) -> None:
    old = package(tmp_path / "base", "library", "version = 1\n")
    new = package(tmp_path / "overlay", "library", "version = 2\n")
    look = "import library; answer['version'] = library.version"
    async with children(tmp_path, preload=("inside", "library"), import_path=(old, str(_inside()))) as many:
        plain = await many.make()
        one, two = (
            await many.make(environment=(new,), read_only=(new,)),
            await many.make(environment=(new,), read_only=(new,)),
        )
        assert (await run(plain, look))["version"] == 1
        assert (await run(one, look))["version"] == 2
        base, bare = (pid for pid, _ in many.spawner.zygotes.processes())
        assert {one.pid, two.pid} <= set(children_of(bare))
        os.kill(bare, signal.SIGKILL)
        assert (await run(two, look))["version"] == 2, "it lives on without its zygote"
        await until(lambda: not alive(bare))
        three = await many.make(environment=(new,), read_only=(new,))
        assert (await run(three, look))["version"] == 2
        assert plain.pid in children_of(base)
        assert not {one.pid, two.pid, three.pid} & set(children_of(base))


@pytest.mark.parametrize("name", ["library", "sitecustomize", "numpy", "encodings"])
async def test_nothing_of_an_environment_runs_outside_a_sandbox(tmp_path: Path, name: str) -> None:
    """A package may bring any name; what its code does must stay inside."""
    ran = tmp_path / "ran"
    old = package(tmp_path / "base", "library", "version = 1\n")
    new = package(tmp_path / "overlay", name, f"open({str(ran)!r}, 'w')\n")
    async with children(tmp_path, preload=("inside", "library"), import_path=(old, str(_inside()))) as many:
        process = await many.make(environment=(new,), read_only=(new,))
        await run(process, f"import importlib\ntry: importlib.import_module({name!r})\nexcept OSError: pass")
        assert not ran.exists()


def _inside() -> Path:
    return Path(__file__).parents[1] / "isolation"


async def test_an_overlay_without_a_folder_is_refused_and_the_base_lives_on(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        with pytest.raises(ProcessError):
            await many.make(environment=("/nonexistent/overlay",))
        assert (await (await many.make()).command(Ping())).ok


async def test_a_module_that_fails_to_import_is_named(tmp_path: Path) -> None:
    folder = package(tmp_path / "site", "broken", "raise RuntimeError('libfoo.so is missing')\n")
    failing = zygotes(tmp_path, preload=("broken",), import_path=(folder,))
    with pytest.raises(ProcessError, match=r"RuntimeError: libfoo\.so is missing") as caught:
        await failing.start()
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED
    await failing.close()


async def test_a_start_that_never_ends_is_given_up(tmp_path: Path) -> None:
    folder = package(tmp_path / "site", "endless", "import time\ntime.sleep(600)\n")
    said: list[str] = []
    for seconds in (1, 4, 16, 64):  # a busy machine needs longer until the interpreter has begun to import
        slow = zygotes(tmp_path, preload=("endless",), import_path=(folder,), start_seconds=seconds)
        with pytest.raises(ProcessError, match=f"not up after {seconds} s"):
            await slow.start(lambda stage, done, total: said.append(f"{stage} {done}/{total}"))
        await slow.close()
        if said:
            break
    assert said == ["importing endless 0/1"]


async def test_children_outlive_their_zygote_and_a_new_one_forks(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        old = await many.make()
        zygote = first(many.spawner.zygotes)
        os.kill(zygote, signal.SIGKILL)
        assert (await old.command(Ping())).ok
        await until(lambda: many.spawner.zygotes.processes() and first(many.spawner.zygotes) != zygote)
        new = await many.make()
        assert (await new.command(Ping())).ok
        journal = os.listdir(many.spawner.state_dir / "journal")
        assert len([name for name in journal if name.startswith("zygote-")]) == 1, "the one that died is forgotten"
        os.kill(old.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            end = await asyncio.shield(old.exited)
        assert end.status in {-signal.SIGKILL, None}  # None before Linux 6.15: the one who was told has gone
        await old.released
        assert not alive(old.pid)


async def test_a_zygote_killed_in_a_fork_hurts_one_fork_at_most(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        await many.spawner.zygotes.start()
        for delay in range(8):
            making = asyncio.create_task(many.make())
            await asyncio.sleep(delay / 1000)
            for pid, _ in many.spawner.zygotes.processes()[:1]:
                os.kill(pid, signal.SIGKILL)
            made = (await asyncio.gather(making, return_exceptions=True))[0]
            if isinstance(made, BaseException):
                assert isinstance(made, ProcessError)
            else:
                made.kill()
                await made.released
        assert (await (await many.make()).command(Ping())).ok


async def spare_of(zygote: int, known: Collection[int] = ()) -> int:
    """The child that waits to become a process; the known ones are processes."""
    await until(lambda: set(children_of(zygote)) - set(known))
    (pid,) = set(children_of(zygote)) - set(known)
    return pid


async def test_a_process_is_forked_before_it_is_asked_for(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        before = await many.make()
        zygote = first(many.spawner.zygotes)
        spare = await spare_of(zygote, [before.pid])
        await until(lambda: psutil.Process(spare).num_fds() == 4)  # its log and its channel, nothing of the zygote's
        process = await many.make()
        assert process.pid == spare
        assert process.pid in process.group.pids()
        other = await many.make()
        assert (await run(other, "answer['pid'] = os.getpid()"))["pid"] == 1, "in a pid namespace of its own"
        next_one = await spare_of(zygote, [before.pid, process.pid, other.pid])
        process.kill()
        await process.released
        assert alive(next_one), "it is nobody's orphan"


async def test_what_a_spare_has_rehearsed_is_charged_to_the_process_that_it_becomes(tmp_path: Path) -> None:
    async with children(tmp_path, preload=("inside", "omnimodel.runtime.rehearsal")) as many:
        if not (await many.make()).group.limits_memory:
            pytest.skip("this machine counts no memory in control groups")
        (spare,) = await spares(many)
        waiting = Group(many.spawner.ahead.name, many.spawner.groups.hierarchies)
        await until(lambda: (waiting.usage_bytes() or 0) > REHEARSED_BYTES)
        process = await many.make()
        assert process.pid == spare
        written_bytes = private_dirty_bytes(spare)
        assert written_bytes - KEPT_BYTES < process.private_bytes() < written_bytes + KEPT_BYTES


def private_dirty_bytes(pid: int) -> int:
    """What a process has written and shares with nobody; of files it has what nobody else happens to map, too."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_Dirty:"))


async def spares(many: Children) -> set[int]:
    await until(many.spares)
    return many.spares()


async def test_a_spare_that_is_killed_costs_nobody_a_process(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        before = await many.make()
        zygote = first(many.spawner.zygotes)
        for _ in range(3):
            spare = await spare_of(zygote, [before.pid])
            os.kill(spare, signal.SIGKILL)
            await until(lambda spare=spare: not alive(spare))
            process = await many.make()
            assert (await process.command(Ping())).ok
            process.kill()
            await process.released


@pytest.mark.parametrize("killed", [False, True])
async def test_a_spare_ends_with_its_zygote(tmp_path: Path, killed: bool) -> None:
    pool = zygotes(tmp_path)
    await pool.start()
    zygote = first(pool)
    await pool.provide("next", ())
    spare = await spare_of(zygote)
    if killed:
        os.kill(zygote, signal.SIGKILL)
        await until(lambda: not alive(spare))
    await pool.close()
    await until(lambda: not alive(zygote) and not alive(spare))


async def test_the_zygote_ends_when_the_agent_is_gone(tmp_path: Path) -> None:
    pool = zygotes(tmp_path)
    await pool.start()
    pid = first(pool)
    await pool.close()
    await until(lambda: not alive(pid))


async def test_killing_a_child_of_a_busy_zygote_is_seen_at_once(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        async with busy(process, "while True: pass"):
            process.kill()
            async with asyncio.timeout(60):
                await process.exited


@pytest.mark.slow
async def test_with_torch_it_stays_single_threaded_and_children_compute_differently(tmp_path: Path) -> None:
    from omnimodel.runtime.preload import PRELOAD

    async with children(tmp_path, preload=(*PRELOAD, "inside")) as many:
        report = await many.spawner.zygotes.start()
        assert report.threads == 1
        compute = """
import random, numpy, torch
torch.set_num_threads(2)
product = torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # hangs for ever in a child of a zygote that has computed
answer.update(sum=product.sum().item(), drawn=[torch.rand(1).item(), float(numpy.random.rand()), random.random()])
answer['cuda'] = torch.cuda.is_initialized()
"""
        one, two = [await run(await many.make(), compute) for _ in range(2)]
        assert one["sum"] == two["sum"] == 1e9
        assert not {*one["drawn"]} & {*two["drawn"]}
        assert not one["cuda"]


async def test_a_start_that_is_given_up_at_once_leaves_no_process(tmp_path: Path) -> None:
    """An agent that is stopped in the moment in which its first zygote is made."""
    before = {process.pid for process in psutil.Process().children()}
    text = "import time\ntime.sleep(600)\n"
    folder = package(tmp_path / "site", "never_comes_up", text)
    for turns in range(6):  # of the loop, before it is given up
        zygotes = Zygotes(tmp_path, preload=("never_comes_up",), import_path=(folder,))
        starting = asyncio.create_task(zygotes.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await zygotes.close()
    assert {process.pid for process in psutil.Process().children()} <= before
