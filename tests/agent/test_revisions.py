"""Edits: a new revision serves when it has proven itself, and the old one until then; failures say why and recover."""

import asyncio
import os

import pytest

from agent.world import HANDLER, MIB, command
from omnimodel.errors import DispatchError, Reason

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

DOUBLED = HANDLER.replace('return {"sum": float', 'return {"sum": 2 * float')


async def keep_asking(world, name: str, stop: asyncio.Event) -> list:
    """Ask again and again; every answer or error, in order."""
    found = []
    while not stop.is_set():
        try:
            found.append(await world.ask(name))
        except DispatchError as error:
            found.append(error)
    return found


async def test_an_edit_rolls_without_a_failed_request(world):
    await world.apply(world.manifest("m1", seed=1))
    stop = asyncio.Event()
    asking = asyncio.create_task(keep_asking(world, "m1", stop))
    doubled = world.manifest("m1", seed=1, handler=DOUBLED)
    doubled["spec"]["probe"]["expect"][0]["near"] = 2 * world.answer(8, 1)
    old = world.instance("m1")
    await world.apply(doubled, wait=False)
    await world.until(lambda: world.instance("m1") is not old, "the new revision serves")
    assert await world.ask("m1") == pytest.approx(2 * world.answer(8, 1))
    stop.set()
    answers = await asking
    errors = [answer for answer in answers if isinstance(answer, DispatchError)]
    assert not errors
    once, twice = pytest.approx(world.answer(8, 1)), pytest.approx(2 * world.answer(8, 1))
    switch = next((index for index, answer in enumerate(answers) if answer == twice), len(answers))
    assert all(answer == once for answer in answers[:switch])
    assert all(answer == twice for answer in answers[switch:])
    await world.until(lambda: len(world.broker.instances) == 1, "the old revision is gone")
    assert world.report("m1").generation == world.generations["m1"]


async def test_an_edit_rolls_when_both_revisions_do_not_fit_together(world):
    await world.apply(world.manifest("m1", seed=1, working_mib=100))
    doubled = world.manifest("m1", seed=1, working_mib=100, handler=DOUBLED)
    doubled["spec"]["probe"]["expect"][0]["near"] = 2 * world.answer(8, 1)
    old = world.instance("m1")
    busy = asyncio.create_task(world.ask("m1", "sleep:0.5"))
    await world.until(lambda: old.line.in_flight == 1)
    await world.apply(doubled, wait=False)
    await world.until(lambda: world.instance("m1") is not old, "the new revision serves")
    assert await busy == pytest.approx(world.answer(8, 1))
    assert await world.ask("m1") == pytest.approx(2 * world.answer(8, 1))


async def test_a_bad_revision_never_takes_the_good_one_down(world):
    await world.apply(world.manifest("m1", seed=1))
    good = world.generations["m1"]
    broken = world.manifest("m1", seed=1, handler=HANDLER.replace("import torch", "import torch_is_misspelt as torch"))
    await world.apply(broken, wait=False)
    await world.until(lambda: world.report("m1").phase == "failed", "the bad revision failed")
    report = world.report("m1")
    assert report.ready
    assert report.generation == good
    assert "torch_is_misspelt" in report.message
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    repaired = world.manifest("m1", seed=1, handler=DOUBLED)
    repaired["spec"]["probe"]["expect"][0]["near"] = 2 * world.answer(8, 1)
    await world.apply(repaired)
    assert await world.ask("m1") == pytest.approx(2 * world.answer(8, 1))


async def test_a_revision_with_a_wrong_answer_does_not_become_ready(world):
    wrong = world.manifest("m1", seed=1)
    wrong["spec"]["probe"]["expect"][0]["near"] = 12345.0
    await world.apply(wrong)
    report = world.report("m1")
    assert not report.ready
    assert report.reason == Reason.PROBE_FAILED
    assert "12345" in report.message
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1")
    assert caught.value.status == 503
    assert caught.value.reason is Reason.PROBE_FAILED
    await world.apply(world.manifest("m1", seed=1))
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


@pytest.mark.parametrize("change", ["limits", "residency", "servedNames", "probe"])
async def test_what_does_not_concern_the_process_changes_without_a_new_one(world, change):
    await world.apply(world.manifest("m1", seed=1))
    await world.ask("m1")
    pid = world.instance("m1").process.pid
    values = {
        "limits": {"queue": 3},
        "residency": {"priority": 900},
        "servedNames": ["Other/Name"],
        "probe": {"timeout": "7s"},
    }
    await world.apply(world.manifest("m1", seed=1, **{change: values[change]}))
    await world.until(lambda: world.report("m1").generation == world.generations["m1"])
    assert world.instance("m1").process.pid == pid
    assert world.instance("m1").line.limit == (3 if change == "limits" else world.instance("m1").limits.queue)
    if change == "servedNames":
        assert "Other/Name" in next(card for card in world.agent.models() if card.name == "m1").served_names


