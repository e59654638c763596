"""What people are told of a model while it is brought up: events for all that takes long or goes wrong."""

import pytest

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]


async def told(world, name: str) -> list[str]:
    """The reasons of a model's events, in order."""
    return [event.reason async for event in world.agent.events.follow(follow=False) if event.name == name]


async def test_publishing_and_readiness_are_events(world):
    await world.apply(world.manifest("fresh", seed=31))
    assert [reason for reason in await told(world, "fresh") if reason in {"Publishing", "Ready"}] == [
        "Publishing",
        "Ready",
    ]


async def test_what_cannot_be_fetched_is_an_event(world):
    manifest = world.manifest("lost", seed=1)
    manifest["spec"]["source"] = {"package": {"name": "omnimodel-no-such-package", "version": "1.0"}}
    await world.apply(manifest)
    assert await told(world, "lost") == ["SourceNotFound"]


async def test_a_wrong_answer_is_an_event_and_no_readiness(world):
    wrong = world.manifest("wrong", seed=1)
    wrong["spec"]["probe"]["expect"][0]["near"] = 12345.0
    await world.apply(wrong)
    reasons = await told(world, "wrong")
    assert "ProbeFailed" in reasons
    assert "Ready" not in reasons


async def test_who_waits_for_another_to_be_published_is_queued(world):
    phases = set()
    requests = set()
    manifests = [world.manifest(f"q{seed}", seed=40 + seed) for seed in (1, 2, 3)]
    await world.apply(*manifests, wait=False)

    def all_serve() -> bool:
        reports = [world.report(f"q{seed}") for seed in (1, 2, 3)]
        phases.update(report.phase for report in reports)
        requests.update(report.waiting + report.in_flight for report in reports)
        return all(report.ready for report in reports)

    await world.until(all_serve, "all serve")
    assert "queued" in phases
    assert requests == {0}, "nobody has asked them anything: the probe is no request"


async def test_a_gateway_is_told_what_the_manifest_says(world):
    names = ["Told/Name", {"name": "told:brief", "listed": False, "defaults": {"top": 1}}]
    limits = {"concurrency": 3, "requestBytes": "2Mi"}
    await world.apply(world.manifest("told", seed=51, servedNames=names, limits=limits))
    card = next(card for card in world.agent.models() if card.name == "told")
    assert card.served_names == ("told", "Told/Name", "told:brief")
    assert (card.unlisted, card.defaults) == (("told:brief",), {"told:brief": {"top": 1}})
    assert (card.concurrency, card.request_bytes) == (3, 2 << 20)
    assert card.ready
    assert [tensor["name"] for tensor in card.inputs] == ["command"]
