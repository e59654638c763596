"""Every duration of a manifest, seen from the outside: what happens when it is over, and only then."""

import asyncio
import time

import pytest

from agent.children import children, code
from agent.world import HANDLER, MIB, command
from omnimodel.errors import DispatchError, ProcessError, Reason

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

HANGS = HANDLER.replace(
    "    def build(self):\n",
    """    def build(self):
        serving = torch.empty(0).device.type == "meta"
        if os.environ.get("HANG") == ("serving" if serving else "publishing"):
            time.sleep(600)
""",
)


def hanging(world, where: str, **more) -> dict:
    """A model whose build never returns while it is published, or while it is served."""
    manifest = world.manifest("m1", seed=1, handler=HANGS, **more)
    manifest["spec"]["runtime"]["env"] = {"HANG": where}
    return manifest


async def events_of(world, name: str, since_seconds: float = 0.0) -> list:
    """Its events; models of other tests had the same name."""
    events = [event async for event in world.agent.events.follow(follow=False)]
    return [event for event in events if event.name == name and event.time_seconds >= since_seconds]


# limits.loadDeadline


async def test_a_start_that_never_comes_to_an_end_is_given_up_and_the_old_revision_serves_on(world):
    await world.apply(hanging(world, "nowhere"))
    good = world.instance("m1")
    await world.apply(hanging(world, "serving", limits={"loadDeadline": "1s"}), wait=False)
    await world.until(lambda: world.report("m1").reason == Reason.LOAD_TIMEOUT, "it was given up")
    assert "'start' in 1 s without any progress" in world.report("m1").message
    assert world.instance("m1") is good
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_a_publishing_that_never_comes_to_an_end_is_given_up_and_an_edit_cures_it(world):
    manifest = hanging(world, "publishing", limits={"loadDeadline": "1s"}, mib=4)
    await world.apply(manifest)
    report = world.report("m1")
    assert (report.ready, report.reason) == (False, Reason.LOAD_TIMEOUT)
    assert "'publish' in 1 s without any progress" in report.message
    await world.apply(hanging(world, "nowhere", mib=4))
    assert await world.ask("m1") == pytest.approx(world.answer(4, 1))


