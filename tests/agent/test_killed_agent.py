"""An agent that is killed under its init: the next one goes on with the processes of its models."""

from __future__ import annotations

import os
import shutil

import pytest

from agent.children import until
from agent.restarting import FAULT, Container, container
from agent.test_leaking_server import SERVER

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"),
]
LOOK = "world.look()"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restarting")
    folder.chmod(0o755)
    with container(folder) as running:
        yield running


@pytest.fixture
def pod(started: Container):
    """The container, with the models that the test before has left: what lives on once does so again."""
    yield started
    (started.folder / FAULT).unlink(missing_ok=True)


async def served(pod: Container, *tiers: str, **spec) -> dict:
    """Models m1, m2 and so on at these tiers, and how they look."""
    await pod.apply(*(pod.names.manifest(f"m{seed}", seed=seed, **spec) for seed in range(1, len(tiers) + 1)))
    for seed, tier in enumerate(tiers, 1):
        await pod.run("await world.tier(name, tier)", name=f"m{seed}", tier=tier)
    return await pod.run(LOOK)


async def answers(pod: Container, *names: str) -> None:
    for name in names:
        assert await pod.run("await world.ask(name)", name=name) == pytest.approx(pod.names.answer(8, int(name[1:])))


async def looks(pod: Container) -> dict:
    """How everything looks once nothing moves."""
    await pod.run("await world.settled()")
    return await pod.run(LOOK)


async def nothing(pod: Container) -> None:
    """Take all models away, and wait until they are gone."""
    await pod.apply()
    await pod.run('await world.until(lambda: not world.broker.instances, "all models are gone")')


def pids(look: dict) -> dict[str, int]:
    return {name: pid for name, (pid, _, _) in look["models"].items()}


async def test_processes_residency_and_ledger_are_as_before_and_requests_are_answered(pod: Container):
    before = await served(pod, "resident", "warm", "resident")
    await pod.dies()
    assert await looks(pod) == before
    await answers(pod, "m1", "m2", "m3")
    assert pids(await pod.run(LOOK)) == pids(before)


async def test_what_lived_on_is_evicted_woken_stopped_and_replaced_like_any_other(pod: Container):
    before = await served(pod, "resident", "warm")
    await pod.dies()
    await pod.run("await world.settled()")
    await pod.run('await world.tier("m1", "warm"); await world.tier("m2", "resident")')
    after = await pod.run(LOOK)
    assert pids(after) == pids(before)
    assert [tier for _, tier, _ in after["models"].values()] == ["warm", "resident"]
    await pod.run('await world.tier("m1", "resident")')
    await answers(pod, "m1", "m2")
    await pod.run("""
        await world.agent.evict("default", "m1", 60)
        await world.broker.orders.stop(world.instance("m1"), "for the test")
    """)
    assert pids(await pod.run(LOOK)) == {"m1": 0, "m2": before["models"]["m2"][0]}
    await pod.apply(pod.names.manifest("m1", seed=1), pod.names.manifest("m2", seed=2, runtime={"threads": 2}))
    assert pids(await pod.run(LOOK))["m2"] != pids(before)["m2"]
    await answers(pod, "m1", "m2")


async def test_a_kill_after_a_kill_and_one_in_the_middle_of_taking_over(pod: Container):
    before = await served(pod, "resident", "warm")
    await pod.dies()
    await pod.run("await world.settled()")
    (pod.folder / FAULT).write_text("""
from omnimodel.agent.instance import Instance
settle = Instance.settle
async def once(self):
    await settle(self)
    if self.model == "m1":
        open(world.folder / "struck", "w").close()
        os.kill(os.getpid(), 9)
Instance.settle = once
""")
    await pod.dies()
    await until((pod.folder / "struck").exists)
    assert await looks(pod) == before
    await answers(pod, "m1", "m2")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("tier", "command", "then"), [("warm", "Wake", "resident"), ("resident", "Evict", "warm")])