async def test_deleted_and_created_again_at_once_is_served_by_the_new_spec(world):
    for round_number in range(4):
        seed = 1 + round_number % 2
        await world.apply(wait=False)
        await world.apply(world.manifest("m1", seed=seed))
        assert await world.ask("m1") == pytest.approx(world.answer(8, seed))


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        pytest.param("def broken(:\n", "handler", id="does-not-parse"),
        pytest.param("import nothing_of_that_name\n", "nothing_of_that_name", id="does-not-import"),
        pytest.param("class Other:\n    pass\n", "Handler", id="no-such-class"),
        pytest.param(
            HANDLER.replace("module = torch.nn.Module()", "raise RuntimeError('the oven is cold')"),
            "the oven is cold",
            id="raises-in-build",
        ),
        pytest.param(
            HANDLER.replace('return {"sum": float(self.module.weight.sum(dtype=torch.float64))}', "return object()"),
            "predict returned object",
            id="returns-the-wrong-type",
        ),
    ],
)
async def test_a_bad_handler_says_what_is_wrong_and_the_next_good_edit_recovers(world, handler, said):
    manifest = world.manifest("m1", seed=1)
    manifest["spec"]["runtime"]["handler"]["files"]["handler.py"] = handler
    await world.apply(manifest, world.manifest("m2", seed=2))
    report = world.report("m1")
    assert not report.ready
    assert report.phase == "failed"
    assert said in report.message
    with pytest.raises(DispatchError) as caught:
        await world.ask("m1")
    assert caught.value.status == 503
    assert caught.value.retry_after_seconds
    assert not caught.value.problem.startswith("OmniModel"), "its subject says that"
    assert await world.ask("m2") == pytest.approx(world.answer(8, 2))
    await world.apply(world.manifest("m1", seed=1), world.manifest("m2", seed=2))
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))


async def test_a_handler_that_says_that_the_device_is_lost_is_not_believed(world):
    manifest = world.manifest("m1", seed=1)
    forged = "from omnimodel.errors import OmniError, Reason; raise OmniError('', 'gone', reason=Reason.DEVICE_LOST)"
    manifest["spec"]["runtime"]["handler"]["files"]["handler.py"] = HANDLER.replace(
        "module = torch.nn.Module()", forged
    )
    await world.apply(manifest, world.manifest("m2", seed=2))
    assert world.report("m1").reason == "HandlerFailed"
    assert world.broker.lost is None
    assert await world.ask("m2") == pytest.approx(world.answer(8, 2))


async def test_a_broken_model_that_is_asked_for_all_the_time_is_not_started_all_the_time(world):
    manifest = world.manifest("m1", seed=1)
    manifest["spec"]["probe"]["json"] = command("exit:7")
    await world.apply(manifest, world.manifest("m2", seed=2))
    before = world.instance("m1").history.restarts
    for _ in range(60):
        with pytest.raises(DispatchError) as caught:
            await world.ask("m1")
        assert caught.value.status == 503
        assert "exit status 7" in str(caught.value)
    assert world.instance("m1").history.restarts - before <= 1
    assert await world.ask("m2") == pytest.approx(world.answer(8, 2))


async def test_a_package_that_does_not_exist_is_named(world):
    manifest = world.manifest("m1", seed=1)
    manifest["spec"]["source"] = {"package": {"name": "omnimodel-no-such-package", "version": "1.0"}}
    await world.apply(manifest)
    report = world.report("m1")
    assert report.reason == Reason.SOURCE_NOT_FOUND
    assert "omnimodel-no-such-package" in report.message


async def test_requirements_that_cannot_be_resolved_are_named(world):
    manifest = world.manifest("m1", seed=1)
    manifest["spec"]["runtime"]["environment"] = {"requirements": ["omnimodel-no-such-package==1.0"]}
    await world.apply(manifest)
    report = world.report("m1")
    assert report.reason == Reason.ENVIRONMENT_FAILED
    assert "omnimodel-no-such-package" in report.message


async def test_a_source_the_model_may_not_read_is_told_with_the_command_that_opens_it(world):
    manifest = world.manifest("m1", seed=77)
    file = os.path.join(manifest["spec"]["source"]["path"], "model.safetensors")
    os.chmod(file, 0o600)
    await world.apply(manifest)
    assert "chmod -R o+rX" in str(world.instance("m1").failure)
    os.chmod(file, 0o644)


async def test_an_isolation_the_machine_does_not_give_starts_nothing_and_says_so(world):
    reached = world.agent._spawner.reached
    world.agent._spawner.reached = type(reached)(type(reached.level)("process"), ("a mount namespace of its own",))
    strict = world.pool.model_validate(
        {**world.pool.to_dict(), "spec": {**world.pool.to_dict()["spec"], "isolation": {"level": "namespaces"}}}
    )
    plain, world.pool = world.pool, strict
    try:
        await world.apply(world.manifest("m1", seed=1))
        assert world.report("m1").reason == Reason.ISOLATION_UNAVAILABLE
        assert not world.agent.report().pool.ready
        assert "a mount namespace of its own" in world.agent.report().pool.message
    finally:
        world.agent._spawner.reached = reached
        world.pool = plain


async def test_the_budget_follows_an_edit_of_the_pool(world):
    await world.apply(*[world.manifest(f"m{seed}", seed=seed) for seed in (1, 2, 3)])
    await asyncio.gather(*(world.ask(f"m{seed}") for seed in (1, 2, 3)))
    body = world.pool.to_dict()
    plain = world.pool
    body["spec"]["device"]["memory"] = 64 * MIB
    world.pool = world.pool.model_validate(body)
    try:
        await world.apply(*world.manifests.values())
        device = world.ledger.device
        await world.until(
            lambda: device.capacity_bytes == 64 * MIB and not device.surplus_frames(), "the smaller budget holds"
        )
        world.check_ledger()
        for seed in (1, 2, 3):
            assert await world.ask(f"m{seed}") == pytest.approx(world.answer(8, seed))
    finally:
        world.pool = plain
        await world.apply(*world.manifests.values())
    await world.until(lambda: world.ledger.device.capacity_bytes == 176 * MIB, "the larger budget holds")