async def test_a_fetch_that_does_not_move_is_given_up(world):
    async def answer_nothing(reader, writer):
        while await reader.read(4096):
            pass
        writer.close()

    server = await asyncio.start_server(answer_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    manifest = world.manifest("m1", seed=1, limits={"loadDeadline": "1s"})
    manifest["spec"]["source"] = {"url": {"url": f"http://127.0.0.1:{port}/w.safetensors", "sha256": "0" * 64}}
    await world.apply(manifest)
    server.close()
    report = world.report("m1")
    assert report.reason == Reason.LOAD_TIMEOUT
    assert "nothing moved for 1 s" in report.message


@pytest.mark.parametrize(
    ("done", "in_time"),
    [
        pytest.param("n", True, id="as long as it moves"),
        pytest.param("1", False, id="and not when it says the same again and again"),
    ],
)
async def test_a_load_may_take_longer_than_its_deadline(tmp_path, done, in_time):
    loading = f"import time\nfor n in range(9):\n    progress('packing', {done}, 9)\n    time.sleep(0.5)\n"
    async with children(tmp_path) as many:
        process = await many.make()
        if in_time:
            assert (await process.command(code(loading), (), 3.0)).ok
            return
        with pytest.raises(ProcessError, match="without any progress") as caught:
            await process.command(code(loading), (), 3.0)
        assert caught.value.reason is Reason.LOAD_TIMEOUT


# limits.drainTimeout


@pytest.mark.parametrize("change", ["deleted", "edited"])
async def test_requests_have_their_drain_timeout_when_their_process_has_to_go(world, change):
    limits = {"drainTimeout": "1s"}
    await world.apply(world.manifest("m1", seed=1, limits=limits))
    old = world.instance("m1")
    slow = asyncio.create_task(world.ask("m1", "sleep:60"))
    await world.until(lambda: old.line.in_flight == 1, "it computes")
    if change == "deleted":
        await world.apply()
    else:
        await world.apply(world.manifest("m1", seed=2, limits=limits))
    with pytest.raises(DispatchError) as caught:
        await slow
    assert "did not end within 1 s, its limits.drainTimeout" in caught.value.problem
    assert caught.value.reason is Reason.DRAINING
    await world.until(lambda: old.process is None and old.name not in world.broker.instances, "its process is gone")
    if change == "edited":
        assert await world.ask("m1") == pytest.approx(world.answer(8, 2))


async def test_a_server_that_does_not_end_by_itself_has_its_drain_timeout_and_is_ended_then(world):
    serve = (
        "import http.server, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()"
    )
    began_seconds = time.time()
    await world.apply(world.program("m1", serve, limits={"drainTimeout": "1s"}))
    assert world.report("m1").tier == "resident", world.report("m1")
    pid = world.instance("m1").process.pid
    await world.agent.evict("default", "m1", 60)
    assert world.report("m1").tier == "warm"
    assert world.instance("m1").process.pid == pid
    assert "EvictTimeout" not in [event.reason for event in await events_of(world, "m1", began_seconds)]


async def test_who_waits_for_a_model_that_is_deleted_is_told_at_once(world):
    await world.apply(world.manifest("m1", seed=1, limits={"concurrency": 1}))
    slow = asyncio.create_task(world.ask("m1", "sleep:2"))
    await world.until(lambda: world.instance("m1").line.in_flight == 1, "it computes")
    waiting = asyncio.create_task(world.ask("m1"))
    await world.until(lambda: world.instance("m1").line.waiting, "another waits")
    await world.apply()
    with pytest.raises(DispatchError) as caught:
        await waiting
    assert caught.value.status == 404
    assert not slow.done()
    assert await slow == pytest.approx(world.answer(8, 1))


# probe.timeout


async def test_a_probe_that_is_not_answered_in_time_fails(world):
    manifest = world.manifest("m1", seed=1)
    manifest["spec"]["probe"] |= {"json": command("sleep:4"), "timeout": "1s"}
    await world.apply(manifest)
    report = world.report("m1")
    assert (report.ready, report.reason) == (False, Reason.PROBE_FAILED)
    assert "not answered in time" in report.message


# residency.minResident


async def test_a_woken_model_stays_for_its_min_resident_although_another_waits(world):
    first = world.manifest("m1", seed=1, working_mib=96, residency={"minResident": "2s"})
    await world.apply(first, world.manifest("m2", seed=2, working_mib=96))
    await world.ask("m2")
    await world.ask("m1")
    woken_seconds = world.instance("m1").woken_seconds
    assert await world.ask("m2") == pytest.approx(world.answer(8, 2))
    assert world.instance("m2").woken_seconds - woken_seconds >= 2.0


# How long an evicted model stays warm


async def test_the_process_of_an_evicted_model_goes_after_a_while_unless_its_idle_tier_is_warm(world, monkeypatch):
    stays = {"idleAfter": "1h", "idleTier": "warm"}
    await world.apply(world.manifest("m1", seed=1), world.manifest("m2", seed=2, residency=stays))
    for name in ("m1", "m2"):
        await world.ask(name)
        await world.agent.evict("default", name, 10)
        assert world.report(name).tier == "warm"
    pid = world.instance("m2").process.pid
    monkeypatch.setattr(world.broker, "idle_constants", type(world.broker.idle_constants)(warm_seconds=0.2))
    world.broker.kick()
    await world.until(lambda: world.report("m1").tier == "cold", "its process has gone")
    await world.broker.moves.settle(world.instance("m1"))
    told = [event.message for event in await events_of(world, "m1") if event.reason == "Stopped"]
    assert "its process goes" in told[-1]
    assert world.instance("m2").process.pid == pid
    assert world.ledger.held_by("default/m1") == (0, 0)
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_warm_models_give_way_when_they_hold_more_than_the_hosts_budget(world):
    names = ["m1", "m2", "m3"]
    await world.apply(*[world.manifest(f"m{seed}", seed=seed, working_mib=160) for seed in (1, 2, 3)])
    for name in names:
        await world.ask(name, "hoard:64")
    await world.agent.evict("default", "m3", 10)
    host = world.ledger.host
    await world.until(lambda: all(host.held_bytes(f"default/{name}") > 64 * MIB for name in names), "they are measured")
    body, plain = world.pool.to_dict(), world.pool
    body["spec"]["hostMemory"] = host.held_bytes("zygotes") + 130 * MIB
    world.pool = world.pool.model_validate(body)
    try:
        await world.apply(*world.manifests.values())
        await world.until(lambda: sum(world.report(name).tier == "warm" for name in names) == 1, "two have gone")
        assert world.report("m3").tier == "warm", "the one that was used last stays"
        await world.until(lambda: host.free_bytes >= 0, "the budget holds")
        for seed in (1, 2, 3):
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(8, seed))
    finally:
        world.pool = plain
        await world.apply(*world.manifests.values())


async def test_the_time_of_a_wake_does_not_count_as_idle(world):
    await world.apply(world.manifest("m1", seed=1, residency={"idleAfter": "1s"}))
    began = time.monotonic()
    await world.ask("m1", "sleep:1.2")
    await world.until(lambda: world.report("m1").tier != "resident", "it left")
    assert time.monotonic() - began >= 2.2