async def test_a_kill_around_a_command_leaves_the_process_where_the_command_has_brought_it(
    pod: Container, tier: str, command: str, then: str, when: str
):
    before = await served(pod, tier)
    await pod.dies(
        """
        from omnimodel.agent.process import ModelProcess
        from omnimodel.protocol.channel import AsyncChannel
        import signal
        kill = asyncio.get_running_loop().create_future()
        send = AsyncChannel.send
        async def killed(self, message, descriptors=()):
            if message.get("command", {}).get("op") == op:
                if when == "after":
                    await send(self, message, descriptors)
                os.kill(os.getpid(), 9)
            await send(self, message, descriptors)
        AsyncChannel.send = killed
        await (world.agent.wake if op == "wake" else world.agent.evict)("default", "m1", 60)
        """,
        op=command.lower(),
        when=when,
    )
    after = await looks(pod)
    assert pids(after) == pids(before)
    assert after["models"]["m1"][1] == (then if when == "after" else tier)
    assert after["models"]["m1"][2] == (56 << 20 if after["models"]["m1"][1] == "resident" else 0)
    await answers(pod, "m1")
    assert pids(await pod.run(LOOK)) == pids(before)


async def test_a_process_that_does_not_know_what_its_last_command_came_to_is_replaced(pod: Container):
    before = await served(pod, "resident")
    (pod.folder / FAULT).write_text("""
from omnimodel.agent.process import ModelProcess
from omnimodel.protocol.process import Settle, Reply
command = ModelProcess.command
async def unsure(self, what, *more):
    return Reply(0, ok=True, values={"tier": ""}) if isinstance(what, Settle) else await command(self, what, *more)
ModelProcess.command = unsure
""")
    await pod.dies()
    await answers(pod, "m1")
    after = await looks(pod)
    assert pids(after)["m1"] not in {0, pids(before)["m1"]}
    assert after["models"]["m1"][1:] == before["models"]["m1"][1:]


async def test_models_that_were_deleted_or_changed_meanwhile_are_not_gone_on_with(pod: Container):
    before = await served(pod, "resident", "resident", "warm")
    pod.write(pod.names.manifest("m1", seed=1), pod.names.manifest("m2", seed=2, runtime={"threads": 2}))
    await pod.dies()
    after = await looks(pod)
    assert pids(after)["m1"] == pids(before)["m1"]
    assert pids(after)["m2"] != pids(before)["m2"]
    assert set(after["models"]) == {"m1", "m2"}
    await answers(pod, "m1", "m2")
    alive = await pod.run("[os.path.exists(f'/proc/{pid}') for pid in gone]", gone=list(pids(before).values())[1:])
    assert alive == [False, False]


async def test_a_budget_that_became_smaller_meanwhile_is_kept(pod: Container):
    before = await served(pod, "resident", "resident", "resident")
    manifests = [pod.names.manifest(f"m{seed}", seed=seed) for seed in (1, 2, 3)]
    pod.write(*manifests, memory_mib=120)
    await pod.dies()
    await pod.run(f'await world.until(lambda: world.ledger.device.capacity_bytes == {120 << 20}, "the budget")')
    after = await looks(pod)
    assert pids(after) == pids(before)
    assert sorted(tier for _, tier, _ in after["models"].values()) == ["resident", "resident", "warm"]
    await answers(pod, "m1", "m2", "m3")


async def test_frames_of_another_size_are_not_gone_on_with(pod: Container):
    before = await served(pod, "resident")
    pod.write(pod.names.manifest("m1", seed=1), device={"type": "cpu", "memory": 176 << 20, "frameSize": 2 << 20})
    await pod.dies()
    await answers(pod, "m1")
    after = await looks(pod)
    assert pids(after)["m1"] not in {0, pids(before)["m1"]}
    await served(pod, "warm")
    pod.write(pod.names.manifest("m1", seed=1))
    await pod.dies()
    await answers(pod, "m1")


async def test_a_process_that_died_meanwhile_is_started_again(pod: Container):
    before = await served(pod, "resident", "resident")
    await pod.dies("os.kill(pid, 9)", pid=pids(before)["m1"])
    after = await looks(pod)
    assert pids(after)["m2"] == pids(before)["m2"]
    await answers(pod, "m1", "m2")


async def test_the_end_of_a_process_that_lived_on_is_seen_and_told(pod: Container):
    before = await served(pod, "resident")
    await pod.dies()
    await pod.run("await world.settled()")
    status = await pod.run("""
        process = world.instance("m1").process
        try:
            await world.ask("m1", "exit:3", deadline=30)
        except Exception:
            pass
        (await process.exited).status
    """)
    assert status == 3
    await answers(pod, "m1")
    assert pids(await looks(pod))["m1"] not in {0, pids(before)["m1"]}


async def test_a_request_that_lost_its_agent_ends_before_others_are_answered(pod: Container):
    before = await served(pod, "resident", limits={"concurrency": 1})
    begun = "any(model.in_flight for model in world.agent.report().models)"
    await pod.dies(f"""
        asking = asyncio.create_task(world.ask("m1", "sleep:2"))
        await world.until(lambda: {begun}, "it is sent")
        process = world.instance("m1").process
        from omnimodel.protocol.process import Ping
        while not (await process.command(Ping())).values["inFlight"]:
            await asyncio.sleep(0.01)
    """)
    await answers(pod, "m1")
    assert pids(await looks(pod)) == pids(before)


async def test_the_server_of_a_foreign_engine_serves_on(pod: Container):
    await pod.apply(pod.names.program("counts", SERVER))
    await pod.run('await world.tier("counts", "resident")')
    assert await pod.run('await world.ask("counts")') == 1
    before = await pod.run(LOOK)
    assert before["held"] == 64 << 20
    await pod.dies()
    assert await pod.run('await world.ask("counts")') == 2
    assert await looks(pod) == before
    await pod.run('await world.tier("counts", "warm")')
    await pod.dies()
    assert (await looks(pod))["models"]["counts"] == [before["models"]["counts"][0], "warm", 0]
    assert await pod.run('await world.ask("counts")') == 1  # another server: its process starts it at a wake


async def test_what_it_prints_goes_on_into_its_log(pod: Container):
    talks = {"handler": pod.names.manifest("m1")["spec"]["runtime"]["handler"]}
    text = talks["handler"]["files"]["handler.py"]
    talks["handler"] = {**talks["handler"], "files": {"handler.py": text.replace(
        'word, _, value = command.partition(":")', 'word, _, value = command.partition(":")\n        print(command, flush=True)'
    )}}  # fmt: skip
    await nothing(pod)
    before = await served(pod, "resident", runtime=talks)
    log = "open(world.agent.layout.log('default', 'm1')).read().split()"
    for word in ("one", "two"):
        await pod.run('await world.ask("m1", word)', word=word)
        await pod.run(f'await world.until(lambda: {log}[-1] == word, "its log")', word=word)
        await pod.dies()
    assert (await pod.run(log))[-2:] == ["one", "two"]
    assert pids(await looks(pod)) == pids(before)


async def test_nothing_that_is_kept_reaches_a_model_or_stays_when_it_has_gone(pod: Container):
    opened = "sorted(os.readlink(f'/proc/{pid}/fd/{number}') for number in os.listdir(f'/proc/{pid}/fd'))"
    await nothing(pod)
    empty = pod.kept()
    before = await served(pod, "resident")
    fresh = [link.partition(":")[0] for link in await pod.run(opened, pid=pids(before)["m1"])]
    await until(lambda: pod.kept() == empty + 4 + 2)  # facts, channel, output, pidfd; frames
    await pod.dies()
    await pod.run("await world.settled()")
    again = pod.names.manifest("m2", seed=2)
    await pod.apply(pod.names.manifest("m1", seed=1), again)
    after = await pod.run(LOOK)
    assert [link.partition(":")[0] for link in await pod.run(opened, pid=pids(after)["m2"])] == fresh
    await pod.run('await world.tier("m1", "warm"); await world.tier("m2", "warm")')
    await until(lambda: pod.kept() == empty + 8)
    await nothing(pod)
    await until(lambda: pod.kept() == empty)


async def test_what_finds_no_room_with_the_init_is_started_again(pod: Container):
    import resource

    await nothing(pod)
    limits = resource.prlimit(pod.init(), resource.RLIMIT_NOFILE)
    resource.prlimit(pod.init(), resource.RLIMIT_NOFILE, (pod.kept() + 4, limits[1]))
    try:
        before = await served(pod, "resident", "resident")
    finally:
        resource.prlimit(pod.init(), resource.RLIMIT_NOFILE, limits)
    await pod.dies()
    await answers(pod, "m1", "m2")
    after = await looks(pod)
    assert not set(pids(after).values()) & {0, *pids(before).values()}
    await pod.dies()
    assert await looks(pod) == after
